"""Diagnostics as a feature of a run."""

from __future__ import annotations

from fedkeel import config
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError, RunError
from fedkeel.features.diagnose.declaration import DiagnoseDeclaration
from fedkeel.features.diagnose.kinds import DIAGNOSTICS
from fedkeel.features.diagnose.observer import Observer
from fedkeel.features.diagnose.settings import Diagnose
from fedkeel.records.folder import ANOTHER, RunFolder
from fedkeel.runner.feature import Feature


class Diagnostics(Feature):
    """What settings ask to be measured beside the scores. A baseline has none, whatever is asked.

    Args:
        settings: what is measured.
    """

    settings: Diagnose

    def check_nodes(self, settings: config.Run) -> None:
        """Refuse diagnostics that train clients, or look at single ones that nobody sees."""
        for kind in self.settings.kinds:
            if settings.flower.secure_aggregation:
                raise ConfigError(
                    f"The diagnostics {kind!r} cannot be measured under secure aggregation.",
                    why="they compare single clients' updates, of which the server sees only "
                    "the sum",
                    do="leave it out of diagnose.kinds, or simulate the federation: fedkeel run",
                )
            if DIAGNOSTICS[kind].trains:
                raise ConfigError(
                    f"The diagnostics {kind!r} cannot be measured in a Flower federation.",
                    why="they train clients once more, and clients train on their nodes",
                    do="leave it out of diagnose.kinds, or simulate the federation: fedkeel run",
                )

    def check(self, prepared: Prepared) -> None:
        """Refuse diagnostics that cannot be measured in a run."""
        kinds = self.settings.kinds
        apart = prepared.plan.policy or prepared.plan.receiver
        if kinds and apart is not None:
            raise ConfigError(
                f"Diagnostics do not go with {apart.name}.",
                got=", ".join(kinds),
                why="they compare clients that began a round at one model",
                do="leave out [diagnose]",
            )
        setup, method = prepared.setup, prepared.settings.method
        for kind in () if prepared.is_baseline else kinds:
            if reason := DIAGNOSTICS[kind].refuse(setup):
                fitting = [name for name, item in DIAGNOSTICS.items() if not item.refuse(setup)]
                raise ConfigError(
                    f"The diagnostics {kind!r} cannot be measured in a run of {method!r}.",
                    why=reason,
                    do=f"leave it out of diagnose.kinds; what can be measured: "
                    f"{', '.join(fitting)}",
                )

    def check_finished(self, prepared: Prepared, folder: RunFolder) -> None:
        """Refuse a finished run that was made without diagnostics that are asked for now."""
        measured = folder.settings().get(DiagnoseDeclaration.table, {}).get("kinds", [])
        kinds = () if prepared.is_baseline else self.settings.kinds
        if missing := [kind for kind in kinds if kind not in measured]:
            raise RunError(
                f"{folder} holds this run, finished, without the diagnostics {', '.join(missing)}.",
                why="they are measured while a run is made",
                do=f"leave them out, or {ANOTHER}",
            )

    def hooks(self, prepared: Prepared) -> Observer | None:
        """Return what measures the rounds; None where nothing is measured."""
        if prepared.is_baseline or not self.settings.kinds:
            return None
        return Observer(prepared, self.settings)
