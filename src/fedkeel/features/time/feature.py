"""Virtual time as a feature of a run: settings ask for it, or a server that does not wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, Self, runtime_checkable

from fedkeel import config
from fedkeel.config.flower import smallest_count
from fedkeel.data.cohort import Select, select_by_seed
from fedkeel.engine.base import TrainingEngine
from fedkeel.engine.prepared import Draft, Prepared
from fedkeel.errors import ConfigError
from fedkeel.features.time.arrivals import Arrivals
from fedkeel.features.time.asynchronous import Asynchronous, check_buffer
from fedkeel.features.time.declaration import SystemDeclaration
from fedkeel.features.time.devices import files_digest
from fedkeel.features.time.legality import check_policy
from fedkeel.features.time.schedule import Synchronous, Timing
from fedkeel.features.time.settings import System
from fedkeel.features.time.timed_rounds import TimedRounds
from fedkeel.features.time.trainings import Trainings, VirtualTrainings
from fedkeel.features.time.work import client_work
from fedkeel.runner.defence_warnings import share_of_all
from fedkeel.runner.feature import Feature
from fedkeel.runner.schedule import RoundSchedule


@runtime_checkable
class TrainsMeanwhile(Protocol):
    """An engine whose clients may train while the server makes its steps."""

    @property
    def trainings(self) -> Trainings | None:
        """Their trainings, None where the server waits for them."""


class VirtualTime(Feature):
    """How long clients take, and who replies to which step of the server.

    A run has it where settings ask for it, and where the method's server does not wait: time then
    decides who comes first. A baseline sends nothing and takes no time.
    """

    settings: System | None

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self:
        """Return the feature: whether a run has it depends on its method, too."""
        return cls(getattr(settings, table))

    def wrap(self, draft: Draft) -> Draft:
        """Return the run with time, where its settings or its method ask for it."""
        policy = draft.training.plan.policy
        if self.settings is None and policy is None:
            return draft
        check_policy(draft)
        size = None if policy is None else policy.updates_per_step()
        return replace(draft, step_size=size).with_feature(self)

    def check(self, prepared: Prepared) -> None:
        """Refuse settings of time that cannot be used, and a buffer that never gets full."""
        cohort, sizes, seed = prepared.cohort, prepared.setup.federation.sizes, prepared.server_seed
        if self.settings is not None:
            self.schedule(prepared, select_by_seed(cohort, sizes, seed), None)
        elif prepared.step_size is not None:
            check_buffer(cohort, sizes, seed, prepared.step_size)

    def check_nodes(self, settings: config.Run) -> None:
        """Refuse virtual time, which is for simulations."""
        if self.settings is not None:
            raise ConfigError(
                "Virtual time is for simulations: nodes take the time that they take.",
                got="[system]",
                do="drop it; flower.enough and flower.deadline_seconds say how long a round waits",
            )

    def identity(self, values: Any) -> Any:  # noqa: ANN401 - JSON
        """Return the settings with digests of the files that they name."""
        return None if self.settings is None else {**values, **files_digest(self.settings)}

    @classmethod
    def warnings(cls, prepared: Prepared) -> list[str]:
        """Return that a round's share of replies, or its deadline, leaves nobody out."""
        settings = time_of(prepared)
        if settings is None:
            return []
        effect = "so that nobody is left out"
        share = share_of_all("system.enough", settings.enough, prepared, effect)
        return [share, deadline_that_nobody_misses(prepared, settings.deadline_seconds)]

    @property
    def leaves_out(self) -> str:
        """The settings by which time decides who takes part; "" where it does not."""
        names = "system.availability, system.enough or system.deadline_seconds"
        return names if self.settings is not None and self.settings.leaves_out else ""

    def most_replies(self, clients: int) -> int:
        """Return how many of a round's clients the server waits for."""
        return clients if self.settings is None else smallest_count(self.settings.enough, clients)

    def schedule(
        self, prepared: Prepared, select: Select, engine: TrainingEngine | None
    ) -> RoundSchedule | None:
        """Return who replies to which step of a run's server, and when.

        Raises:
            FedkeelError: the settings of time cannot be used.
        """
        if prepared.is_baseline:
            return None
        if prepared.step_size is None:
            return TimedRounds(rounds_of(prepared, select))
        trainings = engine.trainings if isinstance(engine, TrainsMeanwhile) else None
        return Arrivals(prepared, steps_of(prepared, trainings))


def timing_of(prepared: Prepared) -> Timing:
    """Return how long a run's clients take."""
    settings: System = getattr(prepared.settings, SystemDeclaration.table) or System()
    sizes, seed = prepared.setup.federation.sizes, prepared.server_seed
    return Timing.of(settings, client_work(prepared, settings), len(sizes), seed)


def rounds_of(prepared: Prepared, select: Select | None = None) -> Synchronous:
    """Return who replies in time to a server that waits; None selects clients by the seed."""
    sizes = prepared.setup.federation.sizes
    return Synchronous(timing_of(prepared), prepared.cohort, sizes, select)


def steps_of(prepared: Prepared, trainings: Trainings | None = None) -> Asynchronous:
    """Return whose replies make the steps of a server that does not wait.

    Args:
        prepared: the run.
        trainings: those of nodes; None simulates them.
    """
    sizes, seed, size = prepared.setup.federation.sizes, prepared.server_seed, prepared.step_size
    trainings = trainings or VirtualTrainings(timing_of(prepared))
    return Asynchronous(trainings, prepared.cohort, sizes, seed, size or 1)


def time_of(prepared: Prepared) -> System | None:
    """Return the settings of virtual time of a run whose server waits; None of another."""
    feature = prepared.feature(VirtualTime)
    is_waiting = prepared.step_size is None and not prepared.is_baseline
    return feature.settings if feature is not None and is_waiting else None


def deadline_that_nobody_misses(prepared: Prepared, seconds: float | None) -> str:
    """Return that all clients reply before the deadline of each round, "" where one may not."""
    if seconds is None:
        return ""
    longest = rounds_of(prepared).longest
    if longest > seconds:
        return ""
    return (
        f"system.deadline_seconds = {seconds:g} leaves nobody out: the slowest client has replied "
        f"after {longest:.3g} s"
    )
