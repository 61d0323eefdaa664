"""Local training by the user's own function: the same bits as fedkeel's own steps, and refusals."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.errors import CompositionError, ConfigError, RunError, TrainingError
from fedkeel.features.own_training.given import ClientExamples, TrainingRound
from fedkeel.method.context import Round
from fedkeel.method.roles import ClientState

RNG = np.random.default_rng(0)
X = RNG.normal(size=(61, 6))
Y = (X.sum(axis=1) > 0).astype(int)


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(torch.tanh(self.norm(self.fc1(x)))))


def sgd(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
    """The steps that fedkeel makes by itself."""
    optimiser = torch.optim.SGD(model.parameters(), lr=round.lr)
    total = 0.0
    for x, y in data.batches:
        optimiser.zero_grad()
        loss = round.loss(model(x), y)
        loss.backward()
        optimiser.step()
        total += loss.item()
    return {"loss": total / round.steps}


def run(train=sgd, method: str = "fedavg", kind: str = "sequential", out=None, **more):
    engine = {"kind": kind, "dtype": "float64", **more.pop("engine", {})}
    local = {"lr": 0.1, "epochs": 2, "batch_size": 7, **more.pop("local", {})}
    own = None if train is None else fk.LocalTraining(train)
    values = {
        "task": fk.Task(Net),
        "clients": fk.iid(X, Y, clients=3, sizes=[30, 20, 11]),
        "test": (X, Y),
        "rounds": 3,
        "local": fk.Local(**local),
        "engine": fk.Engine(**engine),
        "out": out,
        **more,
    }
    return fk.run(method, local_training=own, **values)


def same(one, other) -> bool:
    of_one, of_other = one.state_dict(), other.state_dict()
    return of_one.keys() == of_other.keys() and all(
        torch.equal(tensor, of_other[name]) for name, tensor in of_one.items()
    )


@pytest.mark.parametrize(
    "method",
    [
        *("fedavg", "momentum", "fedadam", "fedgh", "gradma.s", "globalgc", "fedgc", "krum"),
        *("median", "fedbuff(buffer=2)", "topk", "quantise", "fedvarp", "fednova(length='steps')"),
        *("fedper", "lgfedavg", "dpclient", "fedinit"),
    ],
)
def test_the_same_steps_give_the_same_bits(method: str) -> None:
    """With dropout: torch draws as it does in fedkeel's own steps."""
    own, plain = run(method=method), run(None, method)
    assert own.rows[-1].diagnostics == plain.rows[-1].diagnostics
    losses = ([row.train_loss for row in result.rows[1:]] for result in (own, plain))
    np.testing.assert_allclose(*losses, rtol=1e-12)
    if method not in ("fedper", "lgfedavg"):  # whose models are at the clients
        assert same(own, plain)
    assert [row.personal for row in own.rows] == [row.personal for row in plain.rows]
    assert [row.test for row in own.rows] == [row.test for row in plain.rows]
    assert own.record.key != plain.record.key


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_buffers_are_those_of_the_module(buffers: str) -> None:
    more = {
        "task": fk.Task(lambda: Net(norm=True), buffers=buffers),
        "local": {"drop_last": "always"},
    }
    own, plain = run(**more), run(None, **more)
    for client in range(3) if buffers == "local" else ():
        models = (result.client_model(str(client)) for result in (own, plain))
        assert all(map(torch.equal, *(model.values() for model in models)))
    assert [row.test for row in own.rows] == [row.test for row in plain.rows]


def flipped(x: Tensor, y: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    return x * float(random.choice([-1, 1])), y


@pytest.mark.parametrize(
    "more",
    [
        {"augment": flipped},
        {"local": {"epochs": None, "steps": 4}},
        {"local": {"epochs": None, "steps": 4, "sampling": "random"}},
        {"local": {"batch_size": "all", "schedule": fk.Schedule(kind="exponential", decay=0.5)}},
        {"adversary": fk.Adversary(kind="sign_flip", clients=[1])},
        {
            "privacy": fk.Privacy(epsilon=50.0, delta=1e-3, unit="client", clip=1.0),
            "weights": "uniform",
        },
    ],
    ids=["augment", "steps", "random", "all", "adversary", "privacy"],
)
def test_batches_and_rates_are_those_of_the_settings(more: dict[str, object]) -> None:
    assert same(run(**more), run(None, **more))


def test_a_second_pass_over_the_batches_is_the_same() -> None:
    seen: list[list[Tensor]] = []

    def looks(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
        passes = [[x for x, _ in data.batches] for _ in range(2)]
        assert all(map(torch.equal, *passes))
        assert sum(map(len, passes[0])) == round.epochs * len(data) or round.is_trial
        assert torch.equal(torch.stack([data[i][0] for i in range(len(data))]), data.x)
        seen.append(passes[0])
        return sgd(model, data, round)

    run(looks, augment=flipped)
    assert len(seen) == 1 + 3 * 3  # the trial, and three clients in three rounds


@pytest.mark.parametrize("baseline", ["local", "centralised"])
def test_baselines_train_by_it_too(baseline: str) -> None:
    own, plain = run(method=baseline), run(None, baseline)
    assert [row.test for row in own.rows] == [row.test for row in plain.rows]


def noisy(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
    """Draw from all generators, and go on with a momentum of its own."""
    assert round.device.type == "cpu"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            moved = torch.randn(()) + random.random() + np.random.rand() + round.seed % 7
            kept = round.state.get(name, torch.zeros_like(parameter))
            round.state[name] = 0.5 * kept + 0.01 * moved
            parameter += round.lr * round.state[name]
    return {"loss": 1.0, "drawn": random.random()}


def test_what_it_draws_and_keeps_comes_again(tmp_path: Path) -> None:
    """In worker processes, in runs that go on, and without a trace in the generators."""

    class Ends(fk.Callback):
        def on_round_end(self, row, model) -> None:
            if row.round == 2:
                raise KeyboardInterrupt

    keeps = {"keep_state": True}
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    whole = run(noisy, local=keeps)
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == drawn
    assert same(whole, run(noisy, local=keeps, kind="workers", engine={"workers": 2}))
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(noisy, local=keeps, out=out, callbacks=[Ends()])
    resumed = run(noisy, local=keeps, out=out)
    assert same(whole, resumed)
    assert [row.diagnostics for row in resumed.rows] == [row.diagnostics for row in whole.rows]
    assert "local_training.drawn" in resumed.rows[1].diagnostics
    assert not same(whole, run(noisy, local=keeps, seed=1))
    assert resumed.record.local == "your own noisy, lr 0.1, 2 epochs, batch 7, optimiser state kept"
    assert "train: by your own function" in resumed.record.describe


def test_a_run_of_another_function_is_another_run(tmp_path: Path) -> None:
    run(out=tmp_path)
    assert run(out=tmp_path).record.status == "finished"
    with pytest.raises(RunError, match="another run"):
        run(lambda model, data, round: sgd(model, data, round), out=tmp_path)


def test_weights_may_be_by_the_work_that_was_done() -> None:
    def half(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
        numbers, examples = sgd(model, data, round), round.epochs * len(data)
        return {**numbers, "examples": examples if round.client else 1, "steps": 1}

    assert not same(run(half, weights="processed"), run(weights="processed"))
    assert same(run(half, weights="uniform"), run(weights="uniform"))


def gives(**numbers: object):
    def train(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, object]:
        return numbers

    return train


def changes(change):
    def train(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, object]:
        change(model, round)
        return {"loss": 1.0}

    return train


def widens(model: nn.Module, round: TrainingRound) -> None:
    model.fc2 = nn.Linear(5, 3)


def keeps(model: nn.Module, round: TrainingRound) -> None:
    round.state["m"] = torch.zeros(2)


def notes(model: nn.Module, round: TrainingRound) -> None:
    round.state["m"] = [1.0]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lambda model, data, round: 0.5, "got an object of float"),
        (gives(), "returned no 'loss' at client 0, round 1"),
        (gives(accuracy=1.0), "got 'accuracy'"),
        (gives(loss="low"), "got 'loss': 'low'"),
        (gives(loss=True), "something else than numbers"),
        (gives(loss=torch.zeros(2)), "something else than numbers"),
        (gives(loss=float("nan")), "a number that is not finite"),
        (gives(loss=1.0, steps=0), "got steps = 0"),
        (gives(loss=1.0, steps=1.5), "got steps = 1.5"),
        (gives(loss=1.0, examples=10**6), "raise local.epochs"),
        (changes(widens), r"got 'fc2.weight': \[3, 5\]"),
        (changes(lambda model, round: model.half()), "of torch.float16"),
        (changes(keeps), "set local.keep_state = true"),
        (changes(lambda model, round: delattr(model, "fc2")), "'fc2.weight': nothing"),
    ],
)
def test_what_cannot_be_used_is_refused(train, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        run(train)


def test_state_is_of_tensors() -> None:
    with pytest.raises(TrainingError, match="is not a state"):
        run(changes(notes), local={"keep_state": True})


def test_numbers_are_the_same_in_every_round() -> None:
    def changing(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
        return {"loss": 1.0} if round.is_trial else {"loss": 1.0, "more": 2.0}

    with pytest.raises(TrainingError, match=r"local_training\.more"):
        run(changing)


def test_a_model_that_diverges_is_told_as_always() -> None:
    def diverges(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
        with torch.no_grad():
            model.fc1.weight.fill_(np.nan if not round.is_trial else 0.0)
        return {"loss": 1.0 if round.is_trial else np.nan}

    with pytest.raises(TrainingError, match="diverged"):
        run(diverges)


def test_frozen_parameters_stay_as_they_are() -> None:
    def frozen() -> nn.Module:
        model = Net()
        model.fc1.requires_grad_(False)
        return model

    def thaws(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
        model.requires_grad_(True)
        return sgd(model, data, round)

    def moves(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
        model.fc1.weight.data = torch.zeros(5, 6, dtype=torch.float64)  # its own, as `to` makes it
        return {"loss": 1.0}

    more = {"task": fk.Task(frozen)}
    assert same(run(**more), run(None, **more))
    with pytest.raises(TrainingError, match="changed frozen parameters"):
        run(thaws, **more)
    initial = run(gives(loss=1.0), **more).state_dict()["fc1.weight"]
    assert torch.equal(run(moves, **more).state_dict()["fc1.weight"], initial)


def raises(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
    if round.number == 1:
        raise ValueError("the first line\nand the second")
    return {"loss": 1.0}


@pytest.mark.parametrize("kind", ["sequential", "workers"])
def test_its_own_error_is_shown_whole(kind: str) -> None:
    with pytest.raises(TrainingError, match=r"at client \d, round 2") as caught:
        run(raises, kind=kind)
    error = caught.value
    assert "ValueError: the first line and the second" in str(error)
    assert f"raised in raises, line {raises.__code__.co_firstlineno + 2}" in str(error)
    if kind == "sequential":
        assert isinstance(error.__cause__, ValueError)
    else:  # the exception itself may not be one that can be sent
        assert "ValueError: the first line\nand the second" in error.__notes__[-1]


@pytest.mark.parametrize("engine", [{"kind": "vectorized"}, {"devices": ["cpu"], "kind": "auto"}])
def test_the_vectorized_engine_is_refused(engine: dict[str, object]) -> None:
    with pytest.raises(RunError, match="vectorized engine cannot run local training of your own"):
        run(engine=engine)


def test_auto_takes_an_engine_that_can() -> None:
    assert run(kind="auto").record.engine.kind in ("sequential", "workers")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a function"):
        fk.LocalTraining(3)
    with pytest.raises(ConfigError, match=r"write local_training=fedkeel\.LocalTraining"):
        fk.run(
            "fedavg",
            task=fk.Task(Net),
            clients=fk.iid(X, Y, clients=3),
            test=(X, Y),
            rounds=1,
            local=fk.Local(lr=0.1, epochs=1),
            local_training=sgd,
        )


def test_a_function_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "def train(model, data, round):\n    return {'loss': 0.5}\n\ndef other(model):\n    ...\n"
    )
    (tmp_path / "of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run(None, local={"train": "of_mine:train"}).rows[-1].train_loss == 0.5
    for name, message in (("other", "expected 3 arguments"), ("nothing", "has no 'nothing'")):
        with pytest.raises(ConfigError, match=message):
            run(None, local={"train": f"of_mine:{name}"})
    with pytest.raises(ConfigError, match="both say how clients train"):
        run(local={"train": "of_mine:train"})
    with pytest.raises(ConfigError, match="module of Python's own"):
        run(None, local={"train": "os:system"})


def test_a_budget_for_examples_is_refused() -> None:
    privacy = fk.Privacy(epsilon=5.0, delta=1e-3, unit="example")
    with pytest.raises(CompositionError, match="dpsgd needs LOCAL_STEPS"):
        run(privacy=privacy, local={"epochs": None, "steps": 2, "sampling": "poisson"})


def test_the_guide_runs() -> None:
    guide = Path(__file__).parents[3] / "docs" / "guides" / "own-training.md"
    source = guide.read_text("utf-8").split("```python\n")[1].split("```")[0]
    names = {"net": Net, "clients": fk.iid(X, Y, clients=3), "test": (X, Y)}
    exec(source, names)
    assert names["result"].record.status == "finished"
    assert names["result"].rows[-1].train_loss < names["result"].rows[1].train_loss


@dataclass(frozen=True)
class Noted(ClientState):
    """A part that writes down the training loss that it is told."""

    name: ClassVar[str] = "noted"
    paper: ClassVar[str] = ""

    def init_client(self, start: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def next_client(self, round: Round) -> dict[str, Tensor]:
        round.log("loss", round.loss)
        return {}


def test_parts_are_told_the_loss_that_it_returns() -> None:
    result = run(gives(loss=0.75, steps=3), method=f"{__name__}:Noted")
    assert [row.diagnostics["noted.loss"] for row in result.rows[1:]] == [0.75] * 3
