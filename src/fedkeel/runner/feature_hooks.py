"""What a feature does from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from fedkeel.base.clock import Lap
from fedkeel.data.cohort import Select
from fedkeel.data.dataset import Ints
from fedkeel.data.partition.common import Floats
from fedkeel.engine.base import TrainedCohort, TrainingEngine
from fedkeel.method.context import Message
from fedkeel.method.round_values import RoundResult, Server
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.runner.callbacks import Callback
from fedkeel.tree import Tree


@dataclass(frozen=True)
class Answers:
    """What models have answered, counted for the pictures of a report.

    Args:
        counts: [R, S] as of `MetricSet.of_pictures`, whose sum is that of all answers; NaN of a
            client that gave none.
        of_models: whether each row is a model's, on the same examples.
    """

    counts: Tensor
    of_models: bool = False


class Hooks(Callback):
    """Follows the rounds of a run as a callback does, adds to their records, and has a state.

    Every method does nothing until a subclass overrides it.
    """

    def sent(self, message: Message) -> None:
        """Look at what the clients of a round are sent, before they train."""

    def received(self, trained: TrainedCohort, round: int) -> TrainedCohort:
        """Return what clients have sent as the server receives it.

        Args:
            trained: their replies; updates of single clients where `Draft.keeps_updates` asks so.
            round: rounds completed before this one.
        """
        return trained

    def after_server_step(
        self,
        engine: TrainingEngine,
        message: Message,
        trained: TrainedCohort,
        result: RoundResult,
        rows: Sequence[RoundRecord],
        lap: Lap,
    ) -> None:
        """Look at a round after the server's step, before the clients' new state counts.

        Args:
            engine: has the state of the clients before the round.
            message: what they received.
            trained: what they replied.
            result: the server after the round.
            rows: the rounds before.
            lap: called with the name of what has taken the time since its last call.
        """

    def recorded(self, row: RoundRecord) -> RoundRecord:
        """Return the record of a new round with what the feature adds, before it is evaluated."""
        return row

    def scored(self, row: RoundRecord, server: Server) -> RoundRecord:
        """Return the record of a round with what the feature adds to its test scores.

        Args:
            row: the record, with the scores of the global model.
            server: after the round.
        """
        return row

    def judged(
        self, row: RoundRecord, engine: TrainingEngine, server: Server
    ) -> RoundRecord | None:
        """Return the record with the scores by which the run is judged; None of the global model.

        Args:
            row: the record of a round without scores.
            engine: keeps what clients keep.
            server: after the round.
        """
        return None

    def concluded(
        self, row: RoundRecord, engine: TrainingEngine, server: Server, is_end: bool
    ) -> RoundRecord:
        """Return the record once it is known whether the run ends, with further scores.

        Args:
            row: the record of a round, with the scores by which the run is judged if they are due.
            engine: keeps what clients keep.
            server: after the round.
            is_end: whether this round is the last one.
        """
        return row

    def answers(self, engine: TrainingEngine, server: Server) -> Answers | None:
        """Return what the models by which the run is judged answer; None of the global model.

        Args:
            engine: keeps what clients keep.
            server: after the last round.
        """
        return None

    def timed(self, row: RoundRecord) -> RoundRecord:
        """Return the record of a new round with what depends on its seconds, before it is kept."""
        return row

    def ended(self, record: RunRecord) -> RunRecord:
        """Return the record of a run that has ended with what the feature adds."""
        return record

    def models(self) -> dict[str, Tree]:
        """Return models that it keeps, by the name of their file; a finished run writes them."""
        return {}

    def models_at_end(self, engine: TrainingEngine, server: Server) -> Iterator[tuple[str, Tree]]:
        """Yield further models of a finished run by the name of their file, each made when asked.

        Args:
            engine: keeps what clients keep.
            server: after the last round.
        """
        return iter(())

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has to hold, by names that no other feature uses."""
        return {}

    def restore(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[RoundRecord]) -> None:
        """Take back a state.

        Args:
            arrays: all that the checkpoint holds.
            rows: the rounds until then.
        """


class Selector(Hooks, Select):
    """Selects the clients of each round in place of the seed, see `data.cohort.Select`.

    Attributes:
        seconds: [C] how long a round takes each client; None where no time is counted.
        message: what the clients of the next round are sent; None before the first.
    """

    seconds: Floats | None = None
    message: Message | None = None

    def observe(self, trained: TrainedCohort, keep: Ints, round: int) -> None:
        """Look at replies, after the server's step.

        Args:
            trained: what clients have replied.
            keep: the clients whose replies count.
            round: the round, counted from 1.
        """


def recorded(hooks: Sequence[Hooks], row: RoundRecord) -> RoundRecord:
    """Return the record of a new round with what all features add."""
    for each in hooks:
        row = each.recorded(row)
    return row


def scored(hooks: Sequence[Hooks], row: RoundRecord, server: Server) -> RoundRecord:
    """Return the record of a round with what all features add to its test scores."""
    for each in hooks:
        row = each.scored(row, server)
    return row


def concluded(
    hooks: Sequence[Hooks], row: RoundRecord, engine: TrainingEngine, server: Server, is_end: bool
) -> RoundRecord:
    """Return the record of a round with what all features add once it is known if the run ends."""
    for each in hooks:
        row = each.concluded(row, engine, server, is_end)
    return row


def timed(hooks: Sequence[Hooks], row: RoundRecord) -> RoundRecord:
    """Return the record of a new round with what all features add once its seconds are known."""
    for each in hooks:
        row = each.timed(row)
    return row
