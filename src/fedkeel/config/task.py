"""The settings of a task: what is minimised, and what is measured."""

from __future__ import annotations

from pydantic import Field

from fedkeel.base.settings import Settings


class TaskSettings(Settings):
    """What is minimised, and what is measured.

    Args:
        loss: name of the loss, such as ``cross_entropy``, ``mse``, ``bce``, ``dice`` or ``cox``; or
            the import path ``module:function`` of a function (output, target) -> losses [B].
        metrics: what is measured besides the loss, such as ``accuracy``, ``auroc``, ``mae``, ``r2``
            or ``dice``; or import paths. None takes accuracy and top-3 accuracy for labels, and
            only the loss for the rest.
        score: name of the metric by which models are judged; None takes the first one.
    """

    loss: str = Field("cross_entropy", min_length=1)
    metrics: tuple[str, ...] | None = None
    score: str | None = None
