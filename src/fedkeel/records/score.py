"""The metric by which models are judged: its name, its direction and its unit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MetricInfo:
    """What a reader of rows has to know of a metric.

    Args:
        name: the key of its values in the rows.
        higher_is_better: its direction.
        unit: ``%`` for a share, which is shown times 100; else a short text, such as ``mm``, or
            none.
    """

    name: str
    higher_is_better: bool = True
    unit: str = ""

    @property
    def label(self) -> str:
        """Its name in words.

        >>> MetricInfo("balanced_accuracy").label, MetricInfo("mae").label
        ('balanced accuracy', 'MAE')
        """
        if found := _TOP_K.match(self.name):
            return f"top-{found[1]} accuracy"
        return _LABELS.get(self.name, self.name.replace("_", " "))

    @property
    def is_share(self) -> bool:
        """Whether it is a share, which is shown in percent, its differences in points."""
        return self.unit == "%"

    def step(self, examples: int | None) -> float:
        """Return by how much one example of so many changes it, where it is right or wrong.

        0 where nothing is known of that: an image may change a Dice score by as little as a pixel.

        >>> MetricInfo("accuracy", unit="%").step(20), MetricInfo("dice", unit="%").step(20)
        (0.05, 0.0)
        """
        is_of_areas = self.name.startswith(("dice", "iou"))
        return 1.0 / examples if examples and self.is_share and not is_of_areas else 0.0

    @property
    def scale(self) -> float:
        """Factor from a value to what is shown."""
        return 100.0 if self.is_share else 1.0

    @property
    def unit_of_difference(self) -> str:
        """The unit of a difference of two values."""
        return "points" if self.is_share else self.unit

    @property
    def sign(self) -> float:
        """1 where higher is better, else -1: a value times this is better the higher it is."""
        return 1.0 if self.higher_is_better else -1.0

    def is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Return whether a value is better than another one, by more than a margin."""
        return self.sign * value > self.sign * other + by

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is at least as good as a target."""
        return self.sign * value >= self.sign * target

    def rank(self, value: float | None) -> float:
        """Return a number that is higher the better a value is; NaN and None are the worst."""
        return -math.inf if value is None or math.isnan(value) else self.sign * value

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values; a NaN is the worst of all."""
        return max(values, key=self.rank)

    def format(self, value: float, digits: int = 1) -> str:
        """Return a value with its unit.

        >>> MetricInfo("accuracy", unit="%").format(0.5), MetricInfo("mae", False).format(3.14159)
        ('50.0 %', '3.142')
        >>> MetricInfo("distance", False, "mm").format(3.14159)
        '3.142 mm'
        """
        text = f"{100 * value:.{digits}f}" if self.is_share else f"{value:.4g}"
        return f"{text} {self.unit}".rstrip()


_LABELS = {
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R²",
    "iou": "IoU",
    "dice": "Dice",
    "macro_f1": "macro F1",
}
_TOP_K = re.compile(r"top([0-9]+)$")

LOSS = "loss"
"""The name of the loss among the metrics."""

ACCURACY = MetricInfo("accuracy", True, "%")
"""The share of right answers, by which classifiers are judged."""


@dataclass(frozen=True)
class TaskRecord:
    """The task of a run, as run.json has it.

    Args:
        loss: name of the loss.
        metrics: what is measured, the loss last.
        score: name of the metric by which a model is judged.
        like: name of the loss whose scores mean the same, where the loss has no name of its own and
            there is one.
    """

    loss: str = "cross_entropy"
    metrics: list[MetricInfo] = field(
        default_factory=lambda: [
            ACCURACY,
            MetricInfo("top3", True, "%"),
            MetricInfo(LOSS, False, ""),
        ]
    )
    score: str = ACCURACY.name
    like: str = field(default="", metadata={"optional": True})

    def metric(self, name: str) -> MetricInfo:
        """Return a metric by its name; one that is not listed counts as a plain number."""
        return next((info for info in self.metrics if info.name == name), MetricInfo(name))
