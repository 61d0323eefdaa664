"""How many runs of a study train side by side, by a rule that reads no clock.

Side by side pays where the time goes into starting operations and not into arithmetic. Then clients
of one run train side by side already, and there is room for more of them beside these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace

from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.choose.engine_rule import (
    GPU_GROUP_ENTRIES,
    GPU_GROUP_SIZE,
    GROUP_ENTRIES,
    GROUP_EXAMPLES,
    GROUP_SIZE,
    LARGEST_GROUP,
)
from fedkeel.engine.choose.memory import COMFORTABLE_BYTES, estimate_run
from fedkeel.engine.choose.work import run_work
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.engine.rehearsal import with_empty_answers
from fedkeel.engine.vectorized.facts import has_low_rank_rounds, has_short_rounds
from fedkeel.engine.vectorized.run_numbers import numbers_of
from fedkeel.method.part import Part
from fedkeel.method.plugins import user_modules
from fedkeel.method.roles import (
    ROLES,
    AggregateTransform,
    Broadcast,
    CohortTransform,
    Dispatch,
    Reduction,
    ServerOptimiser,
    ServerPolicy,
    ServerState,
    Table,
)
from fedkeel.method.server_round import server_message
from fedkeel.records.run_record import EngineChoice
from fedkeel.tree import numel

MOST_RUNS = 32
"""Runs that train side by side, at most: each holds its models and files."""


AT_THE_SERVER = (
    *(Dispatch, Broadcast, ServerPolicy, CohortTransform, Reduction, AggregateTransform),
    *(ServerOptimiser, ServerState, Table),
)
"""Roles whose numbers no client computes with: what comes of them is in a message."""


def structure_of(setup: TrainingSetup, varied: Collection[str] = ()) -> str:
    """Return a text of what clients compute, the same for runs whose clients train side by side.

    It leaves out the numbers of parts that act at the server, those that are named in `varied`, and
    the learning rate: unless a part of the user's own is given the settings of local training,
    where it may read that.
    """
    plan = setup.training.plan
    parts = [_as_clients_see(part, varied) for part in plan.parts]
    told = (plan.client_optimiser, plan.receiver, plan.local_start)
    readers = [part for part in told if part is not None]
    left_out = set() if user_modules(readers) else {"lr"}
    local = setup.training.local.model_dump_json(exclude=left_out)
    return f"{'+'.join(parts)}, {plan.weights}, {local}"


def _as_clients_see(part: Part, varied: Collection[str]) -> str:
    name = f"{type(part).__module__}.{type(part).__qualname__}"
    if _is_at_the_server(part) or not is_dataclass(part):
        return name
    left_out = {number for number in numbers_of([part]) if number in varied}
    names = [f.name for f in fields(part) if f"{part.name}.{f.name}" not in left_out]
    return f"{name}({', '.join(f'{field}={getattr(part, field)!r}' for field in names)})"


def _is_at_the_server(part: Part) -> bool:
    return all(role in AT_THE_SERVER for role in ROLES if isinstance(part, role))


class DifferingNumbers:
    """The numbers that clients compute with in which runs of one structure differ.

    Attributes:
        why_not: by the name of a number, why such runs do not train side by side, "" where they
            may: that is tried.
    """

    def __init__(self) -> None:
        self.why_not: dict[str, str] = {}
        self._first: dict[str, Prepared] = {}  # by structure
        self._tried: set[tuple[str, str]] = set()

    @property
    def shared(self) -> list[str]:
        """Names of the numbers in which runs that train side by side may differ."""
        return [name for name, why in self.why_not.items() if not why]

    @property
    def apart(self) -> frozenset[str]:
        """Hyper-parameters in whose numbers runs that train side by side may not differ."""
        return frozenset(name.rpartition(".")[2] for name, why in self.why_not.items() if why)

    def add(self, run: Prepared) -> None:
        """Add a run, which stays in memory where it is the first of its structure."""
        kind = run.settings.engine.kind
        if not _may_share(run) or kind not in ("auto", "vectorized"):
            return
        numbers = _client_numbers(run)
        structure = structure_of(run.setup, numbers)
        first = self._first.setdefault(structure, run)
        before = _client_numbers(first)
        others = {
            name: value
            for name, value in numbers.items()
            if value != before[name] and (structure, name) not in self._tried
        }
        if not others:
            return
        self._tried |= {(structure, name) for name in others}
        for name, why in _tried(first, others).items():
            self.why_not[name] = self.why_not.get(name) or why


def _client_numbers(run: Prepared) -> dict[str, float]:
    return numbers_of(part for part in run.plan.parts if not _is_at_the_server(part))


@one_at_a_time()
def _tried(run: Prepared, others: Mapping[str, float]) -> dict[str, str]:
    from fedkeel.engine.vectorized.number_trial import shared_numbers  # slow to import

    lr = learning_rate(run.settings, run.setup.training, 0)
    message = with_empty_answers(server_message(run.plan, run.server, lr), run.spec)
    return shared_numbers(run.setup, message, others)


def with_parallel_runs(
    choice: EngineChoice, prepared: Prepared | None, numbers: DifferingNumbers
) -> EngineChoice:
    """Return the engine of runs of a study with the number of runs that train side by side.

    Args:
        choice: the engine of all runs.
        prepared: the one of them with the largest cohort.
        numbers: in which the runs differ.
    """
    runs = 1 if prepared is None else _parallel_runs(choice, prepared)
    if runs <= 1:
        return replace(choice, parallel_runs=None, parallel_numbers=[])
    names, reasons = list(choice.parallel_numbers), list(choice.reasons)
    for name, why in numbers.why_not.items():
        reason = f"runs that differ in {name} do not train side by side: {why}"
        names += [name] * (not why and name not in names)
        reasons += [reason] * (bool(why) and reason not in reasons)
    return replace(choice, parallel_runs=runs, parallel_numbers=names, reasons=reasons)


def shared_runs(prepared: Prepared, runs: int) -> int:
    """Return how many of the runs of a method may share operations, before an engine is chosen.

    Args:
        prepared: one of the runs.
        runs: number of the runs that differ in the seed or the rate.
    """
    requested, cohort = prepared.settings.engine, prepared.largest_cohort
    if not _may_share(prepared):
        return 1
    most = requested.parallel_runs or _most_clients(prepared, "cpu") // max(cohort, 1)
    return max(1, min(runs, most, MOST_RUNS))


def _may_share(prepared: Prepared) -> bool:
    """Return whether clients of other runs may train beside those of a run, by its settings."""
    is_off = prepared.settings.engine.parallel_runs == 1
    return not (prepared.is_baseline or is_off) and prepared.plan.makes_steps


def _parallel_runs(choice: EngineChoice, prepared: Prepared) -> int:
    requested, cohort = prepared.settings.engine, prepared.largest_cohort
    if choice.kind != "vectorized" or choice.workers > 1 or choice.devices:
        return 1
    if cohort == 1 or prepared.is_baseline:
        return 1
    if requested.parallel_runs is not None:
        return requested.parallel_runs
    if cohort > (choice.parallel_clients or 1):  # one run has enough clients for a group
        return 1
    setup, device = prepared.setup, choice.device or "cpu"
    if device == "cpu" and has_short_rounds(setup) and has_low_rank_rounds(setup):
        return 1
    estimate = estimate_run(prepared)
    state = estimate.client_state * estimate.clients + estimate.server_state
    fitting = COMFORTABLE_BYTES // max(state, 1) if estimate.state == "memory" else MOST_RUNS
    return min(_most_clients(prepared, device) // cohort, fitting, MOST_RUNS)


def _most_clients(prepared: Prepared, device: str) -> int:
    """Return how many clients of all runs train side by side, at most."""
    entries = max(numel(prepared.setup.training.network.params), 1)
    if device == "cuda":
        return min(GPU_GROUP_SIZE, GPU_GROUP_ENTRIES // entries)
    small = max(GROUP_EXAMPLES // run_work(prepared).batch, GROUP_SIZE)
    return min(small, LARGEST_GROUP, GROUP_ENTRIES // entries)
