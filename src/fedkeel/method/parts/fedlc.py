"""FedLC: calibrate each client's scores by how many examples of each class it has.

Source
    Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022
    (key zhang2022fedlc). Section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.base.lazy import F, Tensor, torch
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import Criterion
from fedkeel.task.losses import cross_entropy


@dataclass(frozen=True)
class FedLC(Criterion):
    r"""Takes a margin off each class's score before the cross-entropy, larger for rare classes.

    .. math::
        \ell(z, y) = -\log\frac{e^{z_y-\tau n_y^{-1/4}}}{\sum_{c} e^{z_c-\tau n_c^{-1/4}}}

    with n_c the number of the client's examples of class c. Classes without examples are left out
    of the sum.

    Source: zhang2022fedlc, section 4, the calibrated cross-entropy.

    Args:
        tau: size of the margins, >= 0, in units of the scores. Public codes have 0.1 (GC-Fed,
            FedDecorr) and 1 (FedACG).
        exclude: whether the sum leaves out y itself, as the paper prints it. The loss then has no
            lower bound: it is the log of a sum of margins, and keeps growing them.
    Sent: nothing beyond the model.
    State: none.
    Cost: one pass over the scores for each step.
    Laws: tau = 0 without `exclude` is FedAvg, bit for bit, with no class left out. A client with
        equally many examples of every class trains as FedAvg does. A client of one class has
        nothing to learn.
    Deviations: the paper's abstract speaks of calibrating scores before softmax cross-entropy,
        which has y in the sum, as all public codes have; the loss that it prints has not, and is
        the option. A class without examples has an infinite margin here; one public code (FL-bench)
        takes its count as 1e-8. An example without any rival class has a loss of 0.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedlc(tau=1.0)").objective.criterion.tau
        1.0
    """

    tau: float = param(0.1, ge=0.0)
    exclude: bool = False

    name: ClassVar[str] = "fedlc"
    paper: ClassVar[str] = "zhang2022fedlc"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.CLASS_COUNTS, Capability.CLASSES, Capability.PLAIN_LOSS}
    )

    def criterion(self, logits: Tensor, step: Step) -> Tensor:
        """Return the calibrated cross-entropy of each example."""
        y = step.batch.labels
        true = y[:, None] == torch.arange(logits.shape[1], device=logits.device)  # [B, Y]
        scores = self._calibrated(logits, true, step)
        return _margin(scores, true) if self.exclude else cross_entropy(scores, y)

    def _calibrated(self, logits: Tensor, true: Tensor, step: Step) -> Tensor:
        """Return [B, Y] scores without their margins, -inf for classes without examples.

        An example's own class keeps its score in any case: padding may have any label.
        """
        if self.tau == 0.0:
            return logits
        counts = step.client_info.class_counts
        counts = F.pad(counts, (0, logits.shape[1] - len(counts)))  # outputs that no label has
        margins = self.tau * counts.clamp(min=1).to(logits.dtype) ** -0.25
        return torch.where((counts == 0) & ~true, -torch.inf, logits - margins)


def _margin(scores: Tensor, true: Tensor) -> Tensor:
    """Return [B] log-sum of all scores but the true one, less that one; 0 where there is no other.

    Both branches of every choice are finite, for the sake of their gradients.
    """
    others = torch.where(true, -torch.inf, scores)
    has_no_other = (others == -torch.inf).all(dim=1)
    rest = torch.where(has_no_other[:, None], 0.0, others).logsumexp(dim=1)
    true_score = torch.where(true, scores, 0.0).sum(dim=1)
    return torch.where(has_no_other, 0.0, rest - true_score)
