"""What the noise of a private run leaves of its model, said before the first round."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fedkeel.data import batches
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import counted
from fedkeel.features.budget.budget_account import Budget
from fedkeel.method.context import Population
from fedkeel.method.parts.dpclient import AdaptiveClientDP, ClientDP
from fedkeel.method.parts.dpftrl import TreeDP
from fedkeel.method.parts.dpsgd import DPSGD
from fedkeel.tree import numel

LOUD, DEAFENING, QUIET = 1.0, 4.0, 0.5
"""Length of all noise together over the farthest way of the model, from which accuracy falls, from
which it may fall to chance, and which hardly costs any. On digits, with 2,410 and 15,010
parameters, 4 to 40 clients and 15 to 40 rounds, accuracy fell by 0 to 12 points at 1, by 3 to 46 at
2 and by 24 to 77 at 4; at 0.6 by 5 at most."""

LEAST_SIGMA, MOST_EPSILON = 0.2, 1000.0
"""Noise below which, and epsilon from which, a budget promises nothing and is not recommended."""


@dataclass(frozen=True)
class NoiseForecast:
    """The expected length of the noise beside that of what is learned.

    The model is the sum of the rounds. All updates together carry it T times the bound at most, and
    so far only where they agree; the noise of T rounds, each of its own, is sqrt(T) times as long
    as that of one.

    Args:
        in_a_round: length of the noise on the mean update over the longest update that the bound
            allows.
        rounds: T.
        per_round: clients that a round expects.
    """

    in_a_round: float
    rounds: int
    per_round: int

    @property
    def in_all(self) -> float:
        """The same over all rounds together."""
        return self.in_a_round / math.sqrt(self.rounds)


def noise_forecast(prepared: Prepared) -> NoiseForecast | None:
    """Return the forecast of a run, None where its method adds no noise."""
    plan, population = prepared.plan, prepared.population
    rounds, clients = prepared.settings.rounds, max(1, population.per_round)
    length = math.sqrt(numel(prepared.setup.training.shared_params))
    for part in plan.parts:
        if isinstance(part, ClientDP) and part.sigma:
            return NoiseForecast(part.sigma * length / clients, rounds, clients)
        if isinstance(part, TreeDP) and part.sigma:
            return _of_tree(part, length, population, rounds)
        if isinstance(part, AdaptiveClientDP) and part.sigma:
            sigma = part.update_sigma(population)
            return NoiseForecast(sigma * length / clients, rounds, clients)
        if isinstance(part, DPSGD) and part.sigma:
            sizes, local = prepared.setup.federation.sizes, prepared.setup.training.local
            if not sizes.any():
                return None
            size = int(np.median(sizes[sizes > 0]))
            steps = max(1, batches.count_steps(local, size))
            count = size if local.batch_size == "all" else min(local.batch_size, size)
            sigma = part.sigma / (count if part.noise_on == "sum" else 1)
            return NoiseForecast(sigma * length / math.sqrt(clients * steps), rounds, clients)
    return None


def _of_tree(part: TreeDP, length: float, population: Population, rounds: int) -> NoiseForecast:
    """Return the forecast where a tree shares noise: in all, the draws that the last sum has."""
    trees, rest = divmod(rounds, part.period(population))
    draws = trees * part.period(population).bit_count() + rest.bit_count()
    clients = max(1, population.per_round)
    in_a_round = part.sigma * length / clients * math.sqrt(draws / rounds)
    return NoiseForecast(in_a_round, rounds, clients)


def loud_noise(prepared: Prepared, budget: Budget | None) -> str:
    """Return a warning where the noise of a run drowns what is learned."""
    forecast = noise_forecast(prepared)
    if forecast is None or forecast.in_all < LOUD:
        return ""
    expect = "clearly worse than without noise"
    if forecast.in_all >= DEAFENING:
        expect = "far worse than without noise, if it is better than chance at all"
    ways = _ways_out(prepared, forecast, budget)
    return (
        f"the noise of a round is about {forecast.in_a_round:.2g} times as long as the largest "
        "update that the bound allows, and the noise of all "
        f"{counted(forecast.rounds, 'round')} {forecast.in_all:.2g} times as long as the way that "
        f"the model can go: expect a model that is {expect}, whatever local.lr is; what helps: "
        f"{', '.join(ways[:-1])}, or {ways[-1]}"
    )


def _ways_out(prepared: Prepared, forecast: NoiseForecast, budget: Budget | None) -> list[str]:
    """Return from how many clients, or which epsilon on, the noise costs little."""
    factor = forecast.in_all / QUIET
    if any(isinstance(part, DPSGD) for part in prepared.plan.parts):
        clients = forecast.per_round * factor**2
    else:
        clients = forecast.per_round * factor
    ways = [f"about {_rounded(clients):,} clients in a round"]
    if budget is not None and budget.is_calibrated and budget.sigma >= LEAST_SIGMA * factor:
        schedule = budget.schedule
        quieter = replace(budget, sigma=budget.sigma / factor, _accounts={})
        epsilon = quieter.spent(schedule.rounds, schedule.participations())
        if epsilon < MOST_EPSILON:
            ways.append(f"privacy.epsilon of about {_rounded(epsilon):,}")
    return [*ways, "a model with fewer parameters"]


def _rounded(value: float) -> int:
    """Return a number of two digits that is no smaller."""
    step = 10.0 ** max(0, math.floor(math.log10(max(value, 1.0))) - 1)
    return int(math.ceil(value / step) * step)


def noise_without_account(prepared: Prepared) -> list[str]:
    """Return warnings about noise that looks like a promise of privacy."""
    return [
        f"{part.name}: no privacy is accounted for. No epsilon is computed for its noise "
        f"(sigma = {part.sigma:g}), so do not rely on it to protect "
        f"{'examples' if isinstance(part, DPSGD) else 'clients'}: the table [privacy] sets a budget"
        for part in prepared.plan.parts
        if isinstance(part, DPSGD | ClientDP | AdaptiveClientDP | TreeDP)
    ]
