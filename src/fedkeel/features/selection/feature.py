"""A selection of clients by their losses as a feature of a run."""

from __future__ import annotations

from typing import Self

from fedkeel import config
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError
from fedkeel.features.selection.by_losses import SelectorByLosses
from fedkeel.runner.feature import Feature


class SelectionByLosses(Feature):
    """Clients of a round that are chosen by their losses, as ``cohort.sampling`` says."""

    on_processor = True

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self | None:
        """Return the feature where the clients of a round depend on losses."""
        return cls(settings.cohort) if settings.cohort.by_losses else None

    def check_nodes(self, settings: config.Run) -> None:
        """Refuse cohorts by losses, which are for simulations."""
        raise ConfigError(
            f"cohort.sampling = {settings.cohort.sampling!r} is for simulations.",
            why="the cohorts of nodes depend only on the seed, so that each node can tell what a "
            "run is going to ask of it",
            do="set cohort.sampling = 'uniform'",
        )

    def check(self, prepared: Prepared) -> None:
        """Refuse a selection by losses that cannot be made."""
        cohort, clients = prepared.cohort, len(prepared.setup.federation)
        if prepared.is_baseline:
            return
        if prepared.setup.training.personal or prepared.plan.receiver is not None:
            what = "personal parameters" if prepared.plan.receiver is None else "several models"
            raise ConfigError(
                f"cohort.sampling = {cohort.sampling!r} does not go with {what}.",
                got=prepared.plan.expression,
                why="it compares clients by the loss of one model",
                do="set cohort.sampling = 'uniform'",
            )
        wanted, most = cohort.candidates, clients - cohort.new_count
        if wanted is not None and not cohort.size(clients) <= wanted <= most:
            raise ConfigError(
                "cohort.candidates does not fit the clients of a round.",
                got=wanted,
                expected=f"{cohort.size(clients)}..{most}",
            )

    def hooks(self, prepared: Prepared) -> SelectorByLosses | None:
        """Return what selects the clients of each round; None where nobody is selected."""
        return None if prepared.is_baseline else SelectorByLosses(prepared)
