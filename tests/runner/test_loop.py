"""What a run does round by round, and what it writes down of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.engine import reply_rows, sequential
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.survey import survey_client
from fedkeel.errors import TrainingError
from fedkeel.method.context import ByPart, Message
from fedkeel.method.round_values import RoundResult
from fedkeel.method.server_round import server_message
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner import loop, training
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.tree import nbytes
from toys import MODELS, NaN, Net, Slow, federation, held, measure, of_sizes, prepared, same


def evaluated(result: Result) -> list[int]:
    return [row.round for row in result.rows if row.test is not None]


# --- rows -----------------------------------------------------------------------------------------


def test_round_0_is_the_initial_model() -> None:
    ready = prepared()
    result = start(ready)
    first = result.rows[0]
    assert [row.round for row in result.rows] == [0, 1, 2, 3]
    assert (first.clients, first.steps, first.train_loss, first.bytes_up) == ([], 0, None, {})
    network, test = ready.setup.training.network, ready.setup.test
    rows = measure(network, network.params, {}, test.x, test.y)
    assert first.test.examples == 60
    assert first.test["accuracy"] == rows[:, 0].mean()
    assert first.test["loss"] == pytest.approx(float(rows[:, 2].mean()))


def test_answers_to_a_survey_weigh_as_the_updates_of_the_round_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By examples processed, too, of which a client has fewer where a pass ends in the round."""
    asked, trained = [], []
    survey, train = training.add_mean_answers, loop.server_round

    def surveyed(message: Message, answers: ByPart, weights: np.ndarray) -> Message:
        asked.append(weights.tolist())
        return survey(message, answers, weights)

    def server_round(*given: object) -> RoundResult:
        trained.append(given[3].processed.tolist())
        return train(*given)

    monkeypatch.setattr(training, "add_mean_answers", surveyed)
    monkeypatch.setattr(loop, "server_round", server_round)
    fk.run(
        "mime",
        task=fk.Task(Net),
        clients=of_sizes(5, 7, 13, 6),
        test=held(),
        rounds=3,
        local=fk.Local(lr=0.05, steps=3, batch_size=4),
        weights="processed",
        engine=fk.Engine(kind="sequential"),
        progress=False,
    )
    assert asked == trained
    assert asked[0] != asked[1]


def test_a_row_says_what_happened() -> None:
    ready = prepared()
    row = start(ready).rows[1]
    sizes = ready.setup.federation.sizes
    assert len(row.clients) == 4
    assert row.clients == sorted(row.clients)
    assert row.examples == 2 * sizes[row.clients].sum()
    assert row.steps == sum(2 * -(-n // 4) for n in sizes[row.clients])
    assert 0.1 < row.train_loss < 3.0
    assert (row.dropped, row.excluded, row.lr) == ([], [], 0.05)
    assert set(row.seconds) == PHASES
    assert all(value >= 0 for value in row.seconds.values())
    assert set(start(prepared("mime")).rows[1].seconds) == PHASES | {"train.survey"}


PHASES = {"sampling", "train.data", "train.steps", "train.upload"}
PHASES |= {"projection", "server", "evaluation", "records"}


@pytest.mark.parametrize("engine", [{}, {"kind": "workers", "workers": 2}])
def test_the_phases_of_all_rounds_are_the_time_that_they_took(
    tmp_path: Path, engine: dict[str, object]
) -> None:
    """Slow steps, of which two processes make two at a time, and a slow projection."""
    ready = prepared("gcfed", partial(Slow, 0.01), local=fk.Local(lr=0.1, steps=5), **engine)
    times: list[float] = []
    end = Ends(lambda: times.append(time.perf_counter()))
    result = start(ready, tmp_path / "run", callbacks=[end])
    took = times[-1] - times[0]
    rows = [sum(row.seconds.values()) for row in result.rows]
    assert sum(rows[2:]) == pytest.approx(took, rel=0.05)  # from the end of round 1
    for row in result.rows[1:]:
        training = {k: v for k, v in row.seconds.items() if k.startswith("train")}
        assert max(training, key=lambda k: training[k]) == "train.steps"
        assert sum(training.values()) >= 0.01 * row.steps / engine.get("workers", 1)


@pytest.mark.parametrize("kind", ["sequential", "workers"])
def test_processor_seconds_leave_out_waiting(kind: str) -> None:
    """Each of the 8 steps sleeps for 0.05 s, which no processor is busy with."""
    steps = fk.Local(lr=0.1, steps=2)
    ready = prepared(model=partial(Slow, 0.05), local=steps, rounds=1, kind=kind, workers=2)
    first, last = start(ready).rows
    assert first.processor_seconds is None
    assert last.steps == 8
    assert 0.0 < last.processor_seconds < 0.05 * last.steps / 2


@pytest.mark.parametrize("kind", ["sequential", "workers", "vectorized"])
def test_processor_seconds_include_surveys(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def survey(*args: object) -> object:
        began = time.thread_time()
        while time.thread_time() < began + 0.05:
            pass
        return survey_client(*args)

    for module in (sequential, reply_rows):
        monkeypatch.setattr(module, "survey_client", survey)
    result = start(prepared("mime", rounds=1, kind=kind, workers=2))
    assert result.rows[1].processor_seconds >= 0.05 * len(result.rows[1].clients)


class Ends(Callback):
    """Does something at the end of every round."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        self._act()


@pytest.mark.parametrize(
    ("every", "rounds", "expected"),
    [(1, 3, [0, 1, 2, 3]), (2, 5, [0, 2, 4, 5]), (3, 6, [0, 3, 6]), (10, 4, [0, 4])],
)
def test_the_model_is_evaluated_every_so_often_and_at_the_end(
    every: int, rounds: int, expected: list[int]
) -> None:
    result = start(prepared(rounds=rounds, evaluation=fk.Evaluation(every=every)))
    assert evaluated(result) == expected
    assert result.last == result.rows[-1].test["accuracy"]
    assert result.best == max(row.test["accuracy"] for row in result.rows if row.test)


@pytest.mark.parametrize(("every", "expected"), [(0, [4]), (2, [2, 4]), (3, [3, 4])])
def test_every_client_is_evaluated_at_the_end_or_more_often(
    every: int, expected: list[int]
) -> None:
    ready = prepared(rounds=4, evaluation=fk.Evaluation(clients_every=every))
    result = start(ready)
    assert [row.round for row in result.rows if row.per_client] == expected
    federation = ready.setup.federation
    columns = result.rows[-1].per_client
    assert columns["examples"] == federation.sizes.tolist()
    rows = torch.from_numpy(federation.client(2))
    own = measure(
        ready.setup.training.network,
        result.params,
        {},
        federation.data.x[rows],
        federation.data.y[rows],
    )
    assert columns["accuracy"][2] == own[:, 0].mean()
    assert columns["loss"][2] == pytest.approx(float(own[:, 2].mean()))


def test_a_client_that_held_nothing_out_has_no_scores() -> None:
    clients = federation().hold_out(0.15, seed=0)  # the smallest have fewer than seven examples
    columns = start(prepared(clients=clients)).rows[-1].per_client
    held_out = np.diff(clients.holdout_offsets)
    assert columns["examples"] == held_out.tolist()
    assert held_out.min() == 0
    empty = int(held_out.argmin())
    assert [columns[name][empty] for name in ("accuracy", "top3", "loss")] == [None, None, None]
    assert all(value is not None for value in columns["accuracy"][:empty])


@pytest.mark.parametrize("sides", [1, 2])
def test_a_client_s_loss_is_its_own_where_the_loss_is_a_mean(sides: int) -> None:
    clients = federation().hold_out(0.4, seed=0) if sides == 2 else federation()
    one, mean = (
        start(prepared(clients=clients, loss=nn.CrossEntropyLoss(reduction=kind))).rows[-1]
        for kind in ("none", "mean")
    )
    assert one.per_client is not None
    assert mean.per_client is not None
    assert len(set(mean.per_client["loss"])) == len(clients)
    assert mean.per_client["loss"] == pytest.approx(one.per_client["loss"], rel=1e-5)
    assert mean.test["loss"] == pytest.approx(one.test["loss"], rel=1e-5)


def test_each_source_is_evaluated_where_there_are_several() -> None:
    test = replace(held(), sources=("a", "b"), source=np.array([0] * 20 + [1] * 40))
    result = start(prepared(test=test))
    for row in result.rows:
        assert {k: s.examples for k, s in row.sources.items()} == {"a": 20, "b": 40}
        mean = (20 * row.sources["a"]["accuracy"] + 40 * row.sources["b"]["accuracy"]) / 60
        assert row.test["accuracy"] == pytest.approx(mean)
    assert start(prepared()).rows[0].sources == {}


def test_the_batch_of_an_evaluation_does_not_matter() -> None:
    one = start(prepared(evaluation=fk.Evaluation(batch_size=7)))
    two = start(prepared(evaluation=fk.Evaluation(batch_size=1000)))
    assert [r.test["accuracy"] for r in one.rows] == [r.test["accuracy"] for r in two.rows]
    assert all(torch.equal(one.params[k], two.params[k]) for k in one.params)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fednova", "fedgc", "gradma"])
def test_bytes_are_those_of_the_tensors_that_are_sent(method: str) -> None:
    ready = prepared(method)
    model = nbytes(dict(ready.server.params))
    message = server_message(ready.plan, ready.server, 0.05)
    sent = sum(nbytes(state) for state in message.broadcast.values())
    for row in start(ready).rows[1:]:
        assert row.bytes_down["model"] == row.bytes_up["model"] == 4 * model
        assert sum(row.bytes_down.values()) == 4 * (model + sent)
    if method == "scaffold":
        assert row.bytes_down["scaffold"] == row.bytes_up["scaffold"] == 4 * model
    if method == "fednova":
        assert row.bytes_up["fednova"] == 4 * 8


def test_averaged_buffers_are_sent_and_local_ones_are_not() -> None:
    local = fk.Local(lr=0.05, epochs=1, batch_size=4, drop_last="single")
    sizes = {}
    for policy in ("average", "local"):
        ready = prepared(model=MODELS["norm"], buffers=policy, local=local)
        row = start(ready).rows[1]
        assert row.bytes_up["model"] == row.bytes_down["model"]
        sizes[policy] = row.bytes_up["model"]
    assert sizes["average"] - sizes["local"] == 4 * (6 * 4 + 6 * 4 + 8)


# --- who takes part -------------------------------------------------------------------------------


def test_those_who_drop_receive_and_do_not_send() -> None:
    cohort = fk.Cohort(clients=5, dropout=0.5)
    result = start(prepared(rounds=8, cohort=cohort))
    model = nbytes(dict(result.params))
    assert any(row.dropped for row in result.rows)
    for row in result.rows[1:]:
        assert len(row.clients) + len(row.dropped) == 5
        assert set(row.clients).isdisjoint(row.dropped)
        assert row.bytes_down == {"model": 5 * model}
        assert row.bytes_up == {"model": len(row.clients) * model}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((name, "sequential") for name in ("scaffold", "gradma", "fedgc", "momentum")),
        ("scaffold", "workers"),
        *(
            pytest.param(name, "workers", marks=pytest.mark.slow)
            for name in ("fedavg", "gradma", "fedgc", "momentum")
        ),
    ],
)
def test_a_round_in_which_everyone_drops_changes_nothing(method: str, kind: str) -> None:
    cohort = fk.Cohort(clients=1, dropout=0.9)
    ready = prepared(method, rounds=4, cohort=cohort, kind=kind, workers=2)
    result = start(ready)
    assert result.record.status == "finished"
    empty = [row for row in result.rows if row.dropped]
    assert len(empty) >= 3
    for row in empty:
        before = result.rows[row.round - 1]
        assert (row.clients, row.train_loss, row.steps, row.examples) == ([], None, 0, 0)
        assert row.test == before.test
        assert sum(row.bytes_up.values()) == 0
        assert row.bytes_down["model"] > 0


def test_the_cohort_is_the_same_for_every_method() -> None:
    cohorts = [
        [row.clients for row in start(prepared(method, rounds=4)).rows]
        for method in ("fedavg", "scaffold", "fedgh")
    ]
    assert cohorts[0] == cohorts[1] == cohorts[2]


# --- what is not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((name, "sequential") for name in ("scaffold", "gradma", "fedgc", "fedgh", "fednova")),
        ("scaffold", "workers"),
        *(
            pytest.param(name, "workers", marks=pytest.mark.slow)
            for name in ("fedavg", "gradma", "fedgc", "fedgh", "fednova")
        ),
    ],
)
def test_a_client_that_gives_nan_is_left_out_and_named(method: str, kind: str) -> None:
    more = {"clients": federation(marked=2), "per_round": 6, "kind": kind, "workers": 2}
    result = start(prepared(method, NaN, **more))
    assert result.record.status == "finished"
    for row in result.rows[1:]:
        assert row.excluded == [2]
        assert row.clients == [0, 1, 3, 4, 5]
        assert np.isfinite(row.train_loss)
    assert all(torch.isfinite(p).all() for p in result.params.values())


def test_without_that_client_it_is_the_same_run() -> None:
    """Its reply does not count in anything: as if it had no weight."""
    clients = federation(marked=2)
    result = start(prepared("fedavg", NaN, clients=clients, per_round=6, rounds=1))
    others = [clients.client(k) for k in (0, 1, 3, 4, 5)]
    data = fk.federation(clients.data, others)
    plain = prepared("fedavg", NaN, clients=data, per_round=5, rounds=1, local=FULL)
    full = prepared("fedavg", NaN, clients=clients, per_round=6, rounds=1, local=FULL)
    one, two = start(plain), start(full)
    assert all(torch.equal(one.params[k], two.params[k]) for k in one.params)
    assert result.rows[1].excluded == [2]


FULL = fk.Local(lr=0.05, epochs=3, batch_size="all")
"""Nothing is drawn: what a client does depends only on its examples."""


def test_a_loss_may_give_nan_too() -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(logits, y, reduction="none")
        return losses * (float("nan") if bool((y == 0).all()) else 1.0)

    result = start(prepared(loss=loss, per_round=6, local=FULL))
    only = [k for k, row in enumerate(federation().histogram()) if row[1:].sum() == 0]
    assert only
    assert all(row.excluded == only for row in result.rows[1:])


EXPLODES = partial(nn.Sequential, nn.Linear(5, 6), nn.Linear(6, 3))
TOO_FAST = fk.Local(lr=1e4, epochs=2, batch_size=4)


@pytest.mark.parametrize("kind", ["sequential", "workers"])
def test_where_all_diverge_the_run_ends_and_its_folder_is_whole(tmp_path: Path, kind: str) -> None:
    ready = prepared(model=EXPLODES, local=TOO_FAST, rounds=5, kind=kind, workers=2)
    with pytest.raises(TrainingError, match=r"diverged in round [1-5]: no client") as found:
        start(ready, tmp_path / "run")
    assert "local.lr" in found.value.do
    folder = RunFolder(tmp_path / "run")
    record, rows, saved = folder.read_run(), folder.rows(), folder.load()
    assert record.status == "failed"
    assert record.message == found.value.what
    assert saved.round == rows[-1].round
    assert [row.round for row in rows] == list(range(len(rows)))


def test_a_run_that_failed_can_be_tried_again_and_fails_the_same(tmp_path: Path) -> None:
    ready = prepared(model=EXPLODES, local=TOO_FAST, rounds=5)
    messages = []
    for _ in range(2):
        with pytest.raises(TrainingError) as found:
            start(ready, tmp_path / "run", resume=True)
        messages.append(found.value.lines())
    assert messages[0] == messages[1]


# --- schedules and work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (fk.Schedule(), [1, 1, 1, 1]),
        (fk.Schedule(kind="exponential", decay=0.5), [1, 0.5, 0.25, 0.125]),
        (fk.Schedule(kind="cosine", final=0.1), [1, 0.8682, 0.55, 0.2318]),
        (fk.Schedule(kind="piecewise", milestones=(1, 3), factors=(0.5, 0.1)), [1, 0.5, 0.5, 0.1]),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    schedule: fk.Schedule, factors: list[float]
) -> None:
    local = fk.Local(lr=0.2, epochs=1, batch_size=4, schedule=schedule)
    result = start(prepared(local=local, rounds=4))
    rates = [row.lr for row in result.rows[1:]]
    assert rates == pytest.approx([0.2 * f for f in factors], rel=1e-3)
    plain = start(prepared(local=local.model_copy(update={"schedule": fk.Schedule()}), rounds=4))
    assert same(result, plain) is (schedule.kind == "constant")


def test_steps_that_continue_see_every_example_once_in_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over loop, though a client takes part only now and then."""
    seen: dict[int, list[np.ndarray]] = {}
    _watch_batches(monkeypatch, seen)
    local = fk.Local(lr=0.05, steps=2, batch_size=4)
    ready = prepared(local=local, rounds=12, per_round=2)
    seen.clear()  # the rehearsal is not training
    start(ready)
    sizes = ready.setup.federation.sizes
    assert any(len(batches) > 2 * -(-sizes[k] // 4) for k, batches in seen.items())
    for client, batches in seen.items():
        count = -(-sizes[client] // 4)
        for at in range(0, len(batches) - count + 1, count):
            one_pass = np.concatenate(batches[at : at + count])
            assert sorted(one_pass) == list(range(sizes[client])), client


def _watch_batches(monkeypatch: pytest.MonkeyPatch, seen: dict[int, list[np.ndarray]]) -> None:
    from fedkeel.data import batches

    plan = batches.plan

    def watched(*args: object) -> list[np.ndarray]:
        found = plan(*args)
        seen.setdefault(args[4], []).extend(found)
        return found

    monkeypatch.setattr("fedkeel.engine.client_inputs.batches.plan", watched)


# --- seeds ----------------------------------------------------------------------------------------


def test_a_seed_decides_everything_and_another_one_everything_else() -> None:
    one, two = start(prepared()), start(prepared())
    assert same(one, two)
    other = start(prepared(seed=1))
    assert [r.clients for r in one.rows] != [r.clients for r in other.rows]
    assert not torch.equal(
        prepared().server.params["fc1.weight"], prepared(seed=1).server.params["fc1.weight"]
    )


def test_a_module_is_the_initial_model_of_every_seed() -> None:
    module = Net()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    for seed in (0, 1):
        assert torch.equal(
            prepared(model=module, seed=seed).server.params["fc1.bias"], before["fc1.bias"]
        )
        start(prepared(model=module, seed=seed))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_one_prepared_run_can_be_made_twice() -> None:
    """A part may change its memory in place; the prepared server keeps its own."""
    for method in ("gradma", "momentum", "scaffold"):
        ready = prepared(method)
        assert same(start(ready), start(ready))


def _with(ready: Prepared, **changes: object) -> Prepared:
    settings = ready.settings.model_copy(update=changes)
    ingredients: Ingredients = ready.ingredients
    return prepare(settings, ingredients)


def test_more_rounds_begin_with_the_same_rounds() -> None:
    few, many = start(prepared(rounds=2)), start(_with(prepared(rounds=2), rounds=4))
    assert [r.clients for r in many.rows][:3] == [r.clients for r in few.rows]
    assert [r.test for r in many.rows][:3] == [r.test for r in few.rows]


MAKERS: list[Callable[[], nn.Module]] = [Net, partial(Net, width=7), lambda: Net(width=8)]


@pytest.mark.parametrize("make", MAKERS)
def test_a_model_may_be_a_class_or_any_function(make: Callable[[], nn.Module]) -> None:
    result = start(prepared(model=make, rounds=1))
    assert result.params["fc1.bias"].shape == make().fc1.bias.shape


class Branches(Net):
    """Its Python depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if out.sum() > 0 else 2 * out


@pytest.mark.parametrize("workers", [1, 2])
def test_a_plainer_engine_than_was_asked_for_is_on_record(workers: int, tmp_path: Path) -> None:
    asked = {"kind": "vectorized", "parallel_clients": 2, "workers": workers}
    ready = prepared(model=Branches, **asked)
    assert "not trained side by side" in start(ready, tmp_path / "run").record.engine.reasons[0]
    assert RunFolder(tmp_path / "run").read_run().engine.reasons
    for model in (Net, partial(Net, dropout=0.3)):
        assert not start(prepared(model=model, **asked)).record.engine.reasons
