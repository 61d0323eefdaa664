"""The path of a local round: whether it is a sum of gradients, and its length."""

from __future__ import annotations

import math
from functools import lru_cache

from fedkeel.base.lazy import torch
from fedkeel.config import Local
from fedkeel.method.local_optimiser import OPTIMISERS, LocalOptimiser, LocalSGD
from fedkeel.tree import Tree


def nonlinear_optimiser(local: Local) -> str:
    """Return the name of a local optimiser that breaks LINEAR_ACCUMULATION, "" where it does not.

    A path is a weighted sum of its gradients where the weights depend only on the number of the
    step, and nothing comes from earlier rounds. Adam divides by the size of the gradients; momentum
    that is kept moves by earlier ones.
    """
    keeps_momentum = local.keep_state and local.momentum > 0.0
    is_linear = OPTIMISERS[local.optimiser] is LocalSGD and not keeps_momentum
    return "" if is_linear else local.optimiser


@lru_cache(maxsize=4096)
def path_length(
    optimiser: LocalOptimiser, steps: int, lr: float, pull: float, factors: tuple[float, ...] = ()
) -> float:
    r"""Return the displacement over -lr that `steps` gradients of 1 cause: FedNova's norm of a.

    The optimiser itself steps on unit gradients, with the pull of the penalties acting on the
    displacement. That is :math:`\lVert a_i\rVert_1` for any momentum, Nesterov's form and proximal
    term. Weight decay is part of the gradient, not of the path. An optimiser whose path is not
    a weighted sum of gradients has no such length: nan.

    Args:
        optimiser: the local optimiser.
        steps: S.
        lr: learning rate of the round.
        pull: sum of the penalties' pulls.
        factors: learning rate of each step over `lr`; () for 1 in all steps.

    >>> path_length(LocalSGD(), steps=5, lr=0.1, pull=0.0)
    5.0
    >>> round(path_length(LocalSGD(momentum=0.9), steps=2, lr=0.1, pull=0.0), 12)
    2.9
    """
    if not isinstance(optimiser, LocalSGD):
        return math.nan
    plain = LocalSGD(optimiser.momentum, optimiser.nesterov)
    path: Tree = {"u": torch.zeros((), dtype=torch.float64)}  # displacement in units of -lr
    state = plain.init(path)
    for factor in factors or (1.0,) * steps:
        path, state = plain.step(path, {"u": lr * pull * path["u"] - 1.0}, state, factor)
    return float(path["u"])
