"""The result of a run: its record, its rounds and its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from fedkeel.errors import RunError
from fedkeel.records.files import file_digest
from fedkeel.records.folder import BEST_MODEL
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.tree import Tree


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run.

    Args:
        record: what ran, and how it ended.
        rows: one for each round, round 0 first.
        params: the global model's parameters.
        buffers: its buffers, where they were averaged.
        module: the whole state dict of the user's module with these, frozen parameters and all.
        folder: the run folder, None for a run in memory.
        best_module: as `module`, of the round `record.best_model`; None where it is on disk only.
    """

    record: RunRecord
    rows: list[RoundRecord]
    params: Tree
    buffers: Tree
    module: Tree
    folder: Path | None = None
    best_module: Tree | None = None

    def __repr__(self) -> str:
        record, done = self.record, self.rows[-1].round if self.rows else 0
        scores = f", best {self.best:.4f}, last {self.last:.4f}" if self.accuracies else ""
        where = "" if self.folder is None else f", in {self.folder}"
        return (
            f"<Result of {record.method}, seed {record.seed}: {record.status}, "
            f"{done} of {record.rounds} rounds{scores}{where}>"
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained model for ``module.load_state_dict(...)``; a copy.

        It has all that the module has: trained and frozen parameters, tied ones under each name,
        and buffers, which are the initial ones where clients' were not averaged.
        """
        return {name: tensor.clone() for name, tensor in self.module.items()}

    def best_state_dict(self) -> dict[str, Tensor]:
        """Return the best model of all rounds for ``module.load_state_dict(...)``; a copy.

        `record.best_model` says which round it is of, its score, and on which examples it was
        chosen: on those that clients hold out where they are evaluated during the run
        (``partition.holdout`` and ``evaluation.clients_every``), else on the test set. A score on
        the test set by which a model was chosen flatters that model.

        Raises:
            RunError: no model was scored, or the file is gone or has changed.
        """
        if self.best_module is not None:
            return {name: tensor.clone() for name, tensor in self.best_module.items()}
        path = None if self.folder is None else self.folder / BEST_MODEL
        if path is None or not path.exists():
            raise RunError(
                "The run has no best model.",
                got="no scored round" if path is None else f"no {path}",
            )
        if self.record.digests.get(BEST_MODEL, digest := file_digest(path)) != digest:
            raise RunError(f"{path} has changed since the run ended.")
        return dict(load_file(path))

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(rounds completed, test top-1) of every evaluated round."""
        return [(row.round, row.test.top1) for row in self.rows if row.test is not None]

    @property
    def best(self) -> float:
        """The best test top-1 over rounds, in [0, 1]."""
        return max(top1 for _, top1 in self.accuracies)

    @property
    def last(self) -> float:
        """The test top-1 after the last round, in [0, 1]."""
        return self.accuracies[-1][1]
