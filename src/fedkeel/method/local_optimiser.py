"""The local optimisers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Local
from fedkeel.tree import State, Tree, leaf, leaves, substate, tensors


class LocalOptimiser(ABC):
    """Turns the gradients of a client's round into steps."""

    @abstractmethod
    def init(self, params: Tree) -> State:
        """Return the state before the first step."""

    @abstractmethod
    def step(
        self, params: Tree, grads: Tree, state: State, lr: float | Tensor
    ) -> tuple[Tree, State]:
        """Return parameters and state after one step."""


def descend(params: Tree, direction: Tree, lr: float | Tensor) -> Tree:
    """Return params - lr * direction."""
    if isinstance(lr, torch.Tensor):
        return {k: v - lr * direction[k] for k, v in params.items()}
    return {k: torch.sub(v, direction[k], alpha=lr) for k, v in params.items()}


def decayed(grads: Tree, params: Tree, decay: float, no_decay: frozenset[str]) -> Tree:
    """Return grads + decay * params."""
    if decay == 0.0:
        return grads
    return {
        k: g if k in no_decay else torch.add(g, params[k], alpha=decay) for k, g in grads.items()
    }


def moments(
    m: Tree, v: Tree, grads: Tree, betas: tuple[float | Tensor, float | Tensor]
) -> tuple[Tree, Tree]:
    """Return Adam's moments after a step: beta m + (1 - beta) g, and the same of g^2 for v."""
    beta1, beta2 = betas
    m = tree.map(lambda g, m: torch.lerp(m, g, 1.0 - beta1), grads, m)
    if isinstance(beta2, torch.Tensor):
        return m, tree.map(lambda g, v: beta2 * v + (1.0 - beta2) * g * g, grads, v)
    v = tree.map(lambda g, v: torch.mul(v, beta2).addcmul(g, g, value=1.0 - beta2), grads, v)
    return m, v


@dataclass(frozen=True)
class LocalSGD(LocalOptimiser):
    r"""Stochastic gradient descent, in the conventions of torch.optim.SGD.

    .. math::
        g \leftarrow g + \lambda\theta,\quad m \leftarrow \rho m + g,\quad
        \theta \leftarrow \theta - \eta m

    with g + rho m in place of m for Nesterov's form. The buffer m starts at 0.

    Args:
        momentum: rho.
        nesterov: whether to use Nesterov's form.
        weight_decay: lambda.
        no_decay: parameters without weight decay: those that no gradient reaches, as in torch.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    no_decay: frozenset[str] = frozenset()

    @classmethod
    def of(cls, local: Local, no_decay: frozenset[str] = frozenset()) -> Self:
        """Return the optimiser of some settings."""
        return cls(local.momentum, local.nesterov, local.weight_decay, no_decay)

    def init(self, params: Tree) -> State:
        """Return the state before the first step."""
        if self.momentum == 0.0:
            return {}
        return {"momentum": tree.zeros_like(params)}

    def step(
        self, params: Tree, grads: Tree, state: State, lr: float | Tensor
    ) -> tuple[Tree, State]:
        """Return parameters and state after one step."""
        grads = decayed(grads, params, self.weight_decay, self.no_decay)
        if self.momentum != 0.0:
            m = tensors(substate(state, "momentum"))
            m = tree.add(grads, m, self.momentum)
            state = {"momentum": m}
            grads = tree.add(grads, m, self.momentum) if self.nesterov else m
        return descend(params, grads, lr), state


@dataclass(frozen=True)
class LocalAdam(LocalOptimiser):
    r"""Adam and AdamW, in the conventions of torch.optim.Adam and torch.optim.AdamW.

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1) g,\quad v \leftarrow \beta_2 v + (1-\beta_2) g^2,\quad
        \theta \leftarrow \theta - \eta\Bigl(\lambda\theta
            + \frac{m / (1-\beta_1^s)}{\sqrt{v / (1-\beta_2^s)} + \epsilon}\Bigr)

    in step s = 1, 2, ... This is AdamW; Adam adds lambda theta to g instead. m and v start at 0.

    Args:
        betas: beta_1 and beta_2.
        eps: epsilon.
        weight_decay: lambda.
        decoupled: whether the weight decay is AdamW's.
        no_decay: parameters without weight decay: those that no gradient reaches, as in torch.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    no_decay: frozenset[str] = frozenset()

    @classmethod
    def of(cls, local: Local, no_decay: frozenset[str] = frozenset()) -> Self:
        """Return the optimiser of some settings."""
        decoupled = local.optimiser == "adamw"
        return cls(local.betas, local.eps, local.weight_decay, decoupled, no_decay)

    def init(self, params: Tree) -> State:
        """Return the state before the first step: m, v and the number of steps."""
        count = next(iter(params.values())).new_zeros((), dtype=torch.float64)
        return {"m": tree.zeros_like(params), "v": tree.zeros_like(params), "steps": count}

    def step(
        self, params: Tree, grads: Tree, state: State, lr: float | Tensor
    ) -> tuple[Tree, State]:
        """Return parameters and state after one step."""
        (beta1, beta2), steps = self.betas, leaf(state, "steps") + 1.0
        if not self.decoupled:
            grads = decayed(grads, params, self.weight_decay, self.no_decay)
        m, v = moments(leaves(state, "m"), leaves(state, "v"), grads, self.betas)
        # in float64 as in torch, whatever the type of the parameters
        first, second = 1.0 - beta1**steps, (1.0 - beta2**steps).sqrt()
        direction = tree.map(
            lambda m, v: m / first.to(m.dtype) / (v.sqrt() / second.to(v.dtype) + self.eps), m, v
        )
        if self.decoupled:
            direction = decayed(direction, params, self.weight_decay, self.no_decay)
        return descend(params, direction, lr), {"m": m, "v": v, "steps": steps}


OPTIMISERS: Mapping[str, type[LocalSGD | LocalAdam]] = {
    "sgd": LocalSGD,
    "adam": LocalAdam,
    "adamw": LocalAdam,
}
"""Every local optimiser by its name in the settings."""


def clipped(grads: Tree, largest: float | None) -> Tree:
    """Return the gradient, shortened as by torch.nn.utils.clip_grad_norm_ where it is too long.

    Args:
        grads: the gradient.
        largest: norm allowed over the whole model; None clips nothing.
    """
    if largest is None:
        return grads
    norms = [torch.linalg.vector_norm(g) for g in grads.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return tree.scale(grads, (largest / (norm + 1e-6)).clamp(max=1.0))
