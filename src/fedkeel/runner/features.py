"""The features of a run, in the order in which they wrap it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fedkeel import config
from fedkeel.base.feature import declarations, loaded
from fedkeel.data.cohort import Select
from fedkeel.data.federation import Federation
from fedkeel.engine.base import TrainingEngine
from fedkeel.engine.prepared import Prepared
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.feature import Feature, RunGroup
from fedkeel.runner.feature_hooks import Hooks
from fedkeel.runner.schedule import RoundSchedule


@cache
def feature_kinds() -> Mapping[str, type[Feature]]:
    """Return every feature that there is, by its table."""
    return {table: loaded(declared.feature) for table, declared in declarations().items()}


def features_asked_for(settings: config.Run) -> list[Feature]:
    """Return the features that settings ask for."""
    asked = (kind.of(settings, table) for table, kind in feature_kinds().items())
    return [feature for feature in asked if feature is not None]


def check_nodes(settings: config.Run) -> None:
    """Refuse settings of a federation of real nodes that cannot have what they ask for.

    Raises:
        FedkeelError: with the reason.
    """
    for feature in features_asked_for(settings):
        feature.check_nodes(settings)


def callbacks_of(
    settings: config.Run, folder: Path | None, group: RunGroup | None = None
) -> list[Callback]:
    """Return the callbacks of the features that settings ask for; see `Feature.callbacks`."""
    asked = features_asked_for(settings)
    return [made for feature in asked for made in feature.callbacks(settings, folder, group)]


def divided(settings: config.Run, clients: Federation) -> Federation:
    """Return the clients, once the data are divided, with what features change of them."""
    for feature in features_asked_for(settings):
        clients = feature.divided(clients, settings.seed)
    return clients


def features_of(prepared: Prepared) -> dict[str, Feature]:
    """Return the features of a run, by their table."""
    found = {table: prepared.feature(kind) for table, kind in feature_kinds().items()}
    return {table: feature for table, feature in found.items() if feature is not None}


def hooks_of(prepared: Prepared) -> list[Hooks]:
    """Return what follows the rounds of a run, one for each feature that wants to."""
    made = (feature.hooks(prepared) for feature in features_of(prepared).values())
    return [hooks for hooks in made if hooks is not None]


def schedule_of(
    prepared: Prepared, select: Select, engine: TrainingEngine | None = None
) -> RoundSchedule:
    """Return who trains for each step of the server: as a feature says, else each round's clients.

    Args:
        prepared: the run.
        select: selects the clients of a round.
        engine: runs the clients in place of an engine on this machine.
    """
    schedules = (item.schedule(prepared, select, engine) for item in features_of(prepared).values())
    return next((schedule for schedule in schedules if schedule is not None), RoundSchedule(select))
