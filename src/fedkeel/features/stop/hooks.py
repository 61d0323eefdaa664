"""What may end a run, and keeps its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from fedkeel.engine.base import TrainingEngine
from fedkeel.engine.prepared import Prepared
from fedkeel.features.stop.best_model import BestModelKeeper
from fedkeel.features.stop.early_stopping import EarlyStopping
from fedkeel.features.stop.kept_models import client_models
from fedkeel.method.round_values import Server
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.runner.callbacks import GlobalModel
from fedkeel.runner.feature_hooks import Hooks
from fedkeel.tree import Tree


class EndHooks(Hooks):
    """Ends a run early, keeps its best model, and hands out the clients' own models at the end.

    Args:
        prepared: the run.
        stopping: says when the run ends.
        best: keeps the best model.
    """

    def __init__(self, prepared: Prepared, stopping: EarlyStopping, best: BestModelKeeper) -> None:
        self._prepared, self._stopping, self._best = prepared, stopping, best

    def stop_reason(self, row: RoundRecord) -> str:
        """Return why the run ends with this round."""
        return self._stopping.stop_reason(row)

    def on_evaluation(self, row: RoundRecord, model: GlobalModel) -> None:
        """Keep the model where it is the best so far, and is whole."""
        if self._prepared.is_whole:
            self._best.add(row, model)

    def ended(self, record: RunRecord) -> RunRecord:
        """Return the record with the round of the best model."""
        return replace(record, best_model=self._best.record)

    def models(self) -> dict[str, Tree]:
        """Return the best model."""
        return self._best.models()

    def models_at_end(self, engine: TrainingEngine, server: Server) -> Iterator[tuple[str, Tree]]:
        """Yield the clients' own models."""
        return client_models(engine, self._prepared, server)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the best model."""
        return self._best.state()

    def restore(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[RoundRecord]) -> None:
        """Take back the best model."""
        self._best.restore(arrays, rows)
