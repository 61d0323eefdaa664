"""The method of a run with a privacy budget: its own parts, and the noise that keeps the budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fedkeel.base.feature import baselines
from fedkeel.config import Cohort, Run
from fedkeel.data.federation import Federation
from fedkeel.errors import ConfigError
from fedkeel.features.budget.budget_account import Budget, ReleaseSchedule, make_budget
from fedkeel.features.budget.legality import check_client_level, check_example_level
from fedkeel.features.budget.settings import Privacy
from fedkeel.method.compose import Plan, compose
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import Capability
from fedkeel.method.parts.dpclient import AdaptiveClientDP, ClientDP
from fedkeel.method.parts.dpftrl import TreeDP, pass_length
from fedkeel.method.parts.dpsgd import DPSGD

NoisyPart = ClientDP | AdaptiveClientDP | TreeDP | DPSGD
"""Parts that add noise."""


def with_privacy(
    settings: Run,
    privacy: Privacy,
    training: ClientTraining,
    federation: Federation,
    provides: Iterable[Capability],
    has_user_transform: bool,
) -> tuple[ClientTraining, Budget]:
    """Return training with noise that keeps the budget, and the budget.

    Args:
        settings: the settings of the run.
        privacy: the budget that they ask for.
        training: training without noise, unless the method names it.
        federation: the clients.
        provides: what task and engine provide.
        has_user_transform: whether batches pass through a function of the user's.

    Raises:
        CompositionError: the method lets more of the data out than the budget counts.
        ConfigError: the budget does not allow a single round, or the settings have no account.
    """
    if settings.method in baselines():
        raise ConfigError(
            f"The baseline {settings.method!r} has no privacy budget.",
            why="its clients send nothing that noise could be added to",
            do="leave out [privacy], or run a method",
        )
    plan, provides = training.plan, frozenset(provides)
    part = _named_part(plan, privacy)
    how, sizes = federation.how["kind"], federation.sizes
    schedule = ReleaseSchedule(
        privacy=privacy,
        cohort=settings.cohort,
        local=training.local,
        sizes=sizes,
        seed=settings.seed,
        rounds=settings.rounds,
        is_stateful=training.stateful or _counts_steps(training),
    )

    def composed(part: NoisyPart) -> Plan:
        others = [other for other in plan.parts if other.name != part.name]
        return compose([*others, part], provides, settings.weights)  # it shortens updates last

    has_shared_buffers = training.buffers == "average" and bool(training.network.buffers)
    trial = composed(part or _noisy_part(privacy, 1.0))
    if privacy.unit == "client":
        check_client_level(trial, has_shared_buffers)
    else:
        check_example_level(trial, has_shared_buffers, has_user_transform)
    if part is None and privacy.unit == "example" and how == "nodes":
        raise ConfigError(
            "Noise on examples cannot be calibrated where the data are on nodes.",
            why="no node knows how many examples the others have, and all need the same noise",
            do="name it in the method: dpsgd(norm=1.0, sigma=...), which is accounted for too",
        )
    if isinstance(part or _noisy_part(privacy, 1.0), TreeDP):
        schedule = replace(schedule, tree=_rounds_of_a_tree(settings.cohort, len(sizes)))
    budget = make_budget(schedule, None if part is None else part.sigma)
    plan = trial if part is not None else composed(_noisy_part(privacy, budget.sigma))
    return replace(training, plan=plan), budget


def _counts_steps(training: ClientTraining) -> bool:
    """Return whether a client's batches depend on the steps that it has done before."""
    local = training.local
    return local.steps is not None and local.sampling == "continue" and local.batch_size != "all"


def _noisy_part(privacy: Privacy, sigma: float) -> NoisyPart:
    if privacy.unit == "example":
        return DPSGD(norm=privacy.clip, sigma=sigma)
    if privacy.noise == "tree":
        return TreeDP(norm=privacy.clip, sigma=sigma)
    if privacy.quantile is None:
        return ClientDP(norm=privacy.clip, sigma=sigma)
    return AdaptiveClientDP(norm=privacy.clip, sigma=sigma, quantile=privacy.quantile)


def _rounds_of_a_tree(cohort: Cohort, clients: int) -> int:
    """Return the rounds of a pass, or refuse cohorts in which a client may come twice in one.

    Raises:
        ConfigError: with the reason.
    """
    length = pass_length(clients, cohort.size(clients))
    if cohort.new_count or (cohort.sampling != "in_turn" and length > 1):
        raise ConfigError(
            "Noise by a tree needs clients that come once in each pass.",
            got="cohort.new_clients"
            if cohort.new_count
            else f"cohort.sampling = {cohort.sampling!r}, {cohort.size(clients)} of {clients}",
            why="the account counts on each client being in one round of a tree at most",
            do="leave out new_clients" if cohort.new_count else "set cohort.sampling = 'in_turn'",
        )
    return length


def _named_part(plan: Plan, privacy: Privacy) -> NoisyPart | None:
    """Return the part with noise that the method names, None where it names none.

    Raises:
        ConfigError: it protects another unit, or the settings say otherwise.
    """
    noisy = (part for part in plan.parts if isinstance(part, NoisyPart))
    part = next(noisy, None)
    if part is None:
        return None
    unit = "example" if isinstance(part, DPSGD) else "client"
    fields = type(privacy).model_fields  # a written experiment names the defaults, too
    chosen = {n for n in ("clip", "quantile", "noise") if getattr(privacy, n) != fields[n].default}
    if unit != privacy.unit or chosen:
        raise ConfigError(
            f"The method names {part.name}, and [privacy] says otherwise.",
            got=f"privacy.{min(chosen)}" if chosen else f"privacy.unit = {privacy.unit!r}",
            expected=f"unit {unit!r}, and no 'clip', 'quantile' or 'noise'",
            do=f"drop {part.name} from the method: [privacy] adds the part it needs",
        )
    return part
