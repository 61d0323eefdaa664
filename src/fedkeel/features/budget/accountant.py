"""The account of a mechanism's releases by the library `dp-accounting`, and noise for a budget.

A release is a sum of vectors, none longer than C, with Gaussian noise of deviation sigma C. Every
epsilon comes from the library; what this file decides is which event of the library a release is.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

from fedkeel.errors import ConfigError

Kind = Literal["pld", "rdp"]

Sampling = Literal["all", "poisson", "fixed_size"]

COARSE, FINE, MANY = 1e-3, 1e-4, 2_000
"""Largest distance of the points at which the privacy loss is kept, of up to `MANY` planned
releases and of more. The library rounds towards more loss. `FINE` is its default."""

POINTS_PER_DEVIATION = 12
"""Points, at least, for each standard deviation of the loss of a release. The error of epsilon
falls with the square of this: measured against 160, epsilon is larger by less than one part in
1,000."""

MOST_POINTS = 2**20
"""Points of the loss of all releases together, about: they take some hundred MB."""

WIDTH = 20.0
"""Standard deviations over which the loss of all releases together is kept, about."""

DIGITS = 5
"""Significant digits of a calibrated noise, so that every machine finds the same one."""

SMALLEST_SIGMA, LARGEST_SIGMA = 0.0625, 2.0**24
"""The noise is calibrated between these, in units of the bound."""

STRIDE = 16
"""Releases that are added one by one before they are composed at once, which takes longer."""


@dataclass(frozen=True)
class Release:
    """One release of a noisy sum, and how those who are in it were drawn.

    Args:
        sampling: ``all``: everybody is in it; ``poisson``: each by itself with probability
            sampled / population; ``fixed_size``: a set of `sampled` out of `population`, drawn
            uniformly without replacement.
        sampled: number drawn, or expected.
        population: number of those it is drawn from.
    """

    sampling: Sampling = "all"
    sampled: float = 1
    population: int = 1

    @property
    def neighbours(self) -> str:
        """What two data sets differ by, between which epsilon is measured.

        ``replace``: one is another one, which changes a sum by 2C; ``add or remove``: one is
        missing, or sends nothing, which changes it by C.
        """
        return "replace" if self.sampling == "fixed_size" else "add or remove"

    def kind(self, requested: Literal["auto", "pld", "rdp"]) -> Kind:
        """Return the account that counts such releases.

        Raises:
            ConfigError: `pld` was asked for, and the library has it for no sets of a fixed size.
        """
        if self.sampling != "fixed_size":
            return "rdp" if requested == "rdp" else "pld"
        if requested == "pld":
            raise ConfigError(
                "privacy.accountant = 'pld' cannot count these releases.",
                got=f"{self.sampled:g} of {self.population}, drawn without replacement",
                why="dp-accounting counts draws of a fixed size only by Renyi divergences",
                do="set privacy.accountant = 'auto', or draw by Poisson sampling "
                "(cohort.sampling = 'poisson')",
            )
        return "rdp"


@dataclass(frozen=True)
class Account:
    """Counts what releases of one kind spend.

    Args:
        release: the kind of release.
        sigma: deviation of the noise in units of the bound C.
        kind: the library's account.
        planned: number of releases that are planned; with the noise it decides how finely the
            loss is kept.
    """

    release: Release
    sigma: float
    kind: Kind
    planned: int = 1
    _last: list[tuple[int, Any]] = field(default_factory=list, compare=False, repr=False)

    def epsilon(self, count: int, delta: float) -> float:
        """Return the epsilon at `delta` of so many releases; infinity where there is no noise."""
        if count == 0:
            return 0.0
        if self.sigma == 0.0:
            return math.inf
        with _quiet():
            if self.kind == "pld":
                return float(self._composed(count).get_epsilon_for_delta(delta))
            return float(_rdp().compute_epsilon(*self._divergences(count), delta)[0])

    def largest_count(self, epsilon: float, delta: float, most: int) -> int:
        """Return how many releases, at most `most`, spend no more than `epsilon`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.epsilon(middle, delta) <= epsilon:
                low = middle
            else:
                high = middle - 1
        return low

    def _composed(self, count: int) -> Any:  # noqa: ANN401 - the library has no types
        """Return the loss of so many releases, by the same sums whichever was asked for before."""
        multiple = (count - 1) // STRIDE * STRIDE
        at, loss = self._last[-1] if self._last else (0, self._loss)
        if not multiple < at <= count:
            at = multiple + 1
            loss = self._loss.self_compose(multiple).compose(self._loss) if multiple else self._loss
        for _ in range(at, count):
            loss = loss.compose(self._loss)
        self._last[:] = [(count, loss)]
        return loss

    @property
    def _event(self) -> Any:  # noqa: ANN401 - the library has no types
        """Return the library's event of one release.

        Its account of draws of a fixed size takes the deviation in units of 2C, the most that one
        replaced vector changes the sum by.
        """
        dp, release = library(), self.release
        if release.sampling == "fixed_size":
            noise = dp.GaussianDpEvent(self.sigma / 2)
            size, drawn = release.population, int(release.sampled)
            return dp.SampledWithoutReplacementDpEvent(size, drawn, noise)
        noise = dp.GaussianDpEvent(self.sigma)
        if release.sampling == "all":
            return noise
        return dp.PoissonSampledDpEvent(release.sampled / release.population, noise)

    def _divergences(self, count: int) -> tuple[Any, Any]:
        """Return the orders and the Renyi divergence of so many releases at each."""
        orders, single = self._single
        return orders, count * single

    @cached_property
    def _single(self) -> tuple[Any, Any]:
        """The orders and the Renyi divergence of one release at each: they add up."""
        accountant = self._make().compose(self._event)
        return accountant._orders, accountant._rdp

    @property
    def _grid(self) -> float:
        return _grid([(self.release, self.sigma, self.planned)])

    def _make(self) -> Any:  # noqa: ANN401 - the library has no types
        dp = library()
        relation = dp.NeighboringRelation
        if self.kind == "pld":
            return _accountant(self._grid)
        is_replaced = self.release.sampling == "fixed_size"
        return _rdp().RdpAccountant(
            neighboring_relation=relation.REPLACE_ONE if is_replaced else relation.ADD_OR_REMOVE_ONE
        )

    @cached_property
    def _loss(self) -> Any:  # noqa: ANN401 - the library has no types
        """The distribution of the privacy loss of one release."""
        release = self.release
        rate = 1.0 if release.sampling == "all" else release.sampled / release.population
        return _loss_distributions().from_gaussian_mechanism(
            self.sigma, sampling_prob=rate, value_discretization_interval=self._grid
        )


def composed_epsilon(spent: Iterable[tuple[Release, float, int]], delta: float) -> float:
    """Return the epsilon at `delta` of releases of several kinds, with different noise, together.

    Neighbouring data sets differ by one that contributes nothing. That covers draws of a fixed
    size too, whose account lets it be any other one; with them everything is counted by Renyi
    divergences.

    Args:
        spent: each kind of release, its noise in units of the bound, and the number of releases.
        delta: of the epsilon.
    """
    counts: Counter[tuple[Release, float]] = Counter()
    for release, sigma, count in spent:
        counts[release, sigma] += count
    if not counts:
        return 0.0
    if min(sigma for _, sigma in counts) == 0.0:
        return math.inf
    is_rdp = any(release.sampling == "fixed_size" for release, _ in counts)
    total = None
    accountant = _accountant(_grid([(*kind, count) for kind, count in counts.items()]))
    with _quiet():
        for (release, sigma), count in counts.items():
            account = Account(release, sigma, "rdp" if is_rdp else "pld")
            if is_rdp:
                orders, divergences = account._divergences(count)
                total = divergences if total is None else total + divergences
            else:
                accountant.compose(account._event, count)
        if is_rdp:
            return float(_rdp().compute_epsilon(orders, total, delta)[0])
        return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=256)
def calibrated_sigma(
    release: Release, kind: Kind, count: int, epsilon: float, delta: float
) -> float:
    """Return the smallest noise, in units of C, with which `count` releases spend `epsilon`.

    Args:
        release: the kind of release.
        kind: the library's account.
        count: number of releases, >= 1.
        epsilon: the budget.
        delta: its delta.

    Raises:
        ConfigError: no noise is large enough.
    """
    dp = library()

    def event(sigma: float) -> Any:  # noqa: ANN401 - the library has no types
        return dp.SelfComposedDpEvent(Account(release, sigma, kind)._event, count)

    def spent(sigma: float) -> float:
        with _quiet():
            accountant = Account(release, sigma, kind, count)._make()
            return float(accountant.compose(event(sigma)).get_epsilon(delta))

    def calibrated(low: float, high: float, at: float) -> float:
        """Return the noise between two others, on the grid of a third one."""
        make = Account(release, at, kind, count)._make
        bracket, tol = dp.ExplicitBracketInterval(low, high), 1e-3 * high
        with _quiet():
            return float(dp.calibrate_dp_mechanism(make, event, epsilon, delta, bracket, tol=tol))

    high = 1.0
    while spent(high) > epsilon:
        high *= 2.0
        if high > LARGEST_SIGMA:
            raise ConfigError(
                "No noise keeps the privacy budget.",
                got=f"epsilon {epsilon:g} at delta {delta:g}, {count} releases",
                do="raise privacy.epsilon, or plan fewer rounds",
            )
    while high > SMALLEST_SIGMA and spent(high / 2) <= epsilon:
        high /= 2.0
    if high <= SMALLEST_SIGMA:
        return high
    sigma = calibrated(high / 2, high, high)
    return _rounded_up(release, kind, count, epsilon, delta, sigma)


def _grid(kinds: Sequence[tuple[Release, float, int]]) -> float:
    """Return the distance of the points at which the loss of releases is kept together.

    It is a power of 2 times the usual one, so that noise which differs by little has the same.

    Args:
        kinds: each kind of release, its noise in units of the bound, and the number of releases.
    """
    count = sum(number for _, _, number in kinds)
    variance = sum(number * _deviation(release, sigma) ** 2 for release, sigma, number in kinds)
    usual = COARSE if count <= MANY else FINE
    finest = WIDTH * math.sqrt(variance) / MOST_POINTS
    wanted = min(max(math.sqrt(variance / count) / POINTS_PER_DEVIATION, finest), usual)
    if finest > usual:
        return float(usual * 2.0 ** math.ceil(math.log2(finest / usual)))
    return float(usual * 2.0 ** math.floor(math.log2(wanted / usual)))


def _deviation(release: Release, sigma: float) -> float:
    """Return about how much the privacy loss of a release varies, as its standard deviation.

    That is 1 / sigma where everybody is in it, and for small sampling rates q the root of the
    chi-squared divergence, q sqrt(exp(1 / sigma^2) - 1).
    """
    rate = 1.0 if release.sampling == "all" else release.sampled / release.population
    return min(rate * math.sqrt(math.expm1(min(sigma**-2, 500.0))), 1.0 / sigma)


def _accountant(grid: float) -> Any:  # noqa: ANN401 - the library has no types
    return _pld().PLDAccountant(value_discretization_interval=grid)


def _rounded_up(
    release: Release, kind: Kind, count: int, epsilon: float, delta: float, sigma: float
) -> float:
    """Return sigma with few digits, no smaller than what keeps the budget."""
    step = 10.0 ** (math.floor(math.log10(sigma)) + 1 - DIGITS)
    steps = math.ceil(sigma / step)
    while Account(release, round(steps * step, 12), kind, count).epsilon(count, delta) > epsilon:
        steps += 1
    return round(steps * step, 12)


def library() -> Any:  # noqa: ANN401 - the library has no types
    """Return the library `dp_accounting`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import dp_accounting
    except ImportError:
        raise ConfigError(
            "An account of privacy needs the package dp-accounting.",
            do="pip install 'fedkeel[privacy]'",
        ) from None
    return dp_accounting


def _pld() -> Any:  # noqa: ANN401 - the library has no types
    from dp_accounting import pld

    return pld


def _rdp() -> Any:  # noqa: ANN401 - the library has no types
    from dp_accounting import rdp

    return rdp


def _loss_distributions() -> Any:  # noqa: ANN401 - the library has no types
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library from logging which Renyi orders it leaves out, which is for each release."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
