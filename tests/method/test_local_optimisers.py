"""Local optimisers against torch's own: one client with all examples is a plain training run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from each import each
from fedkeel import tree
from fedkeel.data import batches
from fedkeel.engine.base import ClientJob
from fedkeel.engine.client_inputs import take_examples
from fedkeel.engine.local import train_client
from fedkeel.errors import CompositionError, ConfigError
from fedkeel.method.context import Round
from fedkeel.method.grammar import parse
from fedkeel.method.legality import check_optimiser
from fedkeel.method.local_loop import client_start, client_step
from fedkeel.method.local_optimiser import OPTIMISERS, LocalAdam, LocalSGD
from fedkeel.method.local_path import nonlinear_optimiser, path_length
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import ClientOptimiser, ClientState
from fedkeel.method.server_round import server_message
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.start import start
from fedkeel.study.conformance.small_federation import ADAMW, SmallFederation
from fedkeel.tree import State, Tree
from toys import prepared, same

ROUNDS, EPOCHS = 3, 2


class Net(nn.Module):
    """Two layers, and a parameter that no gradient ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 6), nn.Linear(6, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


@cache
def arrays(count: int = 45) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.normal(size=(count, 5)), random.integers(0, 3, size=count)


@cache
def start_module() -> nn.Module:
    torch.manual_seed(5)
    return Net().double()


def run(local: fk.Local, sizes: tuple[int, ...] = (45,), **engine: Any) -> fk.Result:
    """Train with fedkeel, clients of these sizes."""
    x, y = arrays()
    cuts = np.cumsum((0, *sizes))
    clients = {f"c{i}": (x[a:b], y[a:b]) for i, (a, b) in enumerate(pairwise(cuts))}
    values = {"kind": "sequential", "dtype": "float64", **engine}
    return fk.run(
        "fedavg",
        task=fk.Task(lambda: copy.deepcopy(start_module())),
        clients=fk.from_clients(clients),
        test=(x, y),
        rounds=ROUNDS,
        local=local,
        engine=fk.Engine(**values),
    )


Schedules = list[torch.optim.lr_scheduler.LRScheduler]


def plain(
    local: fk.Local,
    make: Callable[[Any], torch.optim.Optimizer],
    schedule: Callable[[torch.optim.Optimizer], Schedules] = lambda _: [],
    over: str = "rounds",
) -> dict[str, torch.Tensor]:
    """Train only with torch: the same batches, its own optimiser, a new one in each round."""
    module, (x, y) = copy.deepcopy(start_module()), map(torch.from_numpy, arrays())
    rates = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=local.lr)  # holds only the rate
    schedulers = schedule(rates)
    for round in range(ROUNDS):
        optimiser = make(module.parameters())
        for positions in batches.plan(local, len(x), 0, round, 0):
            optimiser.param_groups[0]["lr"] = rates.param_groups[0]["lr"]
            optimiser.zero_grad()
            for piece in torch.from_numpy(positions).split(int(local.batch_size)):
                loss = nn.functional.cross_entropy(module(x[piece]), y[piece])
                (loss * len(piece) / len(positions)).backward()
            if local.clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), local.clip_norm)
            optimiser.step()
            if over == "steps":
                step_all(rates, schedulers)
        if over == "rounds":
            step_all(rates, schedulers)
    return {name: p.detach() for name, p in module.named_parameters()}


def step_all(optimiser: torch.optim.Optimizer, schedulers: Schedules) -> None:
    optimiser.step()
    for scheduler in schedulers:
        scheduler.step()


def distance(result: fk.Result, params: dict[str, torch.Tensor]) -> float:
    assert result.params.keys() == params.keys()
    return max(float((result.params[k] - p).abs().max()) for k, p in params.items())


WORK = {"epochs": EPOCHS, "batch_size": 8}
OPTIMS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adam": (
        {"lr": 0.01, "optimiser": "adam", "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-4),
    ),
    "adamw": ({"lr": 0.01, "optimiser": "adamw"}, lambda p: torch.optim.AdamW(p, lr=0.01)),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.3},
    "accumulated": {"accumulate": 4},
    "both": {"clip_norm": 0.3, "accumulate": 2},
}


@each("variant", VARIANTS)
@each("name", OPTIMS)
def test_one_client_is_a_plain_run_of_torch(name: str, variant: str) -> None:
    """Of 45 examples in batches of 8 the last has five; four of these make a step, then two."""
    settings, make = OPTIMS[name]
    local = fk.Local(**settings, **WORK, **VARIANTS[variant])
    assert distance(run(local), plain(local, make)) < 1e-12


def cosine(length: int, warmup: int = 0) -> Callable[[torch.optim.Optimizer], Schedules]:
    """Warm-up by LinearLR, then CosineAnnealingLR."""
    schedulers = torch.optim.lr_scheduler

    def make(optimiser: torch.optim.Optimizer) -> Schedules:
        falls = schedulers.CosineAnnealingLR(optimiser, length - warmup, eta_min=0.001)
        if not warmup:
            return [falls]
        rises = schedulers.LinearLR(optimiser, 1 / (warmup + 1), total_iters=warmup)
        falls = schedulers.CosineAnnealingLR(optimiser, length - warmup, eta_min=0.001)
        return [schedulers.SequentialLR(optimiser, [rises, falls], [warmup])]

    return make


STEPS = EPOCHS * 6  # of a round


@each(
    ("schedule", "torchs"),
    [
        ({"kind": "cosine", "final": 0.1}, cosine(ROUNDS)),
        ({"kind": "cosine", "final": 0.1, "warmup": 1}, cosine(ROUNDS, 1)),
        ({"kind": "cosine", "final": 0.1, "over": "steps"}, cosine(ROUNDS * STEPS)),
        (
            {"kind": "cosine", "final": 0.1, "over": "steps", "warmup": 0.5},
            cosine(ROUNDS * STEPS, STEPS // 2),
        ),
    ],
)
@each("kind", ["sequential", "vectorized"])
def test_schedules_are_torchs(
    schedule: dict[str, Any], torchs: Callable[[torch.optim.Optimizer], Schedules], kind: str
) -> None:
    local = fk.Local(**OPTIMS["adamw"][0], **WORK, schedule=fk.Schedule(**schedule))
    expected = plain(local, OPTIMS["adamw"][1], torchs, schedule.get("over", "rounds"))
    workers = {"workers": 1} if kind == "vectorized" else {}
    assert distance(run(local, kind=kind, **workers), expected) < 1e-12


def test_the_state_starts_anew_in_every_round() -> None:
    """Two rounds of three steps are one round of six only for plain SGD."""
    x, y = arrays()
    for name, is_same in (("sgd", True), ("adamw", False)):
        ends = []
        for rounds, steps in ((1, 6), (2, 3)):
            local = fk.Local(lr=0.01, steps=steps, batch_size=8, optimiser=name)
            clients = fk.from_clients({"all": (x, y)})
            task = fk.Task(lambda: copy.deepcopy(start_module()))
            engine = fk.Engine(kind="sequential", dtype="float64")
            ends.append(
                fk.run(
                    "fedavg",
                    task=task,
                    clients=clients,
                    test=(x, y),
                    rounds=rounds,
                    local=local,
                    engine=engine,
                )
            )
        assert (distance(ends[0], dict(ends[1].params)) < 1e-12) == is_same


UNEVEN = (20, 9, 13, 3)
"""Examples of four clients, which end their rounds at different steps."""
EVERYTHING = {
    "lr": 0.01,
    "optimiser": "adamw",
    "clip_norm": 0.3,
    "accumulate": 2,
    "schedule": fk.Schedule(kind="cosine", over="steps", warmup=0.5),
}
MIXED: dict[str, dict[str, Any]] = {
    "adamw": EVERYTHING,
    "sgd": {**EVERYTHING, "lr": 0.1, "optimiser": "sgd", "momentum": 0.5},
}


@pytest.mark.parametrize("name", MIXED)
def test_engines_agree_where_clients_end_at_different_steps(name: str) -> None:
    local = fk.Local(**MIXED[name], epochs=2, batch_size=4)
    alone = run(local, UNEVEN)
    assert distance(run(local, UNEVEN, kind="workers", workers=2), dict(alone.params)) == 0.0
    for side_by_side in (4, 1):
        other = run(local, UNEVEN, kind="vectorized", workers=1, parallel_clients=side_by_side)
        assert other.record.engine.reasons == []
        assert distance(other, dict(alone.params)) < 1e-12


def test_padded_steps_between_others_advance_neither_state_nor_count() -> None:
    federation = SmallFederation("fedavg", None, ADAMW)
    training, server = federation.training, federation.prepared.server
    positions = federation.batch_positions(5, 0)
    ends = []
    for padding in (0, 2):
        with torch.no_grad():
            client, local = client_start(
                training,
                federation.message(server),
                None,
                federation.client_info(5),
                lambda: federation.all_examples(5),
            )
            for position in positions:
                batch = federation.batch(5, position)
                local = client_step(client, local, batch)
                for _ in range(padding):
                    local = client_step(client, local, batch, active=torch.tensor(False))
        ends.append(local)
    assert float(tree.leaf(ends[0].optimiser, "steps")) == len(positions) == 5
    for one, other in zip(*(tree.walk(vars(end)) for end in ends), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])


# --- state that is kept, and a killed run ----------------------------------------------------


def test_kept_state_makes_rounds_one_run_of_torchs_optimiser() -> None:
    settings, make = OPTIMS["adamw"]
    local = fk.Local(**settings, **WORK, keep_state=True)
    optimisers: list[torch.optim.Optimizer] = []

    def first(params: Any) -> torch.optim.Optimizer:
        optimisers.append(make(params) if not optimisers else optimisers[0])
        return optimisers[0]

    expected = plain(local, first)
    for kind in ("sequential", "vectorized"):
        workers = {"workers": 1} if kind == "vectorized" else {}
        assert distance(run(local, kind=kind, **workers), expected) < 1e-12
    assert distance(run(fk.Local(**settings, **WORK)), expected) > 1e-4


@dataclass(frozen=True)
class OwnMomentum(ClientOptimiser, ClientState):
    """Brings SGD with momentum, and goes on from the state that a client's last round left."""

    rho: float = 0.5

    name: ClassVar[str] = "own"
    paper: ClassVar[str] = ""

    def local_optimiser(self, local: fk.Local, no_decay: frozenset[str]) -> LocalSGD:
        return LocalSGD(self.rho, False, local.weight_decay, no_decay)

    def start_optimiser(self, initial: State, broadcast: State, client_state: State) -> State:
        return client_state

    def init_client(self, start: Tree) -> State:
        return {"momentum": dict(tree.zeros_like(start))}

    def next_client(self, round: Round) -> State:
        return round.optimiser


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_a_method_may_bring_its_own_optimiser_and_the_state_that_it_starts_from(kind: str) -> None:
    """The same bits as by settings, which then mean nothing: neither Adam nor kept state."""
    method = f"{__name__}:OwnMomentum"
    engine = {"kind": kind, "workers": 1 if kind == "vectorized" else None}
    work = {"lr": 0.05, "epochs": 2, "batch_size": 4, "weight_decay": 0.1}
    by_settings = prepared(local=fk.Local(**work, momentum=0.5, keep_state=True), **engine)
    expected = start(by_settings)
    ours = start(prepared(method, local=fk.Local(**work, optimiser="adam"), **engine))
    for name, value in ours.params.items():
        assert torch.equal(value, expected.params[name])
    (warning,) = ours.record.warnings
    assert warning == "local.optimiser has no effect: own brings its own local optimiser"
    with pytest.raises(CompositionError, match=r"scaffold needs LINEAR_ACCUMULATION, which own"):
        parse(f"{method}+scaffold")


@pytest.mark.parametrize(
    ("kind", "keep_state"),
    [
        ("sequential", False),
        ("sequential", True),
        pytest.param("vectorized", True, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_with_the_same_bits(
    tmp_path: Path, kind: str, keep_state: bool
) -> None:
    local = fk.Local(**EVERYTHING, epochs=1, batch_size=4, keep_state=keep_state)
    workers = {"workers": 1} if kind == "vectorized" else {}
    ready = prepared(local=local, rounds=3, kind=kind, **workers)
    whole = start(ready, tmp_path / "whole")
    with pytest.raises(Kill):
        start(ready, tmp_path / "run", callbacks=[StopAfter(2)])
    assert same(whole, start(ready, tmp_path / "run", resume=True))


class Kill(BaseException):
    """Ends a run as a kill does."""


class StopAfter(Callback):
    """Ends a run after a round, before that round is saved."""

    def __init__(self, round: int) -> None:
        self._round = round

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == self._round:
            raise Kill


# --- what does not go together ---------------------------------------------------------------


def test_only_methods_that_count_on_the_path_are_refused_beside_adam() -> None:
    adam = fk.Local(lr=0.01, epochs=1, optimiser="adam")
    refusals: dict[str, str] = {}
    for entry in REGISTRY:
        plan = parse(entry)
        check_optimiser(plan, fk.Local(lr=0.01, epochs=1))
        try:
            check_optimiser(plan, adam)
        except CompositionError as error:
            refusals[entry] = str(error)
    assert list(refusals) == [
        *("minibatch_sgd", "scaffold", "fednova", "fedcm", "fedgamma", "mofedsam"),
        *("scaffnew", "fedmoswa"),
    ]
    for text in refusals.values():
        assert "divides each entry of a gradient by its own size" in text
        assert len(text.splitlines()) <= 4
    assert "fednova(length='steps')" in refusals["fednova"]
    check_optimiser(parse("fednova(length='steps')"), adam)


def test_a_run_beside_adam_is_refused_with_the_reason() -> None:
    x, y = arrays()
    with pytest.raises(CompositionError, match="scaffold cannot be run with local"):
        fk.run(
            "scaffold",
            task=fk.Task(Net),
            clients=fk.from_clients({"all": (x, y)}),
            test=(x, y),
            rounds=1,
            local=fk.Local(lr=0.01, epochs=1, optimiser="adam"),
        )


@each(
    ("given", "says"),
    [
        ({"clip_norm": 0.0}, "'clip_norm' cannot be used"),
        ({"clip_norm": -1.0}, "'clip_norm' cannot be used"),
        ({"optimiser": "adam", "betas": (0.9, 1.0)}, "'betas' must be two numbers in [0, 1)"),
        ({"optimiser": "adam", "betas": (-0.1, 0.9)}, "'betas' must be two numbers"),
        ({"optimiser": "adam", "betas": (0.9,)}, "'betas"),
        ({"optimiser": "adam", "eps": 0.0}, "'eps' cannot be used"),
        ({"optimiser": "adam", "momentum": 0.9}, "'momentum' is for optimiser 'sgd'"),
        ({"betas": (0.5, 0.9)}, "'betas' is for optimiser 'adam' and 'adamw'"),
        ({"optimiser": "lion"}, "'optimiser' cannot be used"),
        ({"optimizer": "adam"}, "did you mean 'optimiser'"),
        ({"accumulate": 0}, "'accumulate' cannot be used"),
        ({"accumulate": 2, "batch_size": "all"}, "'accumulate' needs a 'batch_size'"),
        ({"accumulate": 2.5}, "'accumulate' cannot be used"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fk.Local(lr=0.01, epochs=1, **given)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4


def test_a_step_of_more_mini_batches_than_any_client_has_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        run(fk.Local(lr=0.1, epochs=1, batch_size=8, accumulate=4), UNEVEN)
    assert "expected 1..3" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4
    run(fk.Local(lr=0.1, epochs=1, batch_size=8, accumulate=3), UNEVEN)


def test_adamws_weight_decay_is_torchs_where_none_is_given() -> None:
    torchs = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).defaults["weight_decay"]
    assert fk.Local(lr=0.01, epochs=1, optimiser="adamw").weight_decay == torchs
    assert fk.Local(lr=0.01, epochs=1, optimiser="adamw", weight_decay=0.0).weight_decay == 0.0
    assert fk.Local(lr=0.01, epochs=1, optimiser="adam").weight_decay == 0.0


# --- the path --------------------------------------------------------------------------------


def test_only_sgd_without_kept_momentum_is_linear() -> None:
    settings = {name: fk.Local(lr=1, epochs=1, optimiser=name) for name in OPTIMISERS}
    nonlinear = {name: nonlinear_optimiser(local) for name, local in settings.items()}
    assert nonlinear == {"sgd": "", "adam": "adam", "adamw": "adamw"}
    assert nonlinear_optimiser(fk.Local(lr=1, epochs=1, keep_state=True)) == ""
    kept = fk.Local(lr=1, epochs=1, keep_state=True, momentum=0.5)
    assert nonlinear_optimiser(kept) == "sgd"
    with pytest.raises(CompositionError, match="keep_state") as caught:
        check_optimiser(parse("scaffold"), kept)
    assert "drop local.keep_state" in str(caught.value)
    assert np.isnan(path_length(LocalAdam(), 3, 0.1, 0.0))


def test_scaffolds_state_is_the_mean_gradient_of_a_schedule_over_steps() -> None:
    """Two full-batch steps, the second half as long: (g_0 + g_1 / 2) / 1.5."""
    schedule = fk.Schedule(kind="exponential", decay=0.25, over="steps")
    local = fk.Local(lr=0.1, steps=2, batch_size="all", schedule=schedule)
    ready = prepared("scaffold", local=local, dtype="float64")
    training, client = ready.setup.training, 4
    assert training.step_factors(1, 2) == pytest.approx((1.0, 0.5))
    message = server_message(ready.plan, ready.server, 0.1)
    reply = train_client(ready.setup, message, ClientJob(0, client, 0), None).reply
    batch = take_examples(ready.setup, ready.setup.federation.client(client))
    params, grads = message.params, []
    for lr in (0.1, 0.05):
        grads.append(training.network.value_and_grad(params, {}, batch, "eager")[1])
        params = tree.add(params, grads[-1], -lr)
    for name, kept in tree.leaves(reply.client_state["scaffold"], "c").items():
        expected = (grads[0][name] + grads[1][name] / 2) / 1.5
        assert torch.allclose(kept, expected, rtol=1e-12, atol=1e-14)


def test_the_path_of_momentum_under_a_schedule_is_how_far_a_unit_gradient_goes() -> None:
    factors = (1.0, 0.5, 0.25)
    u, m = 0.0, 0.0
    for factor in factors:
        m = 0.9 * m + 1.0 - 0.1 * 2.0 * u
        u += factor * m
    assert path_length(LocalSGD(0.9), 3, 0.1, 2.0, factors) == pytest.approx(u, rel=1e-14)
