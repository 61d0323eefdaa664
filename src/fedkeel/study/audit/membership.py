"""Membership inference: telling the examples that were trained on from others.

Sources
    Yeom et al., Privacy Risk in Machine Learning, CSF 2018: `loss_scores`. Li et al., Effective
    Passive Membership Inference Attacks in Federated Learning Against Overparameterized Models,
    ICLR 2023: `update_scores`, the cosine form. Carlini et al., Membership Inference Attacks From
    First Principles, S&P 2022: `lira_scores`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

from fedkeel import tree
from fedkeel.method.context import Floats, Ints
from fedkeel.records.audit import auc_interval
from fedkeel.task.batch import Batch
from fedkeel.task.losses import losses_of_each
from fedkeel.task.network import Network
from fedkeel.tree import Tree

Bools = NDArray[np.bool_]

LOW_RATES = (0.1, 0.01, 0.001)
"""False positive rates at which the true positive rate is told."""


@dataclass(frozen=True)
class Separation:
    """How well scores tell members from others.

    Args:
        auc: area under the curve of true over false positives; 0.5 is chance.
        true_positives: true positive rate by false positive rate; None where there are too few
            others to see so low a rate.
        members: number of members.
        others: number of others.
    """

    auc: float
    true_positives: dict[float, float | None]
    members: int
    others: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the area."""
        return auc_interval(self.auc, [(self.members, self.others)])

    def sentence(self) -> str:
        """Return what it comes to, with the lowest rate of false alarms that can be seen."""
        low, high = self.interval
        area = f"AUC {self.auc:.3f}, 95 % interval {low:.2f} to {high:.2f} (guessing 0.5)"
        rates = [(rate, share) for rate, share in self.true_positives.items() if share is not None]
        if not rates:
            return f"{area}."
        rate, share = min(rates)
        return (
            f"{area}; {100 * share:.1f} % of the members are told at {100 * rate:g} % false alarms."
        )

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers by name."""
        rates = {f"tpr_at_{100 * rate:g}%": value for rate, value in self.true_positives.items()}
        counts = {"members": float(self.members), "others": float(self.others)}
        low, high = self.interval
        return {"auc": self.auc, "auc_low": low, "auc_high": high, **rates, **counts}


def separation(members: Floats, others: Floats) -> Separation:
    """Return how well scores tell members from others; members are to have the higher ones.

    Args:
        members: [m] scores.
        others: [n] scores.
    """
    scores = np.concatenate([members, others])
    truth = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    rates = {
        rate: float(true[false <= rate].max()) if len(others) * rate >= 1 else None
        for rate in LOW_RATES
    }
    return Separation(float(roc_auc_score(truth, scores)), rates, len(members), len(others))


def matched(
    members: Ints, others: Ints, most: int, random: np.random.Generator
) -> tuple[Ints, Ints]:
    """Return places of members and of others with the same shares of each kind.

    Clients differ in their labels, and a test set does not: without this, an attack that sees
    only the label would look good. Kinds that only one of the two has are left out.

    Args:
        members: [m] kind of each member, such as its label.
        others: [n] kind of each other.
        most: the most of each.
        random: draws them.
    """
    kinds = np.intersect1d(members, others)
    if len(kinds) > most:
        kinds = random.permutation(kinds)[:most]
    if not len(kinds):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    there = np.array([[int((of == kind).sum()) for kind in kinds] for of in (members, others)])
    pairs = there.min(axis=0)
    share = min(1.0, most / int(pairs.sum()))
    wanted = np.maximum(np.floor(pairs * share), 1).astype(np.int64)
    times = np.maximum(np.minimum((there // wanted).min(axis=1), most // wanted.sum()), 1)
    chosen: tuple[list[Ints], list[Ints]] = ([], [])
    for kind, number in zip(kinds, wanted, strict=True):
        for into, of, count in zip(chosen, (members, others), times * number, strict=True):
            into.append(random.permutation(np.flatnonzero(of == kind))[:count])
    return np.concatenate(chosen[0]), np.concatenate(chosen[1])


def loss_scores(network: Network, params: Tree, buffers: Tree, x: Tensor, y: Tensor) -> Floats:
    """Return [n] minus the loss of each example: trained-on ones tend to have a smaller loss."""
    with torch.no_grad():
        losses = losses_of_each(network.task_losses, network.test_output(params, buffers, x), y)
    scores: Floats = -losses.double().numpy()
    return scores


def update_scores(
    network: Network, params: Tree, buffers: Tree, gradient: Tree, x: Tensor, y: Tensor
) -> Floats:
    """Return [n] the cosine of each example's gradient with the one that was seen.

    A gradient that an example is a term of points along the example's own, more than others do.
    """
    length = tree.norm(gradient)
    scores = []
    for place in range(len(y)):
        batch = Batch(x[place : place + 1], y[place : place + 1])
        _, alone = network.value_and_grad(params, network.copy_buffers(buffers), batch, "eager")
        size = (tree.norm(alone) * length).clamp(min=1e-30)
        scores.append(float(tree.dot(alone, gradient) / size))
    return np.array(scores)


def confidences(network: Network, params: Tree, buffers: Tree, x: Tensor, y: Tensor) -> Floats:
    """Return [n] log(p / (1 - p)) of the probability p of each example's label."""
    with torch.no_grad():
        log_p = network.test_logits(params, buffers, x).double().log_softmax(dim=1)
    right = log_p.gather(1, y[:, None])[:, 0]
    wrong = log_p.scatter(1, y[:, None], -torch.inf).logsumexp(dim=1)
    values: Floats = (right - wrong).numpy()
    return values


def lira_scores(confidence: Floats, is_member: Bools) -> tuple[Floats, Bools]:
    """Return the likelihood ratio of membership for each example and run, and the truth.

    Each run in turn is the target; the others are the attacker's own runs, which give normal
    distributions of an example's confidence with it and without it.

    Source: Carlini et al. 2022, Algorithm 1, online, with one variance for all examples, as the
    paper advises for few runs.
    Deviations: the attacker's runs are of halves of the same examples as the target.

    Args:
        confidence: [R, N] `confidences` of N examples under R models.
        is_member: [R, N] whether the example was trained on.

    Returns:
        Scores and truth, [P] each, of the pairs for which the others have both kinds.
    """
    scores, truth = [], []
    for target in range(len(confidence)):
        others = np.delete(confidence, target, axis=0)
        member = np.delete(is_member, target, axis=0)
        known = (member.sum(axis=0) >= 1) & ((~member).sum(axis=0) >= 1)
        (mean_in, var_in), (mean_out, var_out) = (
            _moments(others, mask) for mask in (member, ~member)
        )
        value = confidence[target]
        ratio = _log_density(value, mean_in, var_in) - _log_density(value, mean_out, var_out)
        scores.append(ratio[known])
        truth.append(is_member[target][known])
    return np.concatenate(scores), np.concatenate(truth)


def _moments(values: Floats, mask: Bools) -> tuple[Floats, float]:
    """Return [N] means over the rows of a mask, and the variance about them over everything."""
    count = mask.sum(axis=0)
    mean: Floats = np.where(mask, values, 0.0).sum(axis=0) / np.maximum(count, 1)
    square = np.where(mask, (values - mean) ** 2, 0.0).sum()
    freedom = int(np.maximum(count - 1, 0).sum())
    return mean, float(square / max(freedom, 1)) + 1e-12


def _log_density(value: Any, mean: Floats, variance: float) -> Floats:  # noqa: ANN401
    density: Floats = -0.5 * ((value - mean) ** 2 / variance + np.log(variance))
    return density
