"""The engine that `auto` takes: a rule of the experiment and the machine, which reads no clock."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedkeel as fk
from each import each
from fedkeel import config
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.choose import engine_rule as module
from fedkeel.engine.choose.engine_rule import EngineRule, choose_engine, kept_engine
from fedkeel.engine.choose.work import gradient_multiply_adds, run_work
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.vectorized import trial as trial_module
from fedkeel.engine.vectorized.facts import SetupFacts
from fedkeel.errors import RunError
from fedkeel.records.run_record import EngineChoice
from fedkeel.runner.prepare import prepare


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "core_count", lambda: 2)


@pytest.fixture(autouse=True)
def _clocks_that_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever measures anything gets other seconds each time."""
    random = np.random.default_rng()
    for name in ("perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(time, name, lambda: float(random.exponential(100.0)))


def dense(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional(channels: int, size: int) -> nn.Module:
    layers = (nn.Conv2d(1, channels, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(channels * (size // 2) ** 2, 10))


MLP = (partial(dense, 64, 64, 10), (64,))
TWO_NN = (partial(dense, 784, 512, 256, 10), (784,))
SMALL_CNN = (partial(convolutional, 4, 8), (1, 8, 8))
CNN = (partial(convolutional, 32, 28), (1, 28, 28))


def run(
    network: tuple[partial[nn.Module], tuple[int, ...]] = MLP,
    cohort: int = 20,
    examples: int = 40,
    batch: int = 10,
    rounds: int = 1000,
    method: str = "fedavg",
    loss: object = None,
    uneven: bool = False,
    **engine: object,
) -> Prepared:
    """Prepare a run whose clients all take part in each round.

    They have equally many examples, or every other client has half as many.
    """
    make, shape = network
    x = torch.randn(examples * cohort, *shape, generator=torch.Generator().manual_seed(0))
    data = fk.dataset(x, torch.arange(len(x)) % 10)
    rows = list(torch.arange(len(x)).view(cohort, examples).numpy())
    if uneven:
        rows = [row[: examples // (1 + k % 2)] for k, row in enumerate(rows)]
    clients = fk.federation(data, rows)
    settings = config.Run(
        method=method,
        rounds=rounds,
        local=fk.Local(lr=0.1, epochs=1, batch_size=batch),
        cohort=fk.Cohort(clients=cohort),
        engine=config.build(config.Engine, engine, "test"),
    )
    task = fk.Task(make, **({"loss": loss} if loss else {}))
    return prepare(settings, Ingredients(task, lambda _: clients, data, "net"))


def test_multiply_adds_are_those_of_the_layers() -> None:
    """Forward and both gradients of each layer, but the gradient by the inputs of the first."""
    layers = 64 * 64, 64 * 10
    assert gradient_multiply_adds(run(MLP).setup) == 2 * layers[0] + 3 * layers[1]
    layers = 28 * 28 * 32 * 25, 32 * 14 * 14 * 10
    assert gradient_multiply_adds(run(CNN, 2, 4).setup) == 2 * layers[0] + 3 * layers[1]
    work = run_work(run(MLP, cohort=20, examples=45, batch=10, rounds=7))
    assert (work.steps, work.batch, work.cohort, work.rounds) == (5, 10, 20, 7)


class Recurrent(nn.Module):
    """Twelve times the same layer, in plain operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = torch.tanh(self.layer(x))
        return x


@each(
    ("rounds", "runs", "kind"), [(4, 1, "sequential"), (100, 1, "workers"), (100, 20, "vectorized")]
)
def test_what_takes_long_to_compile_is_compiled_for_long_runs_or_many(
    rounds: int, runs: int, kind: str
) -> None:
    """Many runs of a study share what the first of them compiles."""
    prepared = run((Recurrent, (64,)), cohort=4, rounds=rounds)
    assert run_work(prepared).operations >= 12 * 4  # forward and backward of a product and of tanh
    rule = EngineRule()
    rule.add(prepared, runs)
    assert rule.choose().kind == kind


@each(
    ("of_run", "expected"),
    [
        # a short run is exact, in this process where its rounds are short too
        ({"network": MLP, "cohort": 2, "examples": 10, "rounds": 30}, ("sequential", 1, 1)),
        ({"network": TWO_NN, "cohort": 20, "batch": 40, "rounds": 20}, ("workers", 2, 1)),
        # many small steps are soon worth a few tenths of a second to compile them
        ({"network": MLP, "cohort": 20, "rounds": 30}, ("vectorized", 1, 20)),
        # dense networks train in groups, as many as there are workers; a worker's share is cut
        ({"network": MLP, "cohort": 200}, ("vectorized", 2, 25)),
        ({"network": TWO_NN, "cohort": 20, "batch": 40}, ("vectorized", 2, 10)),
        # rounds too short to be sent to other processes are one group
        ({"network": MLP, "cohort": 20}, ("vectorized", 1, 20)),
        ({"network": MLP, "cohort": 10, "rounds": 3000}, ("vectorized", 1, 10)),
        # small batches leave room for more clients
        ({"network": MLP, "cohort": 200, "batch": 4}, ("vectorized", 2, 50)),
        # convolutions get slower side by side, unless they are so small that overhead decides
        ({"network": CNN, "cohort": 20}, ("vectorized", 2, 1)),
        ({"network": CNN, "cohort": 20, "rounds": 3}, ("workers", 2, 1)),
        ({"network": CNN, "cohort": 20, "rounds": 1}, ("sequential", 1, 1)),
        ({"network": SMALL_CNN, "cohort": 200}, ("vectorized", 2, 25)),
    ],
)
def test_the_rule(of_run: dict[str, object], expected: tuple[str, int, int]) -> None:
    chosen = choose_engine(run(**of_run))
    assert (chosen.kind, chosen.workers, chosen.parallel_clients) == expected
    assert (chosen.asked, chosen.device, chosen.reasons) == ("auto", "cpu", [])


def test_longer_runs_take_more_nominal_seconds_in_every_engine() -> None:
    short, long = (run_work(run(rounds=rounds)) for rounds in (10, 1000))
    for workers in (1, 2):
        assert short.exact_seconds(workers) < long.exact_seconds(workers)
        assert short.compiled_seconds(workers, 10) < long.compiled_seconds(workers, 10)
        shared, tried = long.compiled_seconds(workers, 10, 0.1), long.compiled_seconds(workers, 10)
        assert shared < tried < long.compiled_seconds(workers, 10, is_tried=True)


def test_activations_take_time_that_processes_share() -> None:
    few = run_work(run(SMALL_CNN, batch=10))
    assert few.entries > 10 * 4 * 8 * 8 * 2  # of each image what the convolution and ReLU compute
    assert run_work(run(SMALL_CNN, batch=20)).entries == 2 * few.entries
    many = replace(few, entries=100 * few.entries)
    one, two = (many.exact_seconds(n) - few.exact_seconds(n) for n in (1, 2))
    assert one == pytest.approx(2 * two)
    assert many.compiled_seconds(1, 20) > few.compiled_seconds(1, 20)


class Attention(nn.Module):
    """Scores of the mean of what the places say that each place attends to."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.qkv, self.head = nn.Linear(32, 3 * 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).transpose(-4, -2).unbind(-3)
        if self.is_fused:
            seen = F.scaled_dot_product_attention(q, k, v)
        else:
            seen = torch.softmax(q @ k.mT / 4, -1) @ v
        return self.head(seen.transpose(-2, -3).flatten(-2).mean(-2))


@pytest.mark.parametrize(
    ("is_fused", "is_large", "parallel"), [(True, True, 1), (True, False, 10), (False, True, 10)]
)
def test_large_networks_with_fused_attention_train_one_client_at_a_time(
    is_fused: bool, is_large: bool, parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = (partial(Attention, is_fused), (12, 32))
    work = run_work(run(network))
    assert work.fused_attention == is_fused
    monkeypatch.setattr(module, "SMALL_ATTENTION", work.multiply_adds - is_large)
    chosen = choose_engine(run(network))
    assert (chosen.kind, chosen.parallel_clients) == ("vectorized", parallel)
    assert choose_engine(run(network, parallel_clients=4)).parallel_clients == 4


def test_where_arithmetic_decides_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG_STEP", run_work(run(MLP)).multiply_adds - 1)
    assert choose_engine(run(MLP)).kind == "workers"
    assert choose_engine(run(MLP, batch=8)).kind == "vectorized"


@pytest.mark.parametrize("rounds", [20, 1000])
def test_methods_and_seeds_do_not_matter(rounds: int) -> None:
    """FedReg takes twenty times as long as FedAvg, and both get one engine."""
    expected = choose_engine(run(rounds=rounds))
    for method in ("fedreg", "scaffold", "fedgc", "fedsgd"):
        assert choose_engine(run(rounds=rounds, method=method)) == expected
    again = run(rounds=rounds)
    other = again.settings.model_copy(update={"seed": 5})
    assert choose_engine(prepare(other, again.ingredients)) == expected


def test_what_was_asked_for_stays() -> None:
    chosen = choose_engine(run(workers=3))
    assert (chosen.workers, chosen.parallel_clients) == (3, 7)
    chosen = choose_engine(run(kind="vectorized", rounds=1, workers=3, parallel_clients=4))
    assert (chosen.kind, chosen.workers, chosen.parallel_clients) == ("vectorized", 3, 4)
    chosen = choose_engine(run(kind="vectorized", rounds=1))
    assert (chosen.kind, chosen.workers, chosen.parallel_clients) == ("vectorized", 1, 20)
    assert choose_engine(run(kind="workers")).kind == "workers"
    assert choose_engine(run(kind="sequential", workers=4)).workers == 1


class Branches(nn.Linear):
    """Its Python depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores if scores.sum() > 0 else 2 * scores


def test_a_model_that_cannot_be_compiled_is_trained_exactly() -> None:
    model = (partial(Branches, 64, 10), (64,))
    chosen = choose_engine(run(model))
    assert (chosen.kind, chosen.workers) == ("workers", 2)
    assert len(chosen.reasons) == 1
    assert chosen.reasons[0].startswith("steps are not compiled: ")
    rule = EngineRule()
    for method in ("fedprox", "fedavg"):
        rule.add(run(model, method=method))
    assert rule.choose() == replace(chosen, reasons=[f"fedprox: {chosen.reasons[0]}"])


def test_the_order_of_methods_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be padded keeps all from training clients of other sizes side by side."""

    def facts(setup: TrainingSetup) -> SetupFacts:
        obstacle = "it looks at the padding" if setup.training.plan.expression != "fedavg" else ""
        return SetupFacts("", None, obstacle, short_rounds=False)

    monkeypatch.setattr(module, "establish", facts)
    chosen = []
    for methods in (("fedavg", "fedprox"), ("fedprox", "fedavg")):
        rule = EngineRule()
        for method in methods:
            rule.add(run(method=method, uneven=True))
        chosen.append(rule.choose())
    assert chosen[0] == chosen[1]
    assert chosen[0].parallel_clients == 1


def test_a_gpu_is_left_alone_by_a_run_that_is_soon_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fedkeel.engine.choose.device.device_error", lambda *_: "")
    assert choose_engine(run(rounds=20)).device == "cpu"
    for more in ({"rounds": 1000}, {"device": "cuda", "rounds": 1}, {"kind": "vectorized"}):
        found = choose_engine(run(CNN, examples=20, **more))
        assert (found.device, found.kind, found.parallel_clients) == ("cuda", "vectorized", 20)
        assert found.workers == 1


def two_convolutions(channels: int) -> nn.Module:
    layers = (nn.Conv2d(1, channels, 5, padding=2), nn.Conv2d(channels, channels, 5, padding=2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


@pytest.mark.parametrize(("channels", "parallel"), [(16, 20), (128, 1)])
def test_clients_whose_convolutions_fill_a_gpu_train_one_after_the_other(
    channels: int, parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fedkeel.engine.choose.device.device_error", lambda *_: "")
    monkeypatch.setattr(module, "_obstacle", lambda *_: pytest.fail("nothing depends on it"))
    network = (partial(two_convolutions, channels), (1, 16, 16))
    found = choose_engine(run(network))
    assert (found.device, found.parallel_clients) == ("cuda", parallel)


@pytest.mark.parametrize(("channels", "tried"), [(1, 2), (64, 1)])
def test_as_many_clients_are_tried_side_by_side_as_will_train_so(
    channels: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def trial(setup: TrainingSetup, message: object, clients: int) -> str:
        seen.append(clients)
        return compile_obstacle(setup, message, clients)

    compile_obstacle = trial_module.compile_obstacle
    monkeypatch.setattr(trial_module, "compile_obstacle", trial)
    found = choose_engine(run((partial(two_convolutions, channels), (1, 16, 16)), rounds=10_000))
    assert seen == [tried]
    assert found.kind == "vectorized"
    assert (found.parallel_clients == 1) == (tried == 1)


def test_the_sequential_engine_trains_on_a_gpu_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fedkeel.engine.choose.device.device_error", lambda *_: "")
    assert choose_engine(run(kind="sequential")).device == "cpu"
    assert choose_engine(run(kind="sequential", device="cuda")).device == "cuda"
    with pytest.raises(Exception, match="'vectorized' and 'sequential'"):
        fk.Engine(kind="workers", device="cuda")


def test_a_run_goes_on_with_the_same_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fk.Engine(workers=1)
    before = EngineChoice("workers", 4, 1)
    assert kept_engine(before, fk.Engine()) == before
    assert kept_engine(before, engine) == EngineChoice("sequential", 1, 1)
    there = EngineChoice("ray", 4, None, address="10.0.0.7:6379")
    assert kept_engine(there, engine) == EngineChoice("sequential", 1, None)
    groups = EngineChoice("vectorized", 2, 8)
    assert kept_engine(groups, engine) == replace(groups, workers=1)
    assert kept_engine(groups, fk.Engine(kind="vectorized")) == groups
    assert kept_engine(groups, fk.Engine(kind="vectorized", parallel_clients=2)) is None
    assert kept_engine(groups, fk.Engine(kind="sequential")) is None


def test_a_run_of_a_gpu_does_not_go_on_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = EngineChoice("vectorized", 1, 8, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match=r"(?s)begun on a GPU.*engine.device = 'cpu'"):
        kept_engine(before, fk.Engine())
    assert kept_engine(before, fk.Engine(device="cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kept_engine(before, fk.Engine()) == before
