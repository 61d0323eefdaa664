"""The schedule of a run: from its settings, its method and its data."""

from __future__ import annotations

from fedkeel import config
from fedkeel.data.cohort import Select, select_by_seed
from fedkeel.engine.prepared import Prepared
from fedkeel.system.asynchronous import Asynchronous
from fedkeel.system.schedule import ReplySchedule, Synchronous, Timing, Untimed
from fedkeel.system.trainings import Trainings, VirtualTrainings
from fedkeel.system.work import client_work


def make_schedule(
    prepared: Prepared, trainings: Trainings | None = None, select: Select | None = None
) -> ReplySchedule:
    """Return who replies to which step of a run's server, and when.

    Time is counted where the settings ask for it, and where the server does not wait: it then
    decides who comes first. A baseline sends nothing and takes no time.

    Args:
        prepared: the run.
        trainings: those of nodes, for a server that does not wait; None simulates them.
        select: selects the clients of a round; None does so by the seed alone.

    Raises:
        FedkeelError: the settings of time cannot be used.
    """
    policy, seed = prepared.plan.policy, prepared.server_seed
    settings, sizes = prepared.settings.system, prepared.setup.federation.sizes
    if prepared.is_baseline or (settings is None and policy is None):
        return Untimed(select or select_by_seed(prepared.cohort, sizes, seed))
    if policy is not None and trainings is not None:
        buffer = policy.updates_per_step()
        return Asynchronous(trainings, prepared.cohort, sizes, seed, buffer)
    settings = settings or config.System()
    timing = Timing.of(settings, client_work(prepared, settings), len(sizes), seed)
    if policy is None:
        return Synchronous(timing, prepared.cohort, sizes, select)
    buffer = policy.updates_per_step()
    return Asynchronous(VirtualTrainings(timing), prepared.cohort, sizes, seed, buffer)
