"""What the doctor has measured, of the data and in a short pilot. Findings read nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.study.doctor.heterogeneity import LabelSkew, MomentSkew, Separability, SizeSkew

LABELS_ALIKE, LABELS_DIFFER, LABELS_DIFFER_MUCH = 0.02, 0.15, 0.45
"""Total variation beyond chance up to which labels are alike, and from which they count as skewed
and as strongly skewed."""

INPUTS_DIFFER = 0.5
"""Distance of mean inputs beyond chance, in deviations, from which inputs count as different."""


@dataclass(frozen=True)
class Measurements:
    """The numbers. Scores are of the metric `score`, on examples that nobody trained on.

    Args:
        clients: C.
        per_round: K.
        judges_personal: whether the clients' personal models are judged.
        has_labels: whether each example has one label.
        has_batch_norm: whether the network has batch normalisation.
        sizes: how sizes differ.
        labels: how labels differ; None where the targets are not labels.
        targets: how mean targets differ, where they are quantities.
        inputs: how mean inputs differ; None where there is nothing to compare.
        columns_apart: name and distance of the columns in which mean inputs differ most, see
            `MomentSkew.of_columns`; empty where columns have no names.
        constant: (column, client) where a column of numbers does not vary at a client, by name.
        separability: how well clients are told apart only by inputs.
        score: the metric.
        noise: standard error of a score, by the number of examples.
        lr: the learning rate of the settings.
        scores_by_lr: FedAvg's score by learning rate; None where it diverged.
        centralised: at the best of these learning rates, as all that follows.
        local: mean over clients of their own models on everybody's examples.
        local_own: the same on each client's own examples.
        all_clients: FedAvg with all clients in each round.
        equal_weights: FedAvg with equal client weights.
        kept_norm: FedBN, each client's model on its own examples.
        diagnostics: of FedAvg, mean over the diagnosed rounds, by ``kind.name``.
        steps: smallest and largest number of local steps of a client in a round.
    """

    clients: int
    per_round: int
    sizes: SizeSkew
    lr: float
    scores_by_lr: Mapping[float, float | None]
    judges_personal: bool = False
    has_labels: bool = False
    has_batch_norm: bool = False
    labels: LabelSkew | None = None
    targets: MomentSkew | None = None
    inputs: MomentSkew | None = None
    columns_apart: tuple[tuple[str, float], ...] = ()
    constant: tuple[tuple[str, str], ...] = ()
    separability: Separability | None = None
    score: MetricInfo = ACCURACY
    noise: float = 0.0
    centralised: float | None = None
    local: float | None = None
    local_own: float | None = None
    all_clients: float | None = None
    equal_weights: float | None = None
    kept_norm: float | None = None
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[int, int] = (1, 1)

    @property
    def best_lr(self) -> float:
        """The learning rate with the best score, see `best_rate`."""
        return best_rate(self.scores_by_lr, self.lr, self.score)

    @property
    def fedavg(self) -> float | None:
        """FedAvg's score at the best learning rate."""
        return self.scores_by_lr[self.best_lr]

    def gain(self, value: float | None, other: float | None) -> float | None:
        """Return by how much a score is better than another; None where one is not known."""
        if value is None or other is None:
            return None
        return self.score.sign * (value - other)

    def is_gain(self, value: float | None, other: float | None) -> bool:
        """Return whether a score is better than another by more than two standard errors."""
        gain = self.gain(value, other)
        return gain is not None and gain > 2 * self.noise

    @property
    def label_skew(self) -> float:
        """Total variation of labels beyond chance; 0 where there are none."""
        return 0.0 if self.labels is None else self.labels.beyond_chance

    @property
    def input_skew(self) -> float:
        """How much inputs differ beyond labels, 0 to 1: of what a classifier could know, its share.

        Where labels and clients cannot be told from each other it is 0.
        """
        known = self.separability
        if known is None:
            return 0.0
        return max(known.accuracy - known.by_chance, 0.0) / (1.0 - known.by_chance)

    @property
    def participation(self) -> float:
        """Share of the clients in a round."""
        return self.per_round / self.clients

    @property
    def conflict(self) -> float:
        """Share of pairs of updates that conflict; NaN where it is not known."""
        return self.diagnostics.get("conflict.share", math.nan)

    @property
    def diversity(self) -> float:
        """Gradient diversity of the updates; NaN where it is not known."""
        return self.diagnostics.get("drift.diversity", math.nan)

    @property
    def forgetting(self) -> float:
        """The loss increase of FedReg over the loss before; NaN where it is not known."""
        before = self.diagnostics.get("forgetting.loss_before", math.nan)
        increase = self.diagnostics.get("forgetting.increase", math.nan)
        return increase / before if before else math.nan


def best_rate(scores: Mapping[float, float | None], lr: float, score: MetricInfo) -> float:
    """Return the learning rate with the best score, of several equals the nearest to `lr`.

    Args:
        scores: FedAvg's score by learning rate; None where it diverged.
        lr: the learning rate of the settings.
        score: the metric.
    """
    rates = sorted(scores, key=lambda rate: abs(math.log(rate / lr)))
    return max(rates, key=lambda rate: score.rank(scores[rate]))
