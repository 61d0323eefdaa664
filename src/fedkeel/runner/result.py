"""The result of a run: its record, its rounds and its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from safetensors.torch import load_file
from torch import Tensor

from fedkeel.errors import RunError, did_you_mean
from fedkeel.records.client_models import client_file, has_single_model, no_single_model
from fedkeel.records.files import is_as_written
from fedkeel.records.folder import BEST_MODEL
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.records.score import ACCURACY
from fedkeel.report.notebook import Page, by_method, curves, run_html, run_results
from fedkeel.report.runs import RunResults
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
        models: as `module`, the other models that the run has left, by the name of the file that a
            run folder has of each: of the round `record.best_model`, and of each client that has a
            model of its own. Those that are on disk only, or were not kept, are not there.
    """

    record: RunRecord
    rows: list[RoundRecord]
    params: Tree
    buffers: Tree
    module: Tree
    folder: Path | None = None
    models: Mapping[str, Tree] = field(default_factory=dict)

    def __repr__(self) -> str:
        record, done = self.record, self.rows[-1].round if self.rows else 0
        scores = ""
        if self.scores():
            name = "" if record.score == ACCURACY else f"{record.score.name} "
            scores = f", {name}best {self.best:.4f}, last {self.last:.4f}"
        where = "" if self.folder is None else f", in {self.folder}"
        return (
            f"<Result of {record.method}, seed {record.seed}: {record.status}, "
            f"{done} of {record.rounds} rounds{scores}{where}>"
        )

    def _repr_html_(self) -> str:
        return run_html(self.results())

    def results(self) -> RunResults:
        """Return the run as the report takes it."""
        folder = "" if self.folder is None else self.folder.name
        return run_results(self.record, self.rows, folder)

    def plot(self, metric: str | None = None) -> go.Figure:
        """Return the learning curve as a plotly figure.

        Args:
            metric: name of a metric of the task; None takes the score.

        Raises:
            RunError: there is no such metric.
        """
        return curves(by_method([self.results()]), metric)

    def report(self) -> Page:
        """Return the report page; a notebook shows it, and its `save` writes it to a file."""
        return Page.of(by_method([self.results()]))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained model for ``module.load_state_dict(...)``; a copy.

        It has all that the module has: trained and frozen parameters, tied ones under each name,
        and buffers, which are the initial ones where clients' were not averaged.

        Raises:
            RunError: no single model has all that was trained: each client keeps parameters of its
                own, as in the baseline `local` and in `fedper`. See `client_model`.
        """
        self._check_model()
        return {name: tensor.clone() for name, tensor in self.module.items()}

    def best_state_dict(self) -> dict[str, Tensor]:
        """Return the best model of all rounds for ``module.load_state_dict(...)``; a copy.

        `record.best_model` says which round it is of, its score, and on which examples it was
        chosen: on those that clients hold out where they are evaluated during the run
        (``partition.holdout`` and ``evaluation.clients_every``), else on the test set. A score on
        the test set by which a model was chosen flatters that model.

        Raises:
            RunError: no model was scored, or the file is gone or has changed; or each client has a
                model of its own.
        """
        self._check_model()
        if self.best_module is not None:
            return {name: tensor.clone() for name, tensor in self.best_module.items()}
        path = None if self.folder is None else self.folder / BEST_MODEL
        if path is None or not path.exists():
            raise RunError(
                "The run has no best model.",
                got="no scored round" if path is None else f"no {path}",
            )
        return _read(path, self.record.digests.get(BEST_MODEL))

    def client_model(self, client: str) -> dict[str, Tensor]:
        """Return a client's own model for ``module.load_state_dict(...)``; a copy.

        It is the model after the last round with which the client is scored: with the parameters
        that the client keeps, its second model, or what fine-tuning made of the global model.
        ``engine.client_models`` says whether a run keeps them.

        Args:
            client: name of the client; its number, as a text, where clients have no names.

        Raises:
            RunError: there is no such client, it has no model of its own or has never taken part,
                or the file is gone or has changed.
        """
        record = self._with_models()
        name = client_file(record, client)
        if name in self.models:
            return {key: tensor.clone() for key, tensor in self.models[name].items()}
        if self.folder is None:
            raise RunError(f"The model of client {client!r} was not kept.")
        return _read(self.folder / name, record.digests[name])

    def scores(self, metric: str | None = None) -> list[tuple[int, float]]:
        """Return (rounds completed, value on the test set) of every evaluated round.

        Args:
            metric: name of a metric of the task; None takes the score.

        Raises:
            RunError: there is no such metric.
        """
        name = self.record.task.score if metric is None else metric
        known = [info.name for info in self.record.task.metrics]
        if name not in known:
            raise RunError(f"The run has no metric {name!r}.", do=did_you_mean(name, known))
        return [(row.round, row.test[name]) for row in self.rows if row.test is not None]

    def diagnostics(self) -> list[dict[str, Any]]:
        """Return what was diagnosed, an entry for each number, as `pandas.DataFrame` takes it.

        Each has the ``round``, the ``name`` (``kind.quantity``, or ``part.name`` for what a part
        records), the ``axis`` (``layer``, ``class``, ``client`` or ``position``) with the
        ``label`` on it, both None for a number of the whole round, and the ``value``.
        """
        return [
            {"round": row.round, "name": name, "axis": axis, "label": label, "value": value}
            for row in self.rows
            for name, axis, label, value in row.measured()
        ]

    def _check_model(self) -> None:
        if not has_single_model(self.record) and not self.module:
            raise no_single_model(self._with_models())

    def _with_models(self) -> RunRecord:
        """Return the record with the models in memory among the files that the run has left."""
        digests = {**dict.fromkeys(self.models, ""), **self.record.digests}
        return replace(self.record, digests=digests)

    @property
    def best_module(self) -> Tree | None:
        """As `module`, of the round `record.best_model`; None where it is on disk only."""
        return self.models.get(BEST_MODEL)

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(rounds completed, test accuracy) of every evaluated round."""
        return self.scores(ACCURACY.name)

    @property
    def best(self) -> float:
        """The best test score over rounds: the highest accuracy, the lowest error."""
        return self.record.score.best(value for _, value in self.scores())

    @property
    def last(self) -> float:
        """The test score after the last round."""
        return self.scores()[-1][1]


def _read(path: Path, digest: str | None) -> dict[str, Tensor]:
    """Read a model that has to be as it was written; versions before 0.2 wrote no digest."""
    if not path.exists():
        raise RunError(f"There is no {path}.", do="take the folder as the run has left it")
    if digest is not None and not is_as_written(path, digest):
        raise RunError(f"{path} has changed since the run ended.")
    return dict(load_file(path))
