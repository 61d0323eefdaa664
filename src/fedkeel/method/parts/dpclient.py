"""DP-FedAvg: clipped updates and noise on their sum, with a fixed or an adaptive bound.

Source
    McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018
    (key mcmahan2018dp). Algorithm 1. Andrew et al., Differentially Private Learning with Adaptive
    Clipping, NeurIPS 2021 (key andrew2021). Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.base.rng import generator
from fedkeel.config import Weights
from fedkeel.errors import CompositionError
from fedkeel.method.context import Outcome, Population, Round, RoundCohort
from fedkeel.method.part import Stage, Traits, param
from fedkeel.method.roles import Broadcast, Reduction, ServerState, UpdateTransform, Upload
from fedkeel.solve.span import Span, Sums
from fedkeel.tree import State, Tree

AT_BOUND = 1e-5
"""An update that is shorter than the bound by no more than this share counts as shortened: rounding
keeps shortened ones from having the bound's very length."""


def clipped(update: Tree, bound: Tensor | float) -> Tree:
    """Return an update that is no longer than a bound, over the whole model."""
    length = tree.norm(update)
    bound = torch.as_tensor(bound, dtype=length.dtype, device=length.device)
    return tree.scale(update, (bound / length).clamp(max=1.0))


def noisy_mean(updates: Span, cohort: RoundCohort, deviation: float) -> Tree:
    """Return the sum of the updates with Gaussian noise, over the expected number of clients.

    Args:
        updates: the clipped updates, whose weights are equal; there may be none. Where their sum is
            noisy already, none is added.
        cohort: the clients.
        deviation: standard deviation of the noise on the sum.
    """
    if isinstance(updates, Sums):
        total = tree.sum_rows(updates.rows)
    else:
        total = updates.sum(np.ones(len(updates)))
    random, count = cohort.rng(), cohort.population.per_round
    if isinstance(updates, Sums) and updates.noisy:
        deviation = 0.0
    mean: Tree = {}
    for name, value in total.items():
        noise = torch.from_numpy(random.standard_normal((1, *value.shape)))[0]
        mean[name] = (value + (deviation * noise).to(value.device, value.dtype)) / count
    return mean


@dataclass(frozen=True)
class ClientDP(UpdateTransform, Reduction):
    r"""Clips each client's update and adds Gaussian noise to their sum.

    .. math:: \Delta \leftarrow \frac1K\Bigl(\sum_{k} \min\bigl(1,\, C/\lVert\Delta_k\rVert\bigr)
        \Delta_k + \sigma C z\Bigr), \qquad z \sim \mathcal N(0, I)

    K is the number of clients that a round expects, not the number that came, so that one client
    more or less changes the sum by C at most.

    Source: mcmahan2018dp, Algorithm 1, with the fixed-denominator estimator and flat clipping.

    Args:
        norm: C, the largest norm of an update over the whole model, > 0.
        sigma: standard deviation of the noise on the sum, >= 0, in units of C; 0 only clips, which
            protects nobody. The setting `privacy` adds this part with a sigma that keeps a budget.
    Sent: nothing beyond the model.
    State: none.
    Cost: two passes over the update at the client, one over the model at the server.
    Laws: without noise, a bound above every norm is FedAvg with equal weights where everybody
        comes; the change of the aggregate by one client is C / K at most. The noise of each number
        of the aggregate has deviation sigma C / K, whoever comes.
    Deviations: the paper draws each client by itself with a fixed probability (sampling =
        ``poisson``) and lets clients weigh by their examples up to a cap; here they weigh the same.
        The norm is computed in the run's own type, so that an update may be longer than C by
        rounding. The noise is from the stream of the run's seed: who knows the seed can take it
        off.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedprox+dpclient(norm=0.5, sigma=1.0)").reduction.name
        'dpclient'
    """

    norm: float = param(1.0, gt=0.0)
    sigma: float = param(0.0, ge=0.0)

    name: ClassVar[str] = "dpclient"
    paper: ClassVar[str] = "mcmahan2018dp"
    weights: ClassVar[Weights | None] = "uniform"
    update_stage: ClassVar[Stage] = Stage.LIMIT
    traits: ClassVar[Traits] = Traits(hides_updates=True)

    def transform_update(self, update: Tree, round: Round) -> Tree:
        """Return the update, shortened where it is too long."""
        return clipped(update, self.norm)

    def sum_noise(self) -> float:
        """Return the deviation of the noise on the sum."""
        return self.sigma * self.norm

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the noisy mean over the expected number of clients."""
        return noisy_mean(updates, cohort, self.sum_noise())


@dataclass(frozen=True)
class AdaptiveClientDP(UpdateTransform, Upload, Broadcast, ServerState, Reduction):
    r"""Clips each client's update at a bound that follows a quantile of their norms, with noise.

    .. math:: C \leftarrow C \exp\bigl(-\eta(\tilde b - \gamma)\bigr), \qquad \tilde b = \tfrac12 +
        \frac1K\Bigl(\sum_k \bigl(b_k - \tfrac12\bigr) + \sigma_b z\Bigr), \qquad
        b_k = \mathbb 1[\lVert\Delta_k\rVert \le C]

    and the update as of ``dpclient``, with noise of deviation
    :math:`(\sigma^{-2} - (2\sigma_b)^{-2})^{-1/2}\, C` on the sum.

    Source: andrew2021, Algorithm 1 and Theorem 1: both releases together are one with sigma.

    Args:
        norm: C before the first round, > 0.
        sigma: noise of a round, >= 0, in units of C; 0 only clips. The setting `privacy` adds this
            part, where it has a quantile, with a sigma that keeps a budget.
        quantile: gamma, share of the updates that are to be no longer than C, in (0, 1).
        lr: eta of the bound, > 0. The paper takes 0.2.
        count_sigma: sigma_b, deviation of the noise on the count, >= 0; 0 takes K / 20 as the
            paper does, and sigma where that is more. It has to be more than sigma / 2.
    Sent: the bound to the clients; from each one a number, whether its update was longer.
    State: the bound, at the server.
    Cost: as `dpclient`.
    Laws: without noise, C becomes the quantile of norms that do not change. Noise and one client's
        change of the sum as of `dpclient`, with C as it was in the round.
    Deviations: b_k - 1/2 is sent and not b_k, and 1/2 is added at the server, so that a client that
        does not come changes the sum by 1/2, on which Theorem 1 counts. Without noise, sigma_b is 0
        where it is not given. Near the bound: b_k is taken of the update after it was shortened,
        so one whose norm is between (1 - 1e-5) C and C counts as longer, while the paper and public
        code (TensorFlow Privacy's quantile estimator) count norms up to C itself as short. Only
        where a share of all norms lies in that band does the bound differ: it then grows beyond
        them by up to one part in 100,000.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("dpquantile(quantile=0.9)").reduction.name
        'dpquantile'
    """

    norm: float = param(1.0, gt=0.0)
    sigma: float = param(0.0, ge=0.0)
    quantile: float = param(0.5, gt=0.0, lt=1.0)
    lr: float = param(0.2, gt=0.0)
    count_sigma: float = param(0.0, ge=0.0)

    name: ClassVar[str] = "dpquantile"
    paper: ClassVar[str] = "andrew2021"
    weights: ClassVar[Weights | None] = "uniform"
    update_stage: ClassVar[Stage] = Stage.LIMIT
    traits: ClassVar[Traits] = Traits(hides_updates=True, needs_only_sum=True)

    def message(self, state: State) -> State:
        """Return the bound."""
        return {"norm": state["norm"]}

    def transform_update(self, update: Tree, round: Round) -> Tree:
        """Return the update, shortened where it is too long."""
        return clipped(update, tree.leaf(round.broadcast, "norm"))

    def upload(self, round: Round) -> State:
        """Return 1/2 where the update was not shortened, else -1/2."""
        length = tree.norm(round.update)
        bound = tree.leaf(round.broadcast, "norm").to(length.dtype)
        return {"short": (length < (1.0 - AT_BOUND) * bound).to(length.dtype) - 0.5}

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the noisy mean over the expected number of clients."""
        bound = float(tree.leaf(cohort.state, "norm"))
        return noisy_mean(updates, cohort, self.update_sigma(cohort.population) * bound)

    def init_server(self, params: Tree, population: Population) -> State:
        """Return the first bound, in float64."""
        self.update_sigma(population)
        return {"norm": torch.tensor(self.norm, dtype=torch.float64)}

    def next_server(self, outcome: Outcome) -> State:
        """Return the bound of the next round."""
        cohort = outcome.cohort
        count = cohort.population.per_round
        short = float(tree.leaf(cohort.uploads, "short").double().sum())
        random = generator(cohort.seed, f"{self.name}.count", cohort.round)
        noise = random.standard_normal() * self._count_sigma(cohort.population)
        share = 0.5 + (short + noise) / count
        bound = float(tree.leaf(cohort.state, "norm"))
        cohort.log("norm", bound)
        new = bound * math.exp(-self.lr * (share - self.quantile))
        return {"norm": torch.tensor(new, dtype=torch.float64)}

    def update_sigma(self, population: Population) -> float:
        """Return the noise on the sum of the updates, in units of C.

        Raises:
            CompositionError: the noise on the count is too small.
        """
        count_sigma = self._count_sigma(population)
        if self.sigma == 0.0:
            return 0.0
        if 2 * count_sigma <= self.sigma:
            raise CompositionError(
                "dpquantile has too little noise on its count of short updates.",
                got=f"count_sigma = {count_sigma:g} with sigma = {self.sigma:g}",
                expected=f"more than {self.sigma / 2:g}",
                why="the count alone would reveal more than sigma allows",
                do=f"set count_sigma = {self.sigma:g}, or take the fixed bound of dpclient "
                "(leave out privacy.quantile)",
            )
        return 1 / math.sqrt(self.sigma**-2 - (2 * count_sigma) ** -2)

    def _count_sigma(self, population: Population) -> float:
        if self.sigma == 0.0:
            return self.count_sigma
        return self.count_sigma or max(population.per_round / 20, self.sigma)
