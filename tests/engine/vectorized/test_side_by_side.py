"""Runs whose clients train side by side: the same numbers, whoever is beside them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.each import each
from torch import nn

import fedkeel as fk
from fedkeel import config
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.numerics import Numerics
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.engine.vectorized.side_by_side import are_alike, side_by_side
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.method.parts.index import METHODS
from fedkeel.records.folder import RunFolder
from fedkeel.records.run_record import EngineChoice
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import start

CLIENTS, CLASSES = 6, 3

CHOICE = EngineChoice(
    kind="vectorized", workers=1, parallel_clients=4, parallel_runs=4, device="cpu"
)

SOME = [
    "fedavg",
    "scaffold",
    "fedreg",
    "gradma",
    "fedgh",
    "feddyn",
    "gcfed",
    "fedper",
    "momentum",
    "local",
]


def federation(seed: int, dtype: torch.dtype = torch.float64) -> fk.Federation:
    """Clients of the same 90 examples, who has which by seed."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(90, 5, generator=random, dtype=dtype)
    y = torch.randint(0, CLASSES, (90,), generator=random)
    rows = np.random.default_rng(seed).permutation(90)
    ends = [17, 30, 36, 55, 72]
    return fk.federation(fk.dataset(x, y, classes=CLASSES), np.split(rows, ends))


FEDERATIONS = {(s, d): federation(s, d) for s in range(4) for d in (torch.float64, torch.float32)}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def ready(method: str = "fedavg", seed: int = 0, lr: float = 0.1, **more: Any) -> Prepared:
    dtype = more.pop("dtype", "float64")
    model = more.pop("model", small)
    values: dict[str, Any] = {
        "method": method,
        "seed": seed,
        "rounds": 4,
        "weights": "examples",
        "local": fk.Local(lr=lr, epochs=2, batch_size=4),
        "cohort": fk.Cohort(clients=4),
        "engine": fk.Engine(dtype=dtype, kind="vectorized", workers=1, checkpoint_seconds=0),
        **more,
    }
    torch_type = getattr(torch, dtype)
    clients = FEDERATIONS
    data = clients[0, torch_type].data
    test = fk.Dataset(data.x[:20], data.y[:20], CLASSES)
    return prepare(
        config.Run(**values),
        Ingredients(fk.Task(model), lambda s: clients[s, torch_type], test, "small", False),
    )


def made(runs: list[Prepared], choice: EngineChoice = CHOICE) -> list[Result]:
    return side_by_side([partial(start, run, None, choice=choice) for run in runs])


def alone(run: Prepared) -> Result:
    return start(run, None, choice=replace(CHOICE, parallel_runs=None))


def assert_close(first: Result, second: Result, tolerance: float = 1e-12) -> None:
    assert [row.round for row in first.rows] == [row.round for row in second.rows]
    for name, tensor in first.params.items():
        torch.testing.assert_close(second.params[name], tensor, rtol=0, atol=tolerance)
    for one, other in zip(first.rows, second.rows, strict=True):
        np.testing.assert_allclose(one.train_loss or 0, other.train_loss or 0, atol=1e-11)
        assert one.clients == other.clients


def same_bits(first: Result, second: Result) -> bool:
    return all(torch.equal(t, second.params[name]) for name, t in first.params.items())


def agrees(method: str) -> None:
    try:
        runs = [ready(method, seed) for seed in (0, 1, 2)]
    except FedkeelError as error:
        pytest.skip(f"{method} does not run on this task: {error.what}")
    tolerance = 1e-10 if method == "fedgc" else 1e-12  # its projections enlarge rounding
    for run, result in zip(runs, made(runs), strict=True):
        assert_close(alone(run), result, tolerance)


@each("method", SOME)
def test_seeds_side_by_side_give_what_each_gives_by_itself(method: str) -> None:
    agrees(method)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(METHODS) - set(SOME)))
def test_every_method_side_by_side(method: str) -> None:
    agrees(method)


@each("method", ["fedavg", "scaffold", "feddyn", "fednova"])
def test_rates_side_by_side_give_what_each_gives_by_itself(method: str) -> None:
    """A rate that were rounded to float32 on its way would move the parameters by 1e-9."""
    runs = [ready(method, lr=lr) for lr in (0.03, 0.1, 0.3)]
    results = made(runs)
    for run, result in zip(runs, results, strict=True):
        assert_close(alone(run), result)
    assert not same_bits(results[0], results[1])


@each(
    "methods",
    [
        ("momentum(beta=0.1)", "momentum(beta=0.9)"),
        ("fedadam(lr=0.01)", "fedadam(lr=0.1)"),
        ("fedavgm(beta=0.5)", "fedavgm(beta=0.9)"),
    ],
)
def test_numbers_of_the_server_may_differ(methods: tuple[str, str]) -> None:
    runs = [ready(method) for method in methods]
    assert are_alike(runs[0].setup, runs[1].setup)
    results = made(runs)
    for run, result in zip(runs, results, strict=True):
        assert_close(alone(run), result)
    assert not same_bits(*results)


def test_clients_of_several_runs_are_in_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    genuine = VectorizedTrainer._train

    def seen(self: VectorizedTrainer, group: Any, *others: Any) -> Any:
        sizes.append((len(group), len(group.distinct_runs)))
        return genuine(self, group, *others)

    monkeypatch.setattr(VectorizedTrainer, "_train", seen)
    made([ready(seed=seed) for seed in (0, 1, 2)])
    assert sizes == [(12, 3)] * 4


@each("method", ["fedavg", "scaffold", "gradma", "fedgh", "gcfed"])
def test_the_bits_of_a_run_do_not_depend_on_who_is_beside_it(method: str) -> None:
    """In float32, where another order of a sum would show."""
    of = {seed: ready(method, seed, dtype="float32") for seed in range(4)}
    choice = replace(CHOICE, dtype="float32")
    three = made([of[0], of[1], of[2]], choice)
    two = made([of[3], of[2]], choice)
    (single,) = made([of[2]], choice)
    assert same_bits(three[2], two[1])
    assert same_bits(three[2], single)


def test_dropout_is_that_of_the_run() -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))

    runs = [ready(seed=seed, model=dropping) for seed in (0, 1)]
    for run, result in zip(runs, made(runs), strict=True):
        assert_close(alone(run), result)


def test_runs_of_another_structure_train_by_themselves() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, CLASSES))

    first = ready().setup
    assert are_alike(first, ready(seed=1, lr=0.2).setup)
    for other in (
        ready(model=wide),
        ready("fedprox(mu=0.1)"),
        ready(local=fk.Local(lr=0.1, epochs=2, batch_size=4, momentum=0.5)),
        ready(rounds=5),
    ):
        assert not are_alike(first, other.setup)
    runs = [ready(), ready(model=wide), ready("scaffold")]
    for run, result in zip(runs, made(runs), strict=True):
        assert same_bits(made([run, ready(seed=3)])[0], result)


def test_groups_compute_as_the_run_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one thread and in the run's precision, though another thread than the run's trains."""
    seen = []
    genuine = VectorizedTrainer._train

    def watched(self: VectorizedTrainer, *given: Any) -> Any:
        seen.append(Numerics.now())
        return genuine(self, *given)

    monkeypatch.setattr(VectorizedTrainer, "_train", watched)
    for precision in ("float32", "bf16"):
        engine = fk.Engine(kind="vectorized", workers=1, precision=precision)
        run = ready(dtype="float32", engine=engine, rounds=1)
        other = ready(dtype="float32", engine=engine, rounds=1, seed=1)
        alone(run)
        made([run, other])
        one, both = seen
        assert both == one
        assert one.threads == 1
        seen.clear()


def test_a_part_that_reads_the_rate_is_not_beside_another_rate(tmp_path: Path) -> None:
    """Compiled steps would hold the first run's."""
    (tmp_path / "rated.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from fedkeel.method.local_optimiser import OPTIMISERS\n"
        "from fedkeel.method.roles import ClientOptimiser\n"
        "@dataclass(frozen=True)\n"
        "class Rated(ClientOptimiser):\n"
        "    name = 'rated'\n"
        "    def local_optimiser(self, local, no_decay):\n"
        "        return OPTIMISERS['sgd'].of(local, no_decay)\n"
        "    def start_optimiser(self, initial, broadcast, state):\n"
        "        return initial\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        first, second = (ready("rated:Rated", lr=lr).setup for lr in (0.1, 0.3))
        assert not are_alike(first, second)
        assert are_alike(first, ready("rated:Rated", seed=1).setup)


class Ends(Callback):
    """Ends a run after some rounds."""

    def __init__(self, after: int) -> None:
        self._after = after

    def stop_reason(self, row: Any) -> str:
        return "enough" if row.round >= self._after else ""


def test_a_run_that_ends_early_leaves_the_others_alone() -> None:
    first, second = ready(seed=0), ready(seed=1)
    short, long = side_by_side(
        [
            partial(start, first, None, choice=CHOICE, callbacks=[Ends(2)]),
            partial(start, second, None, choice=CHOICE),
        ]
    )
    assert (short.rows[-1].round, long.rows[-1].round) == (2, 4)
    assert same_bits(long, made([second, ready(seed=2)])[0])


class Breaks(Callback):
    """Raises an error in a round."""

    def __init__(self, round: int, error: BaseException) -> None:
        self._round, self._error = round, error

    def on_round_end(self, row: Any, model: Any) -> None:
        if row.round == self._round:
            raise self._error


def test_a_study_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """The runs are then at different rounds, and each has been beside others."""
    of = {seed: ready("scaffold", seed, dtype="float32") for seed in (0, 1, 2)}
    choice = replace(CHOICE, dtype="float32")
    whole = made(list(of.values()), choice)

    def run(seed: int, *callbacks: Callback) -> Result:
        return start(of[seed], tmp_path / str(seed), True, callbacks, choice=choice)

    def session(*seeds: int, **breaks: int) -> list[Result]:
        stops = {seed: breaks.get(f"run{seed}", 99) for seed in seeds}
        return side_by_side(
            [partial(run, k, Breaks(at, KeyboardInterrupt())) for k, at in stops.items()]
        )

    def rounds() -> dict[int, int]:
        folders = {seed: RunFolder(tmp_path / str(seed)) for seed in of}
        return {k: each.rows()[-1].round for k, each in folders.items() if each.exists()}

    with pytest.raises(KeyboardInterrupt):
        session(0, 1, run1=2)
    assert rounds() == {0: 2, 1: 2}
    with pytest.raises(KeyboardInterrupt):
        session(0, 2, run0=3)
    assert rounds() == {0: 3, 1: 2, 2: 1}
    for expected, result in zip(whole, session(0, 1, 2), strict=True):
        assert same_bits(expected, result)
    assert rounds() == {0: 4, 1: 4, 2: 4}


def test_the_error_of_one_run_is_that_run_s_own() -> None:
    def catching(run: Prepared) -> Result | TrainingError:
        try:
            return start(run, None, choice=CHOICE)
        except TrainingError as error:
            return error

    wild = ready(seed=1, lr=1e308)
    calm = ready(seed=0)
    results = side_by_side([partial(catching, calm), partial(catching, wild)])
    assert isinstance(results[0], Result)
    assert_close(alone(calm), results[0])
    assert isinstance(results[1], TrainingError)


def test_seconds_of_a_run_are_its_share() -> None:
    """Not the time in which it waited for the others."""
    results = made([ready(seed=seed) for seed in (0, 1, 2)])
    for result in results:
        for row in result.rows[1:]:
            assert (row.processor_seconds or 0) > 0
            assert sum(row.seconds.values()) < 60


def wide() -> nn.Module:
    layers = nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
    return nn.Sequential(*layers)


@each("method", ["fedreg", "fedsam", "clip(norm=0.1)"])
def test_inner_products_do_not_depend_on_who_is_beside_a_run(method: str) -> None:
    """Those of long vectors did, where one client was left in a group."""
    local = fk.Local(lr=0.1, epochs=2, batch_size=6)  # one client makes the most steps
    more: dict[str, Any] = {"dtype": "float32", "model": wide, "local": local}
    of = {seed: ready(method, seed, **more) for seed in range(4)}
    choice = replace(CHOICE, dtype="float32")
    three, two = made([of[0], of[1], of[2]], choice), made([of[3], of[2]], choice)
    (single,) = made([of[2]], choice)
    assert same_bits(three[2], single)
    assert same_bits(two[1], single)
