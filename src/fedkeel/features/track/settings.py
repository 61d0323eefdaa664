"""The settings of trackers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from fedkeel.base.settings import Settings

Tracker = Literal["tensorboard", "mlflow", "wandb"]
"""A tracker that a run can report to."""


class Track(Settings):
    """Which trackers a run reports to. It changes no number of the run.

    Args:
        to: the trackers: ``tensorboard``, ``mlflow``, ``wandb`` (Weights & Biases). Each is a
            package of its own: ``pip install 'fedkeel[mlflow]'``.
        project: the project of Weights & Biases, and the experiment of MLflow.
        group: name under which runs are grouped; None takes that of the comparison or the search.
        artifacts: what is uploaded when a run ends: its ``report`` page, its ``models``. Trials of
            a search upload neither.
        breakdowns: whether diagnostics by layer, class, client or position are reported too.
        tensorboard_folder: folder of the event files; None takes ``tensorboard`` in the run folder,
            or in the current folder for a run in memory.
        mlflow_uri: where MLflow keeps its data, such as ``sqlite:///mlflow.db`` or
            ``http://host:5000``; None takes MLFLOW_TRACKING_URI, or MLflow's own default.
        wandb_mode: ``online``, or ``offline`` to keep the data on this machine until `wandb sync`;
            None takes WANDB_MODE, or ``online``.
    """

    to: tuple[Tracker, ...] = ()
    project: str = Field("fedkeel", min_length=1)
    group: str | None = Field(None, min_length=1)
    artifacts: tuple[Literal["report", "models"], ...] = ("report", "models")
    breakdowns: bool = False
    tensorboard_folder: str | None = None
    mlflow_uri: str | None = None
    wandb_mode: Literal["online", "offline"] | None = None

    @field_validator("to", "artifacts", mode="before")
    @classmethod
    def _split(cls, names: object) -> object:
        """Return the names of a text, in which commas stand between them."""
        return tuple(map(str.strip, names.split(","))) if isinstance(names, str) else names

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        twice = {name for name in self.to if self.to.count(name) > 1}
        if twice:
            raise ValueError(f"'to' has {sorted(twice)[0]!r} twice")
        return self
