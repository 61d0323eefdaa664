"""The vectorized engine gives what the sequential one gives, for all kinds of settings."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel import config
from fedkeel.engine.base import ClientJob
from fedkeel.engine.compiler.cache import Arguments, Call, CompileCache, FlatState
from fedkeel.engine.compiler.compiled_function import CompiledFunction
from fedkeel.engine.compiler.errors import CannotCompile, tracing
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.trainer import SequentialTrainer, TrainedClients
from fedkeel.engine.vectorized.compiled_loop import CompiledLoop, ReceivedInputs
from fedkeel.engine.vectorized.engine import TrainedGroup, VectorizedTrainer
from fedkeel.engine.vectorized.low_rank import dense
from fedkeel.errors import RunError, TrainingError
from fedkeel.method.server_round import server_message, server_round
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.tree import State, walk

SLOW = pytest.mark.slow

RAGGED = (9, 4, 13, 6, 1)
ALIKE = (6, 6, 6, 6, 9)


def cases(settings: dict[str, dict[str, Any]], counts: tuple[int, ...], fast: str) -> list[Any]:
    """Every setting with every count; those that are not named in `fast` are slow."""
    names = [(name, count, f"{name}-{count}") for name in settings for count in counts]
    assert {id for _, _, id in names} >= set(fast.split())
    return [
        pytest.param(settings[name], count, id=id, marks=() if id in fast.split() else SLOW)
        for name, count, id in names
    ]


def images(sizes: tuple[int, ...]) -> fk.Federation:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 3, 8, 8, generator=random, dtype=torch.float64)
    y = torch.randint(0, 4, (sum(sizes),), generator=random)
    ends = np.cumsum(sizes)
    return fk.federation(
        fk.dataset(x, y, classes=4),
        [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)],
    )


def net(*middle: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        *middle,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 5),
        nn.Tanh(),
        nn.Linear(5, 4),
    )


def ready(
    model: Callable[[], nn.Module] | None = None,
    sizes: tuple[int, ...] = RAGGED,
    method: str = "fedavg",
    buffers: str = "refuse",
    augment: bool = False,
    engine: dict[str, Any] | None = None,
    **local: Any,
) -> Prepared:
    federation = images(sizes)
    test = fk.Dataset(federation.data.x[:8], federation.data.y[:8], 4)
    settings = config.Run(
        method=method,
        rounds=3,
        local=fk.Local(**{"lr": 0.1, "epochs": 2, "batch_size": 4, **local}),
        cohort=fk.Cohort(clients=len(sizes)),
        engine=fk.Engine(**{"dtype": "float64", "kind": "sequential", **(engine or {})}),
    )
    task = fk.Task(model or net(), buffers=buffers)
    return prepare(settings, Ingredients(task, lambda _: federation, test, "net", augment))


def trained(
    train: Any, p: Prepared, kept: Callable[[int], Any] = lambda _: None
) -> dict[int, dict[str, Tensor]]:
    """What each client replies, by path, with its counts."""
    message = server_message(p.plan, p.server, 0.1)
    jobs = [ClientJob(row, k, 0) for row, k in enumerate(range(len(p.setup.federation)))]
    found: dict[int, dict[str, Tensor]] = {}
    done: TrainedClients
    for done in train(message, jobs, kept):
        kept_state = {path: dense(value) for path, value in done.client_state.values.items()}
        flat = {**dict(walk(done.state)), **kept_state}
        for i, job in enumerate(done.jobs):
            counts = {"loss": done.loss[i], "finite": done.finite[i]}
            counts["steps"] = torch.tensor([done.steps[i], done.examples[i]])
            found[job.client] = {path: t[i].clone() for path, t in flat.items()} | counts
    return found


def agree(p: Prepared, clients: int) -> VectorizedTrainer:
    """Check that the vectorized trainer gives what the sequential one gives; return it."""
    expected, trainer = trained(SequentialTrainer(p.setup), p), VectorizedTrainer(p.setup, clients)
    for _ in range(2):
        found = trained(trainer, p)
        assert found.keys() == expected.keys()
        for k, reply in expected.items():
            assert found[k].keys() == reply.keys()
            for path, one in reply.items():
                torch.testing.assert_close(found[k][path], one, rtol=0, atol=1e-12, msg=path)
    return trainer


BATCH_NORM = {"model": net(nn.BatchNorm2d(4)), "buffers": "average"}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
    "steps": {"epochs": None, "steps": 3},
    "random": {"epochs": None, "steps": 5, "sampling": "random"},
    "all": {"batch_size": "all"},
    "augment": {"augment": True},
    "fedprox": {"method": "fedprox(mu=0.1)+gcfed"},
    "scaffold": {"method": "scaffold"},
    "fedreg": {"method": "fedreg", "epochs": 1},
    "dpsgd": {"method": "dpsgd"},
    "group_norm": {"model": net(nn.GroupNorm(2, 4))},
    "batch_norm_alike": {**BATCH_NORM, "sizes": ALIKE},
    "batch_norm_local": {**BATCH_NORM, "buffers": "local"},
    "batch_norm": BATCH_NORM,
    "batch_norm_gradma": {**BATCH_NORM, "method": "gradma", "augment": True},
    "batch_norm_fedreg": {**BATCH_NORM, "method": "fedreg", "epochs": 1},
    "batch_norm_fedmlb": {**BATCH_NORM, "method": "fedmlb"},
    "batch_norm_mimelite": {**BATCH_NORM, "method": "mimelite"},
}
FAST = """plain-1 plain-2 plain-5 momentum-5 random-5 all-5 augment-1 fedprox-2 scaffold-5 fedreg-5
    dpsgd-1 group_norm-2 batch_norm_local-2 batch_norm-5"""


@pytest.mark.parametrize(("given", "clients"), cases(SETTINGS, (1, 2, 5), FAST))
def test_clients_side_by_side_reply_as_one_by_one(given: dict[str, Any], clients: int) -> None:
    trainer = agree(ready(**given), clients)
    assert (trainer.parallel_clients, trainer.reasons) == (clients, [])
    assert trainer.strategy.is_compiled


SHORT = (8, 8, 8, 8, 8)


def has_whole_rounds(trainer: VectorizedTrainer) -> bool:
    strategy = trainer.strategy
    return strategy.whole_rounds_single and strategy.whole_rounds_side_by_side


def wide() -> nn.Module:
    """Its first layer is so large that two steps of four examples change it little."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 4))


SHORT_ROUNDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sizes": {"sizes": (8, 8, 7, 8, 7)},
    "momentum": {"momentum": 0.9},
    "augment": {"augment": True},
    "fedprox": {"method": "fedprox(mu=0.1)+gcfed"},
    "scaffold": {"method": "scaffold"},
    "fedreg": {"method": "fedreg"},
    "dpsgd": {"method": "dpsgd"},
    "fedgc": {"method": "fedgc"},
    "dropout": {"model": net(nn.Dropout(0.3))},
}


@pytest.mark.parametrize(
    ("given", "clients"),
    cases(SHORT_ROUNDS, (1, 2, 5), "plain-1 plain-5 sizes-2 scaffold-5 fedgc-1 dropout-2"),
)
def test_short_rounds_are_compiled_as_a_whole(given: dict[str, Any], clients: int) -> None:
    p = ready(**{"model": wide, "sizes": SHORT, "epochs": 1, **given})
    trainer = agree(p, clients)
    assert (has_whole_rounds(trainer), trainer.reasons) == (True, [])
    assert {name for name, *_ in trainer._loop.compiled._compiled} == {"round"}


def total(train: VectorizedTrainer, p: Prepared) -> dict[str, Tensor]:
    """What the server is given of a round: weighted sums of updates, and sums of messages."""
    rounds = RoundBuffers(p.setup, p.spec, len(SHORT), private_memory, sums=True)
    clients = np.arange(len(SHORT))
    message = server_message(p.plan, p.server, 0.1)
    rounds.train(train, message, rounds.clients.begin_round(clients))
    found = rounds.gather(clients).replies
    sent: State = {"update": dict(found.update)}
    sent["uploads"] = {part: found.uploads[part] for part in p.plan.sum_only_uploads}
    return {path: t.sum(0) for path, t in walk(sent)}


@pytest.mark.parametrize("clients", [pytest.param(2, marks=SLOW), 5])
@pytest.mark.parametrize(
    ("given", "multiplications", "matrices"),
    [
        ({}, 1, 0),  # the second step; its input needs no gradient
        ({"momentum": 0.9}, 1, 0),
        ({"weight_decay": 0.1}, 1, 0),
        ({"method": "fedprox(mu=0.1)"}, 1, 0),
        ({"method": "scaffold"}, 1, 0),  # what clients keep stays a product
        ({"method": "feddyn"}, 1, 1),
        ({"method": "fedgc.cgc"}, 1, 1),  # which looks at each update
    ],
    ids=lambda given: str(given),
)
def test_updates_are_added_up_without_being_made(
    given: dict[str, Any], multiplications: int, matrices: int, clients: int
) -> None:
    p = ready(wide, SHORT, epochs=1, **given)
    trainer = VectorizedTrainer(p.setup, clients)
    expected = total(VectorizedTrainer(p.setup, 1), p)
    for _ in range(2):
        found = total(trainer, p)
        assert found.keys() == expected.keys()
        for path, one in expected.items():
            torch.testing.assert_close(found[path], one, rtol=0, atol=1e-12, msg=path)
    code = next(
        one.program.code
        for (name, *_), one in trainer._loop.compiled._compiled.items()
        if name.startswith("round") and trainer.parallel_clients == clients
    )
    assert (code.count("terms_multiply("), code.count("terms_dense(")) == (
        multiplications,
        matrices,
    )


def test_a_run_whose_clients_all_diverge_together_says_so() -> None:
    engine = {"kind": "vectorized", "workers": 1, "parallel_clients": 5}
    p = ready(wide, SHORT, epochs=1, engine=engine)
    p.setup.federation.data.x[:] = float("nan")
    with pytest.raises(TrainingError, match="diverged in round 1"):
        start(p)


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_client_that_is_not_finite_does_not_spoil_the_sum_of_its_group(method: str) -> None:
    results = []
    for kind in ("sequential", "vectorized"):
        engine = {"kind": kind, "workers": 1, "parallel_clients": 5}
        p = ready(wide, SHORT, epochs=1, method=method, engine=engine)
        p.setup.federation.data.x[p.setup.federation.client(2)] = float("nan")
        results.append(start(p))
    for one, other in zip(results[0].rows[1:], results[1].rows[1:], strict=True):
        assert one.excluded == other.excluded == [2]
    for path, t in results[0].params.items():
        torch.testing.assert_close(results[1].params[path], t, rtol=0, atol=1e-12, msg=path)


def test_a_client_whose_terms_overflow_is_trained_step_by_step() -> None:
    """Terms are products of inputs of different steps: they overflow where no update does."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 48, generator=random), torch.arange(32) % 4
    x[8:12] *= 1e20
    clients = fk.federation(
        fk.dataset(x, y, classes=4), [np.arange(4 * k, 4 * k + 4) for k in range(8)]
    )

    def run(**engine: Any) -> list[list[int]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 4))
        found = fk.run(
            "fedgh",
            task=fk.Task(model),
            clients=clients,
            test=(x[:8], y[:8]),
            rounds=6,
            clients_per_round=3,
            local=fk.Local(lr=0.1, epochs=1, batch_size=2),
            engine=fk.Engine(**engine),
        )
        return [row.excluded for row in found.rows]

    assert run(kind="vectorized", parallel_clients=8, workers=1) == run(kind="sequential")


def test_only_sums_are_kept_of_what_the_server_adds_up() -> None:
    p = ready(wide, SHORT, epochs=1, method="scaffold")
    clients = np.arange(len(SHORT))
    message = server_message(p.plan, p.server, 0.1)
    found = []
    for sums in (False, True):
        rounds = RoundBuffers(p.setup, p.spec, len(SHORT), private_memory, sums=sums)
        rounds.train(VectorizedTrainer(p.setup, 2), message, rounds.clients.begin_round(clients))
        replies = rounds.gather(clients).replies
        found.append(server_round(p.plan, p.server, message, replies, p.population, 0).server)
        shapes = {len(t) for _, t in walk({"d": dict(replies.update), "u": dict(replies.uploads)})}
        assert shapes == {1 if sums else len(SHORT)}
    for (path, one), (_, other) in zip(
        walk({"params": dict(found[0].params), "memory": dict(found[0].memory)}),
        walk({"params": dict(found[1].params), "memory": dict(found[1].memory)}),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=path)


def joined(p: Prepared) -> list[list[int]]:
    """Which clients share a group of at most five."""
    message = server_message(p.plan, p.server, 0.1)
    jobs = [ClientJob(k, k, 0) for k in range(5)]
    done = list(VectorizedTrainer(p.setup, 5)(message, jobs, lambda _: None))
    return sorted(sorted(job.client for job in one.jobs) for one in done)


def test_batch_normalisation_of_the_server_without_statistics_is_not_padded() -> None:
    """Clients whose batches differ in size are not joined, because examples see each other."""
    sizes = (6, 6, 6, 6, 7)  # of as many steps
    assert joined(ready(net(nn.BatchNorm2d(4)), sizes, buffers="local")) == [[0, 1, 2, 3], [4]]
    assert joined(ready(net(nn.BatchNorm2d(4)), sizes, buffers="average")) == [[0, 1, 2, 3, 4]]


class OwnMean(nn.Module):
    """Takes half of the batch's mean away."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.5 * x.mean(0, keepdim=True)


@SLOW
def test_prepared_examples_are_not_padded_where_examples_see_each_other() -> None:
    """Batches of equal sizes may hold other numbers of distinct examples."""
    local = {"epochs": None, "steps": 4, "sampling": "random"}
    p = ready(net(OwnMean()), (12,) * 5, method="fedreg", **local)
    assert len(joined(p)) > 1
    agree(p, 5)


def test_whole_rounds_differ_by_the_number_of_prepared_examples_too() -> None:
    local = {"epochs": None, "steps": 3, "batch_size": 2, "sampling": "random"}
    p = ready(wide, (6,) * 5, method="fedreg", **local)
    trainer = VectorizedTrainer(p.setup, 1)
    expected = trained(SequentialTrainer(p.setup), p)
    found = trained(trainer, p)
    assert (has_whole_rounds(trainer), trainer.reasons) == (True, [])
    for k, reply in expected.items():
        for path, one in reply.items():
            torch.testing.assert_close(found[k][path], one, rtol=0, atol=1e-12, msg=path)


def test_whole_rounds_of_groups_do_not_depend_on_those_of_single_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the order in which a process meets its clients would change the bits of a run."""
    p = ready(wide, SHORT, epochs=1)
    trainer, genuine = VectorizedTrainer(p.setup, 2), CompiledLoop.whole_round
    ways = []

    def once(self: CompiledLoop, received: ReceivedInputs, *given: Any) -> State:
        ways.append(received.is_single)
        if received.is_single:
            raise CannotCompile("not alone")
        return genuine(self, received, *given)

    monkeypatch.setattr(CompiledLoop, "whole_round", once)
    jobs = [ClientJob(k, k, 0) for k in range(3)]
    message = server_message(p.plan, p.server, 0.1)
    for one in (jobs[:1], jobs[:2], jobs[:1], jobs[:2]):
        list(trainer(message, one, lambda client: None))
    assert ways == [True, False, False]
    assert trainer.reasons == []


@SLOW
@pytest.mark.parametrize("clients", [1, 5])
def test_prepared_examples_and_short_batches_are_compiled(clients: int) -> None:
    """Where a batch is padded, the rows of its prepared examples are padded too."""
    trainer = agree(
        ready(sizes=(11, 7, 15, 11, 3), method="fedreg", epochs=5, batch_size=4), clients
    )
    assert (trainer.strategy.is_compiled, trainer.reasons) == (True, [])


class Dropped(nn.Module):
    """Two kinds of dropout, one of them called as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(nn.Dropout2d(0.3))()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(nn.functional.dropout(x, 0.5, self.training))


DROPOUT: dict[str, dict[str, Any]] = {
    "plain": {},
    "ragged": {"sizes": RAGGED},
    "batch_norm": {
        "model": net(nn.BatchNorm2d(4), nn.Dropout(0.3)),
        "sizes": RAGGED,
        "buffers": "average",
    },
    "fedsam": {"method": "fedsam"},
    "scaffold": {"method": "scaffold", "momentum": 0.9},
    "fedreg": {"method": "fedreg", "epochs": 1},
}


@pytest.mark.parametrize(
    ("given", "clients"), cases(DROPOUT, (1, 3, 5), "plain-1 plain-3 ragged-5")
)
def test_a_client_draws_the_same_masks_side_by_side_as_by_itself(
    given: dict[str, Any], clients: int
) -> None:
    trainer = agree(ready(**{"model": Dropped, "sizes": ALIKE, **given}), clients)
    assert trainer.facts.draws
    assert (trainer.parallel_clients, trainer.reasons) == (clients, [])
    assert trainer.strategy.is_compiled


def test_padding_draws_nothing() -> None:
    """Clients whose batches differ are joined where masks are drawn by example."""
    assert joined(ready(Dropped, ALIKE)) == [[0, 1, 2, 3], [4]]  # the longest ends alone
    assert joined(ready(Dropped, (4, 3, 2, 4, 1))) == [[0, 1, 2, 3, 4]]


class DropConnect(nn.Module):
    """A model that drops weights, one of whose axes is as long as a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = nn.functional.dropout(self.fc.weight, 0.5, self.training)
        return nn.functional.linear(x.flatten(1), weight, self.fc.bias)


@pytest.mark.parametrize(
    "given",
    [
        {"model": DropConnect},
        pytest.param({"model": Dropped, "method": "fedreg"}, marks=SLOW),
    ],
)
def test_batches_are_not_padded_where_masks_are_of_other_shapes(given: dict[str, Any]) -> None:
    p = ready(**given, sizes=(4, 3, 4, 4, 3), epochs=1)
    assert joined(p) == [[0, 2, 3], [1, 4]]
    assert agree(p, 5).reasons == []


@pytest.mark.parametrize("more", [(), (nn.Dropout(0.3),)])
def test_tokens_are_padded_too(more: tuple[nn.Module, ...]) -> None:
    tokens = np.random.default_rng(0).integers(0, 20, size=(40, 6))
    data = fk.dataset(tokens, np.arange(40) % 3, tokens=True)
    parts = [np.arange(0, 13), np.arange(13, 30), np.arange(30, 40)]
    task = fk.Task(
        lambda: nn.Sequential(nn.Embedding(20, 5), nn.Flatten(), *more, nn.Linear(30, 3))
    )
    settings = config.Run(
        method="fedavg",
        rounds=2,
        local=fk.Local(lr=0.1, epochs=1, batch_size=4),
        cohort=fk.Cohort(clients=3),
        engine=fk.Engine(dtype="float64", kind="sequential"),
    )
    p = prepare(settings, Ingredients(task, lambda _: fk.federation(data, parts), data, "net"))
    trainer = agree(p, 3)
    assert (trainer.parallel_clients, trainer.facts.pads, trainer.reasons) == (3, True, [])


class Noisy(nn.Module):
    """A model that draws what is not a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1))
        return out + 0.1 * torch.randn_like(out) if self.training else out


def test_a_model_that_draws_other_random_numbers_is_trained_client_by_client() -> None:
    trainer = agree(ready(Noisy, ALIKE), 3)
    assert trainer.facts.draws is not None
    assert not trainer.facts.draws.masks_by_example
    assert (trainer.parallel_clients, trainer.strategy.is_compiled) == (1, True)
    assert trainer.reasons == [
        "clients are not trained side by side: the model draws random numbers, or may "
        "(attention does where it drops out)"
    ]


class Branches(nn.Module):
    """A model whose Python depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(x.flatten(1))
        return out if out.sum() > 0 else 2 * out


class OutOfTorch(Branches):
    """A model that computes in NumPy, which cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.from_numpy(np.abs(x.detach().numpy())).flatten(1))


class Views(Branches):
    """A model that wants images laid out as usual."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.view(len(x), -1))


@pytest.mark.parametrize("model", [Branches, OutOfTorch])
def test_what_cannot_be_compiled_is_trained_all_the_same(model: type[nn.Module]) -> None:
    trainer = agree(ready(model), 3)
    assert not trainer.strategy.is_compiled
    assert len(trainer.reasons) == 2
    assert trainer.reasons[0].startswith("clients are not trained side by side: ")
    assert trainer.reasons[1].startswith("steps are not compiled: ")


def test_a_model_that_wants_the_usual_layout_gets_it() -> None:
    trainer = agree(ready(Views), 1)
    assert trainer.strategy.is_compiled
    assert trainer.reasons == []


class Fails(Branches):
    """A model that fails on one client's examples."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and len(x) == 1:
            raise ValueError("one example is not enough")
        return self.fc(x.flatten(1))


def test_a_models_own_error_names_the_client() -> None:
    with pytest.raises(TrainingError, match="client 4, step 1"):
        trained(
            VectorizedTrainer(ready(Fails, batch_size="all").setup, 2),
            ready(Fails, batch_size="all"),
        )


def test_a_compiled_step_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    class Off(CompiledFunction):
        def __call__(self, *given: Tensor) -> list[Tensor]:
            return [t * 1.001 if t.is_floating_point() else t for t in super().__call__(*given)]

    monkeypatch.setattr("fedkeel.engine.compiler.cache.CompiledFunction", Off)
    trainer = agree(ready(), 1)
    assert not trainer.strategy.is_compiled
    assert "gives another" in trainer.reasons[0]


def test_out_of_memory_halves_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    train = VectorizedTrainer._train
    sizes = []

    def short(self: VectorizedTrainer, group: Any, *others: Any) -> list[TrainedGroup]:
        sizes.append(len(group))
        if len(group) > 2:
            raise torch.OutOfMemoryError("no room")
        return train(self, group, *others)

    monkeypatch.setattr(VectorizedTrainer, "_train", short)
    trainer = agree(ready(), 5)
    assert sizes[:2] == [5, 2]
    assert trainer.parallel_clients == 2
    assert trainer.strategy.is_compiled
    assert trainer.reasons == [
        "at most 2 clients are trained side by side: more does not fit into memory"
    ]


def test_trainers_travel_to_other_processes_without_compiled_functions() -> None:
    p = ready(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))
    trainer = agree(p, 2)
    again = pickle.loads(pickle.dumps(trainer))
    expected, found = trained(trainer, p), trained(again, p)
    assert all(
        torch.equal(found[k][path], t) for k, reply in expected.items() for path, t in reply.items()
    )


METHODS = ("fedavg", "fednova", "fednova(length='steps')", "gcfed", "fedgh", "feddyn", "fedadam")


@pytest.mark.parametrize(
    ("method", "workers"),
    cases({m: m for m in METHODS}, (1, 2), "fedavg-1 fednova-1 gcfed-2"),  # type: ignore[misc]
)
def test_a_run_ends_with_the_model_of_the_sequential_engine(method: str, workers: int) -> None:
    expected = start(ready(method=method))
    engine = {"kind": "vectorized", "workers": workers, "parallel_clients": 2}
    found = start(ready(method=method, engine=engine))
    for name, one in expected.params.items():
        torch.testing.assert_close(found.params[name], one, rtol=0, atol=1e-12)
    for a, b in zip(expected.rows, found.rows, strict=True):
        same = [(row.clients, row.steps, row.examples, row.bytes_up) for row in (a, b)]
        assert same[0] == same[1]
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-12)


ON_DEVICE: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "augment": True},
    "scaffold": {"method": "scaffold"},
    "fedreg": {"method": "fedreg", "epochs": 1},
    "dpsgd": {"method": "dpsgd"},
    "fedlc": {"method": "fedlc+gcfed"},
    "moon": {"method": "moon"},
    "fednova": {"method": "fednova+gradma.w"},
    "batch_norm": {**BATCH_NORM, "sizes": ALIKE},
}


@pytest.mark.parametrize(
    ("given", "clients"), cases(ON_DEVICE, (1, 3), "momentum-3 scaffold-3 batch_norm-1")
)
def test_nothing_of_a_round_is_left_on_another_device(
    given: dict[str, Any], clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is not there: tensors without numbers, which know where they would be."""

    def run(self: CompileCache, call: Call, arguments: Arguments) -> FlatState:
        rates = [] if arguments.rate is None else [arguments.rate]
        with tracing():
            return FlatState.of(call.function(*(s.state for s in arguments.states), *rates))

    monkeypatch.setattr(CompileCache, "run", run)
    p = ready(**given)
    message = server_message(p.plan, p.server, 0.1)
    jobs = [ClientJob(row, k, 0) for row, k in enumerate(range(4))]
    trainer = VectorizedTrainer(p.setup, clients, "meta")
    done = list(trainer(message, jobs, lambda _: None))
    values = done[0].client_state.values
    own = ClientRecord({k: torch.zeros(v.shape[1:], dtype=v.dtype) for k, v in values.items()})
    done += trainer(message, jobs, lambda _: own if values else None)
    assert trainer.reasons == []
    assert {t.device.type for one in done for _, t in walk(one.state)} == {"meta"}
    assert {dense(v).device.type for one in done for v in one.client_state.values.values()} <= {
        "meta"
    }


def test_examples_that_a_gpu_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")

    monkeypatch.setattr(fk.Dataset, "on", no_room)
    with pytest.raises(RunError, match="do not fit into the GPU's memory") as caught:
        VectorizedTrainer(ready().setup, 2, "cuda")
    assert "CUDA out of memory" in str(caught.value)
    assert "data.limit" in str(caught.value)


@pytest.mark.parametrize("method", ["moon", pytest.param("feddyn+gradma.w", marks=SLOW)])
def test_what_clients_keep_is_used_in_later_rounds(method: str) -> None:
    """In their first round, what clients keep is what they have received."""
    runs = [
        start(ready(method=method, engine=engine))
        for engine in (
            {"kind": "sequential"},
            {"kind": "vectorized", "workers": 1, "parallel_clients": 1},
        )
    ]
    for name, one in runs[0].params.items():
        torch.testing.assert_close(runs[1].params[name], one, rtol=0, atol=1e-12)


def test_what_clients_keep_is_known_by_its_name() -> None:
    """Also where it comes in another order, and where a client keeps nothing yet."""
    p = ready(wide, SHORT, epochs=1, method="scaffold")

    def kept(client: int) -> Any:
        random = torch.Generator().manual_seed(client)
        shapes = sorted((k, t.shape) for k, t in p.server.params.items())
        own = {k: torch.randn(s, generator=random, dtype=torch.float64) for k, s in shapes}
        turned = dict(reversed(own.items())) if client % 2 else own
        return ClientRecord.of({"scaffold": {"c": turned}}) if client != 3 else None

    trainer = VectorizedTrainer(p.setup, 5)
    expected, found = trained(SequentialTrainer(p.setup), p, kept), trained(trainer, p, kept)
    assert trainer.reasons == []
    for k, reply in expected.items():
        for path, one in reply.items():
            torch.testing.assert_close(found[k][path], one, rtol=0, atol=1e-12, msg=path)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("scaffold", marks=SLOW)])
def test_single_precision(method: str) -> None:
    """The type that runs have by default: counts are kept in others."""
    runs = [
        start(ready(method=method, engine={"dtype": "float32", **engine}))
        for engine in (
            {"kind": "sequential"},
            {"kind": "vectorized", "workers": 1, "parallel_clients": 3},
        )
    ]
    for name, one in runs[0].params.items():
        assert one.dtype == torch.float32
        torch.testing.assert_close(runs[1].params[name], one, rtol=0, atol=1e-5)
