"""An attacker who knows FedReg: it makes the client's step on made-up examples, and compares.

FedReg's paper (xu2022fedreg, Eq. 12) takes the gradient's component along that of pseudo data with
uniform labels off (MG), so that matching plain gradients finds other inputs. The attacker knows the
method and all its numbers, and pseudo data are made of the examples themselves. So the whole step
is a function of the examples, which can be matched in place of the gradient: pseudo data of the
guess, the gradient at the slow point without its component, and both projections afterwards. Only
the signs by which pseudo data move are taken for constant, as their derivative is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.base.values import Values
from fedkeel.config import Local
from fedkeel.method.compose import Plan
from fedkeel.method.context import Step
from fedkeel.method.parts.fedreg import FedReg
from fedkeel.method.parts.fedsgd import FedSGD
from fedkeel.study.audit.matching import GradientModel
from fedkeel.study.audit.observation import Observation
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network
from fedkeel.tree import Tree


def find_fedreg(plan: Plan, local: Local, seen: Observation) -> FedReg | None:
    """Return FedReg, where one plain step of it on all examples is what was sent; else None."""
    part = next((part for part in plan.parts if isinstance(part, FedReg)), None)
    others = [other for other in plan.parts if other is not part and not isinstance(other, FedSGD)]
    is_one_step = seen.view == "client" and seen.steps.tolist() == [1]
    is_plain = (local.optimiser, local.momentum, local.weight_decay) == ("sgd", 0.0, 0.0)
    is_plain = is_plain and local.clip_norm is None
    return part if is_one_step and is_plain and not others else None


class FedRegModel(GradientModel):
    """What FedReg's step on made-up examples sends, as a differentiable function of them.

    Args:
        part: the method, with its numbers.
        seen: what the attacker sees.
    """

    def __init__(self, part: FedReg, seen: Observation) -> None:
        super().__init__(seen)
        self._part, self._lr = part, seen.lr

    def __call__(self, x: Tensor, y: Tensor) -> Tree:
        """Return minus the update over the learning rate."""
        start = {k: v.detach().requires_grad_() for k, v in self._params.items()}
        batch = Batch(x, y)
        made = _MadeUpStep(self._network, self._buffers, start, batch)
        step = cast(Step, made)
        made.prepared.update(self._part.prepare(batch, step))
        moved = tree.add(start, self._part.gradient(start, step), -self._lr)
        moved = self._part.correct(moved, step)
        return tree.scale(tree.sub(moved, start), -1.0 / self._lr)


@dataclass(frozen=True)
class _MadeUpStep:
    """What FedReg asks a step for, with gradients through which the examples can be moved."""

    network: Network
    buffers: Tree
    start: Tree
    batch: Batch
    prepared: dict[str, Any] = field(default_factory=dict)

    def grad(self, params: Tree) -> Tree:
        return self.task_grad(params, self.batch)

    def task_grad(self, params: Tree, batch: Batch) -> Tree:
        loss = self.network.loss(params, self.network.copy_buffers(self.buffers), batch)
        values = list(params.values())
        found = torch.autograd.grad(loss, values, create_graph=True, allow_unused=True)
        return {
            name: torch.zeros_like(value) if g is None else g
            for (name, value), g in zip(params.items(), found, strict=True)
        }

    def input_grad(self, params: Tree, batch: Batch) -> Tensor:
        fixed = {name: value.detach() for name, value in params.items()}
        constant = batch.y.detach() if isinstance(batch.y, Tensor) else batch.y
        batch = Batch(batch.x, constant, batch.weight)
        buffers = self.network.copy_buffers(self.buffers)
        return self.network.input_grad(fixed, buffers, batch, "eager")

    def logits(self, params: Tree, x: Values) -> Tensor:
        buffers = self.network.copy_buffers(self.buffers)
        return self.network.logits(params, buffers, x, train=False)

    def soft_target(self, scores: Tensor) -> Tensor:
        function = self.network.soft_target
        if function is None:
            raise TypeError("the loss takes no soft targets")
        return function(scores)
