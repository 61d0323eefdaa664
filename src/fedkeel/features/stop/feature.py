"""An early end as a feature of a run, with its best model and the models that it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeel import config
from fedkeel.config.flower import smallest_count
from fedkeel.engine.evaluation import split_examples
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError
from fedkeel.features.stop.best_model import BestModelKeeper
from fedkeel.features.stop.early_stopping import EarlyStopping
from fedkeel.features.stop.hooks import EndHooks
from fedkeel.features.stop.settings import Stop
from fedkeel.features.time.feature import VirtualTime
from fedkeel.runner.feature import Feature


class EarlyEnd(Feature):
    """When a run ends, and which of its models are kept."""

    settings: Stop

    @property
    def target(self) -> float | None:
        """The score that ends the run."""
        return self.settings.target

    def check_nodes(self, settings: config.Run) -> None:
        """Refuse hours of virtual time, and clients' own models, which a server does not have."""
        if self.settings.hours is not None:
            raise ConfigError(
                "Virtual time is for simulations: nodes take the time that they take.",
                got="stop.hours",
                do="drop it; flower.enough and flower.deadline_seconds say how long a round waits",
            )

        if settings.engine.client_models == "all":
            raise ConfigError(
                "The clients' own models cannot be kept in a federation of nodes.",
                got='engine.client_models = "all"',
                why="what a client keeps never leaves its node",
                do="drop it",
            )

    def check(self, prepared: Prepared) -> None:
        """Refuse hours where no time is counted, and a target that the score cannot reach."""
        if self.settings.hours is not None and prepared.feature(VirtualTime) is None:
            raise ConfigError(
                "stop.hours needs virtual time, and this run counts none.",
                do="add the table [system] (in Python system=fedkeel.System()), or drop stop.hours",
            )
        score = prepared.setup.metrics.score
        if score.unit != "%":
            return
        targets = {
            "evaluation.target": prepared.settings.evaluation.target,
            "stop.target": self.settings.target,
        }
        for name, target in targets.items():
            if target is not None and not 0 < target <= 1:
                raise ConfigError(
                    f"{name} is not a share.",
                    got=target,
                    expected="a number in (0, 1]",
                    why=f"the score is {score.label}",
                    do=f"write {target / 100:g}" if 1 < target <= 100 else None,
                )
        if self.settings.min_delta >= 1:
            raise ConfigError(
                "stop.min_delta is not a share.",
                got=self.settings.min_delta,
                expected="a number in [0, 1)",
                why=f"the score is {score.label}",
            )

    def identity(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """Return the settings where they can end the run."""
        return None if self.settings == Stop() else values

    def hooks(self, prepared: Prepared) -> EndHooks:
        """Return what may end the run, and keeps models."""
        setup, settings = prepared.setup, prepared.settings
        score = setup.metrics.score
        sources = len(np.unique(split_examples(setup, "test").groups()))
        needed = smallest_count(settings.flower.quorum, sources)
        network, federation = setup.training.network, setup.federation
        best = BestModelKeeper(network, federation, settings.evaluation, score, needed)
        return EndHooks(prepared, EarlyStopping(self.settings, score, needed), best)
