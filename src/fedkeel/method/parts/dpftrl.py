"""DP-FTRL: clipped updates, and noise on their sums over rounds by a binary tree.

Source
    Kairouz et al., Practical and Private (Deep) Learning without Sampling or Shuffling, ICML 2021
    (key kairouz2021dpftrl). Algorithm 1 with restarts (Section 4.1, Appendix D), the tree of
    Appendix B.1 without the estimator of Honaker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.base.rng import generator
from fedkeel.config import Weights
from fedkeel.method.context import Population, Round, RoundCohort
from fedkeel.method.part import Stage, Traits, param
from fedkeel.method.parts.dpclient import clipped
from fedkeel.method.roles import Reduction, UpdateTransform
from fedkeel.solve.span import Span, Sums
from fedkeel.tree import Tree


def nodes_of_step(step: int) -> Iterator[tuple[int, int, int]]:
    """Yield the nodes whose noise a step adds to that of the step before, or takes off it.

    The sum of the first t steps has the noise of the nodes that t's bits name: a bit of 2^l is the
    node of the 2^l steps that end with t without its lower bits.

    Args:
        step: t, from 1.

    Yields:
        Level l, last step of the node, and +1 or -1.

    >>> list(nodes_of_step(4))
    [(2, 4, 1), (1, 2, -1), (0, 3, -1)]
    """
    lowest = (step & -step).bit_length() - 1
    yield lowest, step, 1
    for level in reversed(range(lowest)):
        yield level, ((step - 1) >> level) << level, -1


def releases(rounds: int, period: int) -> int:
    """Return in how many nodes' sums a client is, at most, that comes once in each tree.

    Args:
        rounds: rounds made.
        period: rounds of a tree.

    >>> [releases(rounds, 4) for rounds in range(1, 7)]
    [1, 2, 2, 3, 4, 5]
    """
    trees, rest = divmod(rounds, period)
    return trees * period.bit_length() + rest.bit_length()


def pass_length(clients: int, per_round: int) -> int:
    """Return the number of rounds in which every client comes once."""
    return -(-clients // max(per_round, 1))


@dataclass(frozen=True)
class TreeDP(UpdateTransform, Reduction):
    r"""Clips each client's update, and adds noise that a tree shares among the sums over rounds.

    .. math::
        \theta^{t} = \theta^{0} + \frac1K \Bigl(\sum_{s \le t} \sum_k
        \min\bigl(1,\, C/\lVert\Delta^s_k\rVert\bigr)\Delta^s_k
        + \sigma C \sum_{b\,:\,t_b = 1} z_{b}^{t}\Bigr)

    where the sum runs over the bits of t, and :math:`z_b^t \sim \mathcal N(0, I)` belongs to a node
    of a binary tree over the rounds, which later rounds use again. So the noise on the model after
    t rounds is that of at most :math:`1 + \log_2 t` draws, in place of t. A tree ends with each
    pass over the clients, and the next one begins.

    Source: kairouz2021dpftrl, Algorithm 1 with restarts, tree of Appendix B.1.

    Args:
        norm: C, the largest norm of an update over the whole model, > 0.
        sigma: standard deviation of the noise of a node, >= 0, in units of C; 0 only clips, which
            protects nobody. The setting ``privacy.noise = "tree"`` adds this part with a sigma that
            keeps a budget.
    Sent: nothing beyond the model.
    State: none: a node's noise is drawn again where it is taken off.
    Cost: as `dpclient`, with 2 draws of noise in a round on average, 1 + log2 of the rounds of a
        pass at most.
    Laws: without noise, a bound above every norm is FedAvg with equal weights where everybody
        comes. Where everybody comes in each round, a pass is one round, and the noise is that of
        `dpclient`. After t rounds of a pass, the noise of each number of the model has the
        deviation sigma C / K times the root of the number of ones in t, written in binary.
    Deviations: updates of clients, where the paper's algorithm has gradients: its Section 5.2 does
        the same. The paper's learning rate is `addition`, its momentum (DP-FTRLM) `momentum`. K is
        the number of clients that a round expects. No estimator lowers the noise of a sum by other
        nodes (Honaker), and no tree is filled up before the next one begins. The noise is from the
        stream of the run's seed: who knows the seed can take it off.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("dpftrl(norm=0.5, sigma=2.0)+momentum").reduction.name
        'dpftrl'
    """

    norm: float = param(1.0, gt=0.0)
    sigma: float = param(0.0, ge=0.0)

    name: ClassVar[str] = "dpftrl"
    paper: ClassVar[str] = "kairouz2021dpftrl"
    weights: ClassVar[Weights | None] = "uniform"
    update_stage: ClassVar[Stage] = Stage.LIMIT
    traits: ClassVar[Traits] = Traits(hides_updates=True)

    def period(self, population: Population) -> int:
        """Return the number of rounds of a tree: those of a pass over the clients."""
        return pass_length(population.clients, population.per_round)

    def transform_update(self, update: Tree, round: Round) -> Tree:
        """Return the update, shortened where it is too long."""
        return clipped(update, self.norm)

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the mean, with what the noise of this sum over rounds has more than the last."""
        if isinstance(updates, Sums):
            total = tree.sum_rows(updates.rows)
        else:
            total = updates.sum(np.ones(len(updates)))
        step = cohort.round % self.period(cohort.population)
        begin, count = cohort.round - step, cohort.population.per_round
        noise = {name: np.zeros(value.shape) for name, value in total.items()}
        for level, last, sign in nodes_of_step(step + 1) if self.sigma else ():
            random = generator(cohort.seed, f"{self.name}.{level}", begin + last)
            for name, value in total.items():
                noise[name] = noise[name] + sign * random.standard_normal((1, *value.shape))[0]
        deviation = self.sigma * self.norm
        return {
            name: (
                value + (deviation * torch.from_numpy(noise[name])).to(value.device, value.dtype)
            )
            / count
            for name, value in total.items()
        }
