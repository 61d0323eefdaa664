"""A feature of a run: what it may do beside training, as a value that plugs into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from fedkeel import config
from fedkeel.config import ChosenWeights
from fedkeel.data.cohort import Select
from fedkeel.data.federation import Federation
from fedkeel.engine.base import TrainingEngine
from fedkeel.engine.prepared import Draft, Prepared
from fedkeel.records.folder import RunFolder
from fedkeel.records.score import MetricInfo
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.feature_hooks import Hooks
from fedkeel.runner.schedule import RoundSchedule

GroupKind = Literal["comparison", "search"]
"""What runs can belong to."""


@dataclass(frozen=True)
class RunGroup:
    """The comparison or the search that a run belongs to.

    Args:
        name: what it is called.
        kind: what it is.
        ids: what each tracker calls it.
        shows_test: whether its runs report scores on the test set.
    """

    name: str
    kind: GroupKind
    ids: Mapping[str, str] = field(default_factory=dict)
    shows_test: bool = True


class Feature:
    """Something that a run may do beside training. Every method does nothing until overridden.

    A feature is a frozen value, made from its table of settings. What it counts from round to round
    is in its hooks.

    Args:
        settings: its table, or other settings that ask for it.
    """

    def __init__(self, settings: Any) -> None:  # noqa: ANN401 - of `settings_class`
        self.settings = settings

    on_processor: ClassVar[bool] = False
    """Whether it reads tensors of the server in a round, which then stay on the processor."""

    method: ClassVar[str] = ""
    """Expression that trains where the settings name a method that is this feature's; "" mostly."""

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self | None:
        """Return the feature as the settings of a run ask for it, None where they do not."""
        values = getattr(settings, table)
        return None if values is None else cls(values)

    @property
    def weights(self) -> ChosenWeights | None:
        """How clients have to count in the mean; None where it does not matter."""
        return None

    @property
    def target(self) -> float | None:
        """A score that the run is to reach, for the rounds until then; None for none."""
        return None

    def divided(self, clients: Federation, seed: int) -> Federation:
        """Return the clients, once the data are divided, with what this feature changes of them.

        Model and metrics are made for the examples that it returns.

        Args:
            clients: the clients as the data are divided.
            seed: seed of the run.

        Raises:
            FedkeelError: the run cannot have this feature, with the reason.
        """
        return clients

    def wrap(self, draft: Draft) -> Draft:
        """Return the run that is being made with what this feature changes, and with the feature.

        It may change the method, the clients, or the seed of what the server draws. One whose `of`
        cannot tell, because it depends on the method, returns the draft as it is for nothing.

        Raises:
            FedkeelError: the run cannot have this feature, with the reason.
        """
        return draft.with_feature(self)

    def check_nodes(self, settings: config.Run) -> None:
        """Refuse a federation of real nodes that cannot have this feature, before it begins.

        Raises:
            FedkeelError: with the reason.
        """

    def check(self, prepared: Prepared) -> None:
        """Refuse a run that cannot have this feature, once everything else of it is known.

        Raises:
            FedkeelError: with the reason.
        """

    def check_finished(self, prepared: Prepared, folder: RunFolder) -> None:
        """Refuse a finished run of the same numbers that was made without this feature's own.

        Raises:
            FedkeelError: with the reason.
        """

    def identity(self, values: Any) -> Any:  # noqa: ANN401 - JSON
        """Return what the key of the run is to have of this feature; None for nothing.

        Of a feature without a table of its own these are facts by name, beside the settings.

        Args:
            values: its table of settings as JSON; None where there is none.
        """
        return values

    @classmethod
    def warnings(cls, prepared: Prepared) -> list[str]:
        """Return what a user should know before a run, also before one without this feature."""
        return []

    def record(self, prepared: Prepared) -> Any:  # noqa: ANN401 - of `record_class`
        """Return what run.json has under this feature's table; None for nothing."""
        return None

    def scores(self, prepared: Prepared) -> list[MetricInfo]:
        """Return the scores that its hooks add to those of the test set."""
        return []

    @property
    def leaves_out(self) -> str:
        """The settings by which it leaves out clients that are not drawn to be; "" for none."""
        return ""

    def most_replies(self, clients: int) -> int:
        """Return how many of a round's clients the server takes a reply of, at most."""
        return clients

    def description(self, prepared: Prepared) -> str:
        """Return in words how the run trains, where it is not by its method; "" mostly."""
        return ""

    def callbacks(
        self, settings: config.Run, folder: Path | None, group: RunGroup | None
    ) -> Sequence[Callback]:
        """Return callbacks of the run, which hear of a run that was finished before, too.

        Args:
            settings: of the run.
            folder: the run folder, None for a run in memory.
            group: its comparison or search, None where it belongs to none.
        """
        return ()

    def hooks(self, prepared: Prepared) -> Hooks | None:
        """Return what follows the rounds of a run; None for nothing."""
        return None

    def schedule(
        self, prepared: Prepared, select: Select, engine: TrainingEngine | None
    ) -> RoundSchedule | None:
        """Return who trains for each step of the server; None for the clients of each round.

        Args:
            prepared: the run.
            select: selects the clients of a round.
            engine: runs the clients in place of an engine on this machine.
        """
        return None
