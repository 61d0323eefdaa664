"""FedSGD and Minibatch SGD: one server step for each round's gradient, no local path.

Source
    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
    AISTATS 2017 (key mcmahan2017), section 2, for FedSGD. Woodworth et al., Is Local SGD Better
    than Minibatch SGD?, ICML 2020 (key woodworth2020), section 3, for Minibatch SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.context import Round, Step
from fedkeel.method.part import Capability, Traits
from fedkeel.method.roles import GradientRule, LocalWork, UpdateTransform
from fedkeel.tree import Tree


@dataclass(frozen=True)
class FedSGD(LocalWork):
    r"""One step on all local examples at once, whatever local work the run asks for.

    .. math:: \theta^{t+1} = \theta^t - \eta \sum_k p_k \nabla F_k(\theta^t)

    Source: mcmahan2017, section 2. FedReg's baseline "SGD" is this with `weights = "uniform"`.
    Sent: nothing beyond the model.
    State: none.
    Cost: one gradient over all local examples.
    Laws: FedAvg with steps = 1 and batch_size = "all" is the same, bit for bit.
    Deviations: local momentum starts at 0 in every round, so that of one step it leaves nothing;
        Nesterov's form makes that step 1 + momentum times as long.

    Example:
        >>> FedSGD().work(Local(lr=0.1, epochs=5)).steps
        1
    """

    name: ClassVar[str] = "fedsgd"
    paper: ClassVar[str] = "mcmahan2017"

    def work(self, local: Local) -> Local:
        """Return the settings with one step on one batch of everything."""
        whole = {"epochs": None, "steps": 1, "batch_size": "all", "accumulate": 1}
        return local.model_copy(update=whole)


@dataclass(frozen=True)
class MinibatchSGD(GradientRule, UpdateTransform):
    r"""The mean of the round's mini-batch gradients, all taken at the received model.

    .. math:: \Delta_k = -\eta\,\frac1S\sum_{s=1}^S \nabla f_{B_s}(\theta^t)

    Source: woodworth2020, section 3; FedGC section 3 contrasts its pseudo-gradient with it.
    Sent: nothing beyond the model.
    State: none.
    Cost: one gradient for each mini-batch, as FedAvg.
    Laws: one step is FedAvg with one step; the order of the batches does not matter without
        momentum and weight decay.
    Deviations: the paper's machines count equally, which is `weights = "uniform"` here. With local
        momentum the mean is weighted by each gradient's share of the path. Weight decay acts where
        the steps have come to, not at the received model: in S steps of rate eta a decay of lambda
        differs by about eta lambda S / 2 of itself.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("minibatch_sgd").weights
        'examples'
    """

    name: ClassVar[str] = "minibatch_sgd"
    paper: ClassVar[str] = "woodworth2020"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    breaks: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.LINEAR_ACCUMULATION, Capability.WHOLE_UPDATES}
    )
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the gradient at the received model."""
        return step.grad(step.start)

    def transform_update(self, update: Tree, round: Round) -> Tree:
        """Divide the sum of the steps by the length of the path."""
        return tree.scale(update, 1.0 / round.path_length)
