"""The local optimiser, and the length of the local path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedkeel.config import Local
from fedkeel.tree import State, Tree, substate, tensors


@dataclass(frozen=True)
class LocalSGD:
    r"""Stochastic gradient descent, in the conventions of torch.optim.SGD.

    .. math::
        g \leftarrow g + \lambda\theta,\quad m \leftarrow \rho m + g,\quad
        \theta \leftarrow \theta - \eta m

    with g + rho m in place of m for Nesterov's form. The buffer m starts at 0 in every round.

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
    def of(cls, local: Local, no_decay: frozenset[str] = frozenset()) -> LocalSGD:
        """Return the optimiser of some settings."""
        return cls(local.momentum, local.nesterov, local.weight_decay, no_decay)

    def init(self, params: Tree) -> State:
        """Return the state before the first step."""
        if self.momentum == 0.0:
            return {}
        return {"momentum": {k: torch.zeros_like(v) for k, v in params.items()}}

    def step(
        self, params: Tree, grads: Tree, state: State, lr: float | Tensor
    ) -> tuple[Tree, State]:
        """Return parameters and state after one step."""
        if self.weight_decay != 0.0:
            grads = {
                k: g if k in self.no_decay else torch.add(g, params[k], alpha=self.weight_decay)
                for k, g in grads.items()
            }
        if self.momentum != 0.0:
            m = tensors(substate(state, "momentum"))
            m = {k: torch.add(g, m[k], alpha=self.momentum) for k, g in grads.items()}
            state = {"momentum": dict(m)}
            if self.nesterov:
                m = {k: torch.add(g, m[k], alpha=self.momentum) for k, g in grads.items()}
            grads = m
        if isinstance(lr, Tensor):
            return {k: v - lr * grads[k] for k, v in params.items()}, state
        return {k: torch.sub(v, grads[k], alpha=lr) for k, v in params.items()}, state


@lru_cache(maxsize=4096)
def path_length(optimiser: LocalSGD, steps: int, lr: float, pull: float) -> float:
    r"""Return the displacement over -lr that `steps` gradients of 1 cause: FedNova's norm of a.

    The optimiser itself steps on unit gradients, with the pull of the penalties acting on the
    displacement. That is :math:`\lVert a_i\rVert_1` for any momentum, Nesterov's form and proximal
    term. Weight decay is part of the gradient, not of the path.

    >>> path_length(LocalSGD(), steps=5, lr=0.1, pull=0.0)
    5.0
    >>> round(path_length(LocalSGD(momentum=0.9), steps=2, lr=0.1, pull=0.0), 12)
    2.9
    """
    plain = LocalSGD(optimiser.momentum, optimiser.nesterov)
    path: Tree = {"u": torch.zeros((), dtype=torch.float64)}  # displacement in units of -lr
    state = plain.init(path)
    for _ in range(steps):
        path, state = plain.step(path, {"u": lr * pull * path["u"] - 1.0}, state, 1.0)
    return float(path["u"])
