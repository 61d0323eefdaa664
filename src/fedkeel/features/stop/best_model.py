"""The best model of a run, by its score over rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from numpy.typing import NDArray

from fedkeel import config
from fedkeel.data.federation import Federation
from fedkeel.features.stop.early_stopping import score_on_test
from fedkeel.records.fairness import mean_over_clients
from fedkeel.records.folder import BEST_MODEL
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import BestModel
from fedkeel.records.score import MetricInfo
from fedkeel.runner.callbacks import GlobalModel
from fedkeel.task.network import Network
from fedkeel.tree import Tree

PREFIX = "best/"
"""What the names of the best model's arrays in a checkpoint begin with."""


@dataclass(frozen=True)
class _Best:
    """The best row so far, and what its model has of its own beside a frozen base.

    It is None where a checkpoint of an old version lacks it.
    """

    row: BestModel
    changed: Tree | None


class BestModelKeeper:
    """Keeps the model of the round with the best score; of equal scores the first one.

    The score is that on the examples that clients hold out, where they hold any out and are
    evaluated during the run, else that on the test set. It depends only on the rows, so a
    continued run chooses the same round.

    Args:
        network: the model.
        federation: the clients.
        evaluation: when the model is evaluated.
        score: the metric by which models are judged.
        sources_needed: as in `score_on_test`.
    """

    def __init__(
        self,
        network: Network,
        federation: Federation,
        evaluation: config.Evaluation,
        score: MetricInfo,
        sources_needed: int = 1,
    ) -> None:
        held = federation.holdout_rows is not None and len(federation.holdout_rows) > 0
        self._chosen_on: Literal["held-out clients", "test set"] = (
            "held-out clients" if held and evaluation.clients_every else "test set"
        )
        self._network = network
        self._score, self._sources_needed = score, sources_needed
        self._best: _Best | None = None

    @property
    def record(self) -> BestModel | None:
        """The round of the best model, None where there is none."""
        return None if self._best is None or self._best.changed is None else self._best.row

    def models(self) -> dict[str, Tree]:
        """Return the state dict of the best model by its file, empty where there is none."""
        if self._best is None or self._best.changed is None:
            return {}
        return {BEST_MODEL: self._network.whole_state(self._best.changed)}

    def add(self, row: RoundRecord, model: GlobalModel) -> None:
        """Keep the model where it is the best so far."""
        if (better := self._better(row)) is not None:
            self._best = _Best(better, self._network.changed_state(model.params, model.buffers))

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that a checkpoint needs."""
        changed = (self._best and self._best.changed) or {}
        return {PREFIX + name: tensor.contiguous().numpy() for name, tensor in changed.items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[RoundRecord]) -> None:
        """Take the best of the rows so far, with its model from a checkpoint."""
        changed = {
            name.removeprefix(PREFIX): torch.from_numpy(array.copy())
            for name, array in arrays.items()
            if name.startswith(PREFIX)
        }
        for row in rows:
            if (better := self._better(row)) is not None:
                self._best = _Best(better, changed or None)

    def _better(self, row: RoundRecord) -> BestModel | None:
        """Return the record of a row that is better than the best so far, else None."""
        if self._chosen_on == "test set":
            score = score_on_test(row, self._score, self._sources_needed)
        else:
            score = mean_over_clients(row.per_client, self._score)
        if score is None or math.isnan(score):
            return None
        if self._best is not None and not self._score.is_better(score, self._best.row.score):
            return None
        return BestModel(row.round, score, self._chosen_on)
