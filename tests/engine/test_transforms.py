"""A user's random transform: the same numbers in every engine, and after a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.data.augment import named_transform, transformed
from fedkeel.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(61, 6))
Y = (X.sum(axis=1) > 0).astype(int)


def noisy(x: Tensor, y: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Add noise of both kinds of generators, and change some labels."""
    x += torch.from_numpy(random.normal(size=x.shape)).to(x.dtype)
    flip = torch.rand(len(y)) < 0.2
    return x * (1 + 0.1 * torch.randn(1)), torch.where(flip, 1 - y, y)


def run(augment=noisy, kind="sequential", out=None, **more):
    return fk.run(
        "fedavg",
        task=fk.Task(lambda: nn.Linear(6, 2)),
        clients=fk.iid(X, Y, clients=3, sizes=[30, 20, 11]),
        test=(X, Y),
        rounds=3,
        local=fk.Local(lr=0.1, epochs=2, batch_size=7),
        engine=fk.Engine(kind=kind, dtype="float64", **more),
        augment=augment,
        out=out,
    )


@pytest.fixture(scope="module")
def reference():
    return run()


def test_it_changes_what_is_learned(reference) -> None:
    plain = run(None)
    assert not torch.equal(plain.state_dict()["weight"], reference.state_dict()["weight"])
    assert plain.record.key != reference.record.key


def test_workers_give_the_same_bits(reference) -> None:
    workers = run(kind="workers", workers=2)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(workers.state_dict()[name], tensor)


@pytest.mark.parametrize("parallel_clients", [1, 3])
def test_the_vectorized_engine_sees_the_same_batches(reference, parallel_clients: int) -> None:
    vectorized = run(kind="vectorized", parallel_clients=parallel_clients)
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(vectorized.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)


def test_a_run_that_goes_on_gives_the_same_bits(reference, tmp_path: Path) -> None:
    class Ends(fk.Callback):
        def on_round_end(self, row, model) -> None:
            if row.round == 2:
                raise KeyboardInterrupt

    settings = {
        "task": fk.Task(lambda: nn.Linear(6, 2)),
        "clients": fk.iid(X, Y, clients=3, sizes=[30, 20, 11]),
        "test": (X, Y),
        "rounds": 3,
        "local": fk.Local(lr=0.1, epochs=2, batch_size=7),
        "engine": fk.Engine(kind="sequential", dtype="float64"),
        "augment": noisy,
        "out": tmp_path / "run",
    }
    with pytest.raises(KeyboardInterrupt):
        fk.run("fedavg", **settings, callbacks=[Ends()])
    resumed = fk.run("fedavg", **settings)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor)


def test_each_round_client_and_step_has_a_stream_of_its_own() -> None:
    x, y = torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)

    def drawn(*place: int) -> Tensor:
        return transformed(noisy, x.clone(), y, *place)[0]

    places = [(0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 0, 2)]
    batches = [drawn(*place) for place in places]
    assert torch.equal(drawn(*places[0]), batches[0])
    assert len({tuple(batch.flatten().tolist()) for batch in batches}) == len(places)
    torch.manual_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    drawn(*places[0])
    assert torch.equal(torch.rand(1), first)  # the model's own dropout goes on as it was


def raises(x, y, random):
    raise ValueError("no such flip")


@pytest.mark.parametrize(
    ("augment", "says"),
    [
        (raises, ("augment raised an error at client 0, step 1", "no such flip", "in raises")),
        (lambda x, y, random: x, ("of the same form", "(x, y), here [4, 6] float64 and [4] int64")),
        (lambda x, y, random: (x[:, :3], y), ("got [4, 3] float64, [4] int64",)),
        (lambda x, y, random: (x + np.random.rand(), y), ("does not repeat itself",)),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_run(augment, says: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as caught:
        run(augment)
    assert len(caught.value.lines()) <= 4
    for words in says:
        assert words in str(caught.value)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="'augment' is not a function"):
        run("flip")


def test_a_file_names_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "changes_of_mine.py").write_text("def flip(x, y, random):\n    return x, y\n")
    assert callable(named_transform("changes_of_mine:flip"))
    assert named_transform("crop_flip") is True
    assert named_transform("none") is False
    with pytest.raises(DataError, match="has no 'flop'"):
        named_transform("changes_of_mine:flop")
    from fedkeel.config import Data

    assert Data(source="own.csv", augment="changes_of_mine:flip").augment.endswith(":flip")
    with pytest.raises(ConfigError, match="there is no 'augment' 'crop'"):
        Data(source="own.csv", augment="crop")


class OfTwo(nn.Module):
    """A net of two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.out(torch.cat([left, right], dim=1))


def swap_or_not(x, y, random):
    scale = torch.from_numpy(random.normal(size=(len(y), 1)))
    return {"left": x["left"] * scale, "right": x["right"] + scale}, y


def test_several_inputs_by_name_are_changed_together() -> None:
    inputs = {"left": X[:, :2], "right": X[:, 2:]}
    results = [
        fk.run(
            "fedavg",
            task=fk.Task(OfTwo),
            clients=fk.iid(inputs, Y, clients=3, sizes=[30, 20, 11]),
            test=(inputs, Y),
            rounds=2,
            local=fk.Local(lr=0.1, epochs=1, batch_size=7),
            engine=fk.Engine(kind=kind, dtype="float64"),
            augment=augment,
        )
        for kind, augment in (
            ("sequential", swap_or_not),
            ("vectorized", swap_or_not),
            ("sequential", None),
        )
    ]
    first, second, plain = (result.state_dict()["out.weight"] for result in results)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(first, plain)
