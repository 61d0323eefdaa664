"""FedReg: keep the received model's knowledge, tested on generated data.

Source
    Xu et al., Acceleration of Federated Learning with Alleviated Forgetting in Local Training, ICLR
    2022 (key xu2022fedreg). Eq. (2)-(12), Algorithm D.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.base.values import only_tensor
from fedkeel.config import Weights
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import GradientRule, Preparation, StepCorrection
from fedkeel.task.batch import Batch
from fedkeel.tree import State, Tree

TINY = 1e-30
"""Added to squared norms that divide, as the public code does."""


@dataclass(frozen=True)
class FedReg(Preparation, GradientRule, StepCorrection):
    r"""Takes the gradient at a slow point, then pushes the model back where it forgets.

    .. math::
        \theta &\leftarrow \theta - \eta\,\nabla L_{\gamma\theta+(1-\gamma)\theta^t}(x, y) \\
        \theta &\leftarrow \theta - w_s g_s - w_p g_p

    where g_s and g_p are gradients at the midpoint of theta and theta^t on pseudo data, which
    theta^t itself labels, and on slightly perturbed data; w_s and w_p are the least non-negative
    numbers for which theta - theta^t no longer points along them.

    Source: xu2022fedreg, Eq. (2)-(3) pseudo and perturbed data, (8)-(11) the step, (12) MG,
        Algorithm D.1.

    Args:
        gamma: share of the local model in the slow point, in [0, 1]. The paper tunes 0.02 to 0.5.
        eta_s: step of the sign ascent that makes pseudo data, >= 0, in units of the inputs. The
            paper tunes 1e-6 to 0.2; too large leaves the data's manifold, too small conflicts.
        ratio: eta_p / eta_s, the step for perturbed data; 0.01 in the paper.
        ascent: E, number of ascent steps, >= 1; 10 in the paper.
        mg: whether the gradient loses its component along that of the pseudo data with uniform
            labels, to protect privacy (Eq. 12); for class labels only.
        pairing: the pseudo data that a step uses: those of its examples (``example``, the paper),
            or those of the batch at the same position in the round's first pass (``position``, the
            public code, where later epochs pair at random). MG uses those of its examples in both.
    Sent: nothing beyond the model.
    State: none.
    Cost: 3 gradients for each step (4 with mg), and 2 E input gradients for each distinct example
        of the round; with mg and pairing = ``position`` E more for each example of each step.
    Laws: on a single batch it follows the public code to rounding. gamma = 1 and eta_s = 0 leaves
        midpoint corrections on the batch itself, with the received model's labels and its own.
    Deviations: pseudo data are made once for each example and round, not once for each batch, which
        is the same for networks whose examples do not mix. They are made of the examples before
        augmentation. Pseudo data are not clamped to the data's range; the public code intends to
        clamp them and does not. It adds 1e-12 to the probabilities inside the logarithm of the
        loss; here nothing is added. On tasks without classes, which the paper does not have, the
        received model labels pseudo data with its own output, as the loss takes it for a target.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedreg(gamma=0.4, mg=True)").expression
        'fedreg(gamma=0.4, mg=True)'
    """

    gamma: float = param(0.5, ge=0.0, le=1.0)
    eta_s: float = param(0.1, ge=0.0)
    ratio: float = param(0.01, ge=0.0, le=1.0)
    ascent: int = param(10, ge=1)
    mg: bool = False
    pairing: Literal["example", "position"] = "example"

    name: ClassVar[str] = "fedreg"
    paper: ClassVar[str] = "xu2022fedreg"
    weights: ClassVar[Weights | None] = "uniform"
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        """Gradients by the inputs and soft targets; and classes, for uniform labels."""
        needs = {Capability.INPUT_GRADIENT, Capability.SOFT_TARGETS}
        return frozenset(needs | {Capability.CLASSES} if self.mg else needs)

    def prepare(self, examples: Batch, step: Step) -> State:
        """Return pseudo inputs, their soft targets and perturbed inputs, and the true targets."""
        pseudo = self._ascend(examples, self.eta_s, step)
        return {
            "pseudo_x": pseudo,
            "pseudo_y": step.soft_target(step.logits(step.start, pseudo)),
            "perturbed_x": self._ascend(examples, self.ratio * self.eta_s, step),
            "y": only_tensor(examples.y, "FedReg"),
        }

    def _ascend(self, examples: Batch, size: float, step: Step) -> Tensor:
        """Return inputs moved up the loss of the received model, by the sign of its gradient."""
        x = only_tensor(examples.x, "FedReg")
        for _ in range(self.ascent):
            slope = step.input_grad(step.start, Batch(x, examples.y, examples.weight))
            x = tree.plus(x, torch.sign(slope), size)
        return x

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the gradient at the slow point, without its semantic part where mg is set."""
        slow = tree.blend(params, step.start, self.gamma)
        grads = step.grad(slow)
        if not self.mg:
            return grads
        if self.pairing == "example":
            x = tree.leaf(step.prepared, "pseudo_x")
        else:  # those prepared are of other examples
            x = self._ascend(step.batch, self.eta_s, step)
        soft = tree.leaf(step.prepared, "pseudo_y")
        uniform = soft.new_full((len(x), soft.shape[1]), 1.0 / soft.shape[1])
        meaning = step.task_grad(slow, Batch(x, uniform, step.batch.weight))
        share = tree.dot(grads, meaning) / (tree.dot(meaning, meaning) + TINY)
        return tree.add(grads, meaning, -share)

    def correct(self, params: Tree, step: Step) -> Tree:
        """Return the parameters after the two half-space projections."""
        middle = tree.blend(params, step.start, 0.5)
        weight = step.batch.weight
        pseudo_x, pseudo_y = (tree.leaf(step.prepared, k) for k in ("pseudo_x", "pseudo_y"))
        perturbed_x, y = (tree.leaf(step.prepared, k) for k in ("perturbed_x", "y"))
        for batch in (Batch(pseudo_x, pseudo_y, weight), Batch(perturbed_x, y, weight)):
            slope = step.task_grad(middle, batch)
            drift = tree.dot(tree.sub(params, step.start), slope)
            share = torch.clamp(drift / (tree.dot(slope, slope) + TINY), min=0.0)
            params = tree.add(params, slope, -share)
        return params
