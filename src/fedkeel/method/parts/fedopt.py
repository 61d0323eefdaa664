"""FedOpt: Adam, Yogi and Adagrad at the server, with the aggregate in place of the gradient.

Source
    Reddi et al., Adaptive Federated Optimization, ICLR 2021 (key reddi2021). Algorithm 2.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.part import Traits, param
from fedkeel.method.roles import ServerOptimiser
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree

Start = Literal["tau2", "zero"]
Correction = Literal["none", "moments", "rate"]


def unbiased(beta1: float, beta2: float, t: int, correction: Correction) -> tuple[float, float]:
    """Return what m and the root of v are multiplied by in the t-th step, t = 1, 2, ...

    >>> [round(f, 6) for f in unbiased(0.9, 0.99, 1, "moments")]
    [10.0, 10.0]
    """
    if correction == "none":
        return 1.0, 1.0
    if correction == "moments":
        return 1.0 / (1.0 - beta1**t), (1.0 - beta2**t) ** -0.5
    return (1.0 - beta2 ** (t + 1)) ** 0.5 / (1.0 - beta1 ** (t + 1)), 1.0


@dataclass(frozen=True)
class Adaptive(ServerOptimiser):
    """Base class of all three: a running mean of the aggregates over the root of their squares."""

    lr: float = param(0.1, gt=0.0)
    beta1: float = param(0.9, ge=0.0, lt=1.0)
    tau: float = param(1e-3, gt=0.0)
    v0: Start = "tau2"

    paper: ClassVar[str] = "reddi2021"
    traits: ClassVar[Traits] = Traits(takes_stale_updates=True)

    @abstractmethod
    def grow(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next v, given the squares of the aggregate's entries."""

    def factors(self, t: int) -> tuple[float, float]:
        """Return what m and the root of v are multiplied by in the t-th step."""
        return 1.0, 1.0

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return m = 0, v as `v0` says, and no steps."""
        initial = self.tau**2 if self.v0 == "tau2" else 0.0
        return {
            "m": tree.zeros_like(params),
            "v": tree.full_like(params, initial),
            "t": torch.zeros((), dtype=torch.int64),
        }

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model after a step along m / (sqrt(v) + tau), and m, v and t."""
        t = tree.leaf(cohort.state, "t") + 1
        m_factor, root_factor = self.factors(int(t))
        old_m, old_v = tree.leaves(cohort.state, "m"), tree.leaves(cohort.state, "v")
        beta1 = self.beta1
        m = tree.map(lambda d, m: torch.add(m * beta1, d, alpha=1.0 - beta1), update, old_m)
        v = tree.map(lambda d, v: self.grow(v, d.square()), update, old_v)

        def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            root = v.sqrt().mul_(root_factor).add_(self.tau)
            return torch.addcdiv(p, m, root, value=self.lr * m_factor)

        params = tree.map(moved, params, m, v)
        return params, {"m": m, "v": v, "t": t}


@dataclass(frozen=True)
class FedAdam(Adaptive):
    r"""Adam at the server.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1)\Delta, \qquad
        v \leftarrow \beta_2 v + (1-\beta_2)\Delta^2 \\
        \theta &\leftarrow \theta + \eta_g\, m / (\sqrt v + \tau)

    Source: reddi2021, Algorithm 2.

    Args:
        lr: eta_g, > 0, in units of the parameters: a first step moves each of them by at most
            (1 - beta1) eta_g / sqrt(1 - beta2). Tune it together with the clients' rate.
        beta1: weight of the past in m, in [0, 1). 0.9 in the paper.
        tau: what is added to the root, > 0, in units of the parameters: the smaller, the more the
            step adapts. 1e-3 in the paper.
        v0: v before the first round: ``tau2``, the least that the paper allows, or ``zero`` as in
            several public codes (FedLab, FL-bench, FedDecorr, Flower).
        beta2: weight of the past in v, in [0, 1). 0.99 in the paper.
        correction: ``none`` (the paper); ``moments`` divides m by 1 - beta1^t and v by 1 - beta2^t,
            as FedCAMS's public code; ``rate`` multiplies eta_g by sqrt(1 - beta2^(t+1)) /
            (1 - beta1^(t+1)), as Flower, which is one round ahead of itself.
    Sent: nothing beyond the model.
    State: m and v at the server, one model each, and the number of steps.
    Cost: six passes over the parameters.
    Laws: beta1 = beta2 = 0 moves each parameter by eta_g Delta / (|Delta| + tau); with
        v0 = zero, a tau much larger than every update is server momentum with damping and a rate of
        eta_g / tau; with v0 = tau2 that rate is half as large at first.
    Deviations: the paper allows any v0 >= tau^2; ours is tau^2. How clients count is the run's
        choice (`weights`).

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedadam(lr=0.01)").expression
        'fedadam(lr=0.01)'
    """

    beta2: float = param(0.99, ge=0.0, lt=1.0)
    correction: Correction = "none"

    name: ClassVar[str] = "fedadam"

    def grow(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the running mean of the squares."""
        return torch.add(v * self.beta2, square, alpha=1.0 - self.beta2)

    def factors(self, t: int) -> tuple[float, float]:
        """Return the correction of the t-th step."""
        return unbiased(self.beta1, self.beta2, t, self.correction)


@dataclass(frozen=True)
class FedYogi(Adaptive):
    r"""Yogi at the server: v changes by a share of the square, whatever its distance to it.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1)\Delta, \qquad
        v \leftarrow v - (1-\beta_2)\,\Delta^2\,\mathrm{sign}(v - \Delta^2) \\
        \theta &\leftarrow \theta + \eta_g\, m / (\sqrt v + \tau)

    Source: reddi2021, Algorithm 2.

    Args:
        lr: eta_g, > 0, in units of the parameters.
        beta1: weight of the past in m, in [0, 1). 0.9 in the paper.
        tau: what is added to the root, > 0, in units of the parameters. 1e-3 in the paper.
        v0: v before the first round: ``tau2``, the least that the paper allows, or ``zero`` as in
            several public codes.
        beta2: 1 - beta2 is the share of the square by which v moves, in [0, 1). 0.99 in the paper.
        correction: ``none`` (the paper), or ``moments`` and ``rate`` as for `fedadam`.
    Sent: nothing beyond the model.
    State: m and v at the server, one model each, and the number of steps.
    Cost: seven passes over the parameters.
    Laws: v stays >= 0. From v0 = zero the first round is FedAdam's.
    Deviations: the paper allows any v0 >= tau^2; ours is tau^2. How clients count is the run's
        choice (`weights`).

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedyogi").server_optimiser.beta2
        0.99
    """

    beta2: float = param(0.99, ge=0.0, lt=1.0)
    correction: Correction = "none"

    name: ClassVar[str] = "fedyogi"

    def grow(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v after a step of a share of the square towards the square."""
        return torch.addcmul(v, square, torch.sign(v - square), value=self.beta2 - 1.0)

    def factors(self, t: int) -> tuple[float, float]:
        """Return the correction of the t-th step."""
        return unbiased(self.beta1, self.beta2, t, self.correction)


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    r"""Adagrad at the server: v is the sum of all squares, so that steps shrink.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1)\Delta, \qquad v \leftarrow v + \Delta^2 \\
        \theta &\leftarrow \theta + \eta_g\, m / (\sqrt v + \tau)

    Source: reddi2021, Algorithm 2.

    Args:
        lr: eta_g, > 0, in units of the parameters.
        beta1: weight of the past in m, in [0, 1). 0 in the paper's experiments.
        tau: what is added to the root, > 0, in units of the parameters. 1e-3 in the paper.
        v0: v before the first round: ``tau2``, the least that the paper allows, or ``zero`` as in
            several public codes.
    Sent: nothing beyond the model.
    State: m and v at the server, one model each, and the number of steps.
    Cost: five passes over the parameters.
    Laws: equal aggregates move each parameter by eta_g / sqrt(t) in the t-th round, where tau is
        small and v0 is zero. v never falls.
    Deviations: the paper allows any v0 >= tau^2; ours is tau^2. How clients count is the run's
        choice (`weights`).

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedadagrad").server_optimiser.beta1
        0.0
    """

    beta1: float = param(0.0, ge=0.0, lt=1.0)

    name: ClassVar[str] = "fedadagrad"

    def grow(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the sum of the squares."""
        return v + square
