"""How many runs of a study train side by side, by a rule that reads no clock.

Side by side pays where the time goes into starting operations and not into arithmetic. Then clients
of one run train side by side already, and there is room for more of them beside these.
"""

from __future__ import annotations

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
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.vectorized.facts import has_low_rank_rounds, has_short_rounds
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
from fedkeel.records.run_record import EngineChoice
from fedkeel.tree import numel

MOST_RUNS = 32
"""Runs that train side by side, at most: each holds its models and files."""


AT_THE_SERVER = (
    *(Dispatch, Broadcast, ServerPolicy, CohortTransform, Reduction, AggregateTransform),
    *(ServerOptimiser, ServerState, Table),
)
"""Roles whose numbers no client computes with: what comes of them is in a message."""


def structure_of(setup: TrainingSetup) -> str:
    """Return a text of what clients compute, the same for runs whose clients train side by side.

    It leaves out the numbers of parts that act at the server, and the learning rate: unless a part
    of the user's own is given the settings of local training, where it may read that.
    """
    plan = setup.training.plan
    parts = [_as_clients_see(part) for part in plan.parts]
    readers = [part for part in (plan.client_optimiser, plan.local_start) if part is not None]
    left_out = set() if user_modules(readers) else {"lr"}
    local = setup.training.local.model_dump_json(exclude=left_out)
    return f"{'+'.join(parts)}, {plan.weights}, {local}"


def _as_clients_see(part: Part) -> str:
    roles = [role for role in ROLES if isinstance(part, role)]
    name = f"{type(part).__module__}.{type(part).__qualname__}"
    if all(role in AT_THE_SERVER for role in roles) or not is_dataclass(part):
        return name
    return f"{name}({', '.join(f'{f.name}={getattr(part, f.name)!r}' for f in fields(part))})"


def with_parallel_runs(choice: EngineChoice, prepared: Prepared | None) -> EngineChoice:
    """Return the engine of runs of a study with the number of runs that train side by side.

    Args:
        choice: the engine of all runs.
        prepared: the one of them with the largest cohort.
    """
    runs = 1 if prepared is None else _parallel_runs(choice, prepared)
    return replace(choice, parallel_runs=runs if runs > 1 else None)


def shared_runs(prepared: Prepared, runs: int) -> int:
    """Return how many of the runs of a method may share operations, before an engine is chosen.

    Args:
        prepared: one of the runs.
        runs: number of the runs that differ in the seed or the rate.
    """
    requested, cohort = prepared.settings.engine, prepared.largest_cohort
    if prepared.is_baseline or requested.parallel_runs == 1 or not prepared.plan.makes_steps:
        return 1
    most = requested.parallel_runs or _most_clients(prepared, "cpu") // max(cohort, 1)
    return max(1, min(runs, most, MOST_RUNS))


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
