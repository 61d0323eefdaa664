"""Who trains for each step of the server, and what is taken of them."""

from __future__ import annotations

from typing import Literal

from fedkeel.data.cohort import Select, Selection
from fedkeel.data.partition.common import Floats
from fedkeel.engine.base import ReportProgress, TrainedCohort, TrainingEngine
from fedkeel.method.context import Message
from fedkeel.method.round_values import Server
from fedkeel.runner.feature_hooks import Hooks


class RoundSchedule(Hooks):
    """The clients of a round, which all begin at its model; the server waits for all of them.

    A feature may give a run another schedule: see `Feature.schedule`.

    Args:
        select: selects the clients of a round.
    """

    def __init__(self, select: Select) -> None:
        self._select = select

    @property
    def counts_at_once(self) -> bool:
        """Whether `train` makes the clients' new state count, before the server's step."""
        return False

    @property
    def phase(self) -> Literal["sampling", "train"]:
        """The phase of a round in which `due` takes its time."""
        return "sampling"

    @property
    def seconds(self) -> Floats | None:
        """[C] how long a round takes each client; None where no time is counted."""
        return None

    def due(self, message: Message) -> Selection:
        """Return the clients of the server's next step, and those that it has lost.

        Args:
            message: what the server sends from now on.
        """
        return self._select(message.round)

    def train(
        self,
        engine: TrainingEngine,
        server: Server,
        message: Message,
        cohort: Selection,
        tick: ReportProgress,
    ) -> TrainedCohort:
        """Return the replies of the clients that are due.

        Args:
            engine: trains them.
            server: the server before its step.
            message: what it sends now.
            cohort: what `due` has returned.
            tick: called with the number of clients that have been trained since the last call.
        """
        return engine.train(message, cohort.clients, tick)
