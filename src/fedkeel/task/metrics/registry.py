"""The metrics that have a name, and how a metric is made of what a user gives."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fedkeel.base.named_code import ImportTarget, import_object
from fedkeel.errors import ModelError, did_you_mean
from fedkeel.task.metrics import (
    areas,
    calibration,
    classification,
    regression,
    segmentation,
    sequence,
    survival,
)
from fedkeel.task.metrics.base import Metric, PooledMetric, SumMetric, TaskInfo, Unit
from fedkeel.task.metrics.from_torchmetrics import from_torchmetrics, is_torchmetric
from fedkeel.task.outputs import Outputs, Target

MetricLike = str | Metric | PooledMetric | Callable[[Outputs, Target], Tensor] | Any
"""A name such as ``"mae"`` or ``"top(k=5)"``, an import path, a function of (output, target) with a
value for each example, a metric of torchmetrics, or a metric."""

METRICS: dict[str, Callable[..., Metric | PooledMetric]] = {
    "accuracy": classification.accuracy,
    "top": classification.top,
    "balanced_accuracy": classification.balanced_accuracy,
    "macro_f1": classification.macro_f1,
    "sensitivity": areas.sensitivity,
    "specificity": classification.specificity,
    "auroc": areas.auroc,
    "auprc": areas.auprc,
    "confusion": classification.confusion,
    "calibration_error": calibration.CalibrationError,
    "mae": regression.mae,
    "rmse": regression.rmse,
    "r2": regression.R2,
    "dice": segmentation.dice,
    "iou": segmentation.iou,
    "perplexity": sequence.perplexity,
    "token_accuracy": sequence.token_accuracy,
    "concordance": survival.concordance,
}
"""The metrics by name: each is a function of a `TaskInfo` and of the metric's own arguments.

Their labels are in `records/score.py`.
"""

LONGEST_UNIT = 12
"""Characters that the unit of a metric may have."""

_CALL = re.compile(r"([a-z_0-9]+?)(?:\((.*)\))?$")
_TOP_K = re.compile(r"top([1-9][0-9]*)$")
_IMPORTED = ImportTarget(
    noun="metric",
    error=ModelError,
    example="for the function gain in my_metrics.py write 'my_metrics:gain'",
    is_kind=lambda value: not isinstance(value, type) and _is_metric(value),
    kind="a function of (output, target), or a metric that was made",
    write="write a function of (output, target) there",
    arguments=2,
    function_libraries=("torch.nn.functional", "fedkeel.task.losses"),
)


def metric(
    function: Callable[[Outputs, Target], Tensor],
    *,
    name: str | None = None,
    higher_is_better: bool = True,
    unit: Unit = "",
) -> SumMetric:
    """Make a metric of a function with a value for each example, whose mean counts.

    Args:
        function: (output, target) -> values [B]; the output is what the module returns. An example
            with NaN is left out of the mean.
        name: its name; None takes that of the function.
        higher_is_better: its direction.
        unit: ``"%"`` for a share, which is shown times 100; else a short text, such as ``"mm"``.

    Raises:
        ModelError: the unit is not a short text.

    >>> absolute_error = metric(lambda output, y: (output[:, 0] - y).abs(), name="error")
    >>> absolute_error.name
    'error'
    """
    _check_unit(unit)
    label = name or str(getattr(function, "__name__", type(function).__name__))
    return SumMetric(label, function, None, higher_is_better, unit, leaves_out_nan=True)


def _check_unit(unit: object) -> None:
    """Refuse a unit that a table cannot show.

    Raises:
        ModelError: it is not a short text.
    """
    is_text = isinstance(unit, str) and unit == unit.strip() and unit.isprintable()
    if not is_text or len(str(unit)) > LONGEST_UNIT:
        raise ModelError(
            "The unit of a metric is not a short text.",
            got=unit,
            expected=f"at most {LONGEST_UNIT} characters, such as '%' for a share, or 'mm'",
            why="it stands after the values in tables and charts",
        )


def make_metric(given: MetricLike, info: TaskInfo) -> Metric | PooledMetric:
    """Return the metric that a user has given.

    Raises:
        ModelError: there is no such metric, it does not fit the task, or it is not a metric.
    """
    if isinstance(given, str):
        return _named(given, info)
    if is_torchmetric(given):
        return from_torchmetrics(given, info)
    if isinstance(given, Metric | PooledMetric):
        _check_unit(given.unit)
        return given
    if callable(given):
        return metric(given)
    raise ModelError(
        "This is not a metric.",
        got=f"an object of {type(given).__name__}",
        expected="a name, a function of (output, target), or a metric of torchmetrics",
    )


def _named(text: str, info: TaskInfo) -> Metric | PooledMetric:
    if ":" in text:
        return make_metric(import_object(text, _IMPORTED), info)
    if found := _TOP_K.match(text):
        return classification.top(info, int(found[1]))
    match = _CALL.match(text.strip())
    name = match[1] if match else text
    if match is None or name not in METRICS:
        raise ModelError(
            f"There is no metric {text!r}.",
            do=did_you_mean(name, [*METRICS, "top3"]) + ", or give a function of (output, target)",
        )
    try:
        return METRICS[name](info, **_arguments(match[2] or ""))
    except (TypeError, ValueError, SyntaxError) as error:
        raise ModelError(
            f"The arguments of the metric {text!r} cannot be read.",
            got=str(error),
            expected="e.g. 'sensitivity(at_specificity=0.9)'",
        ) from None


def _arguments(text: str) -> dict[str, object]:
    """Return the arguments of a call such as ``k=5``."""
    call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("write each argument as name=value")
    names = [str(item.arg) for item in call.keywords]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"{repeated} is given twice")
    return {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}


def _is_metric(value: object) -> bool:
    return isinstance(value, Metric | PooledMetric) or is_torchmetric(value)


def default_metrics(info: TaskInfo) -> Sequence[str]:
    """Return the metrics of a task that names none: for labels, and for anything else."""
    if info.classes and not info.target:
        has_ranks = len(info.scores) == 1 and (info.scores[0] > 1 or info.classes < 2)
        return ("accuracy", "top3") if has_ranks else ("accuracy",)
    return ()
