"""FedMLB: train each block so that it also works with the received model's later blocks.

Source
    Kim, Kim and Han, Multi-Level Branched Regularization for Federated Learning, ICML 2022 (key
    kim2022fedmlb). Section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import F, Tensor, torch
from fedkeel.errors import CompositionError
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import LossTerm
from fedkeel.task.batch import Output
from fedkeel.task.parameter_names import blocks, under
from fedkeel.tree import Tree


@dataclass(frozen=True)
class FedMLB(LossTerm):
    r"""Adds losses of hybrid networks, made of local first blocks and received last blocks.

    .. math::
        \lambda_1\ell(z) + \frac{1}{L}\sum_{l=1}^{L}\Bigl(\lambda_2\ell(z_l) + \lambda_3\,
        \mathrm{KL}\bigl(\mathrm{softmax}(z_l/T)\,\big\|\,\mathrm{softmax}(z/T)\bigr)\Bigr)

    where z are the local model's scores of an example, and z_l those of the network whose first l
    of L + 1 blocks are the local model's and whose others are the received one's. Gradients flow
    through all of them.

    Source: kim2022fedmlb, section 3.

    Args:
        lambda1: weight of the local model's loss, >= 0.
        lambda2: weight of the hybrids' losses, >= 0.
        lambda3: weight of the divergences, >= 0.
        temperature: T, > 0.
        begin: the sub-modules, separated by commas, with each of which a new block begins, e.g.
            ``"layer1,layer3,fc"``. None makes a block of every child of the network, where a child
            without a matrix or a filter, such as a normalisation, belongs to the one before it: in
            ResNet-18 the stem, the four stages and the classifier, the paper's division.
    Sent: nothing beyond the model.
    State: none.
    Cost: L more forward and backward passes for each step.
    Laws: lambda2 = lambda3 = 0 with lambda1 = 1 is FedAvg, bit for bit. In a first step all
        networks are equal, the divergences are 0, and the hybrids add the gradient of the loss to
        their local blocks once more, in shares.
    Deviations: hybrids are in training mode throughout. Divergences are not multiplied by T^2, as
        in the public code. That code clips gradients to a norm of 10: add `clip`.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedmlb(lambda3=0.5)+momentum").expression
        'fedmlb(lambda3=0.5)+momentum'
    """

    lambda1: float = param(1.0, ge=0.0)
    lambda2: float = param(1.0, ge=0.0)
    lambda3: float = param(1.0, ge=0.0)
    temperature: float = param(1.0, gt=0.0)
    begin: str | None = None

    name: ClassVar[str] = "fedmlb"
    paper: ClassVar[str] = "kim2022fedmlb"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.BLOCKS, Capability.CLASSES})

    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return what the hybrids add to the loss of each example."""
        ours = torch.log_softmax(output.logits / self.temperature, dim=1)
        every = self.blocks(step.start)
        total = torch.zeros_like(output.logits[:, 0])
        mixed = dict(step.start)
        for names in every[:-1]:
            mixed = {**mixed, **tree.pick(params, names)}
            hybrid = step.output(mixed, train=True).logits
            theirs = torch.log_softmax(hybrid / self.temperature, dim=1)
            apart = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)
            total = total + self.lambda2 * _losses(hybrid, step) + self.lambda3 * apart
        total = total / (len(every) - 1)
        if self.lambda1 == 1.0:
            return total
        return total + (self.lambda1 - 1.0) * _losses(output.logits, step)

    def blocks(self, params: Tree) -> list[list[str]]:
        """Return the names of the parameters of each block, in order.

        Raises:
            CompositionError: `begin` names a sub-module that the model does not have, or there is
                one block only.
        """
        out = self._blocks(params)
        if len(out) < 2:
            raise CompositionError(
                "fedmlb: the network is a single block, of which there are no hybrids.",
                got=", ".join(out[0][:3]),
                expected="two blocks at least",
                do="name where blocks begin, e.g. fedmlb(begin='layer2,fc')",
            )
        return out

    def _blocks(self, params: Tree) -> list[list[str]]:
        if self.begin is None:
            return _merged(blocks(list(params)), params)
        starts = [name.strip() for name in self.begin.split(",")]
        unknown = [s for s in starts if not any(under(k, s) for k in params)]
        if unknown:
            owners = ", ".join(dict.fromkeys(k.rpartition(".")[0] for k in params))
            raise CompositionError(
                f"fedmlb: the model has no parameters under {unknown[0]!r}.",
                expected=f"some of {owners}",
            )
        out: list[list[str]] = [[]]
        current = ""
        for name in params:
            block = next((s for s in starts if under(name, s)), current)
            if block != current and out[-1]:
                out.append([])
            current = block
            out[-1].append(name)
        return out


def _merged(blocks: list[list[str]], params: Tree) -> list[list[str]]:
    """Join each block whose parameters have at most one axis to the block before it."""
    out: list[list[str]] = []
    for names in blocks:
        if out and all(params[k].ndim <= 1 for k in names):
            out[-1] = out[-1] + names
        else:
            out.append(names)
    return out


def _losses(logits: Tensor, step: Step) -> Tensor:
    """Return the loss of each example, [B], as the local model's is: a criterion's where one is."""
    criterion = step.objective.criterion
    if criterion is None:
        return step.network.example_losses(logits, step.batch.y)
    return criterion.criterion(logits, step.view(criterion.name))
