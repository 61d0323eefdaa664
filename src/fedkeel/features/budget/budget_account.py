"""The budget of a run: its noise, and what has been spent after each round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fedkeel.config import Cohort, Local
from fedkeel.data import batches
from fedkeel.data.cohort import select
from fedkeel.data.dataset import Ints
from fedkeel.errors import ConfigError, counted
from fedkeel.features.budget.accountant import Account, Kind, Release
from fedkeel.features.budget.kept_noise import kept_sigma
from fedkeel.features.budget.settings import Privacy
from fedkeel.method.parts.dpftrl import pass_length
from fedkeel.method.parts.dpftrl import releases as tree_releases


@dataclass(frozen=True)
class ReleaseSchedule:
    """Which releases a run makes, if it makes all its rounds.

    Args:
        privacy: the settings.
        cohort: who takes part.
        local: local training.
        sizes: [C] examples of each client.
        seed: seed of the run.
        rounds: T.
        is_stateful: whether clients keep anything from round to round.
        tree: rounds of a pass over the clients that share noise by a tree; 0 for noise of its own
            in each round.
    """

    privacy: Privacy
    cohort: Cohort
    local: Local
    sizes: Ints
    seed: int
    rounds: int
    is_stateful: bool
    tree: int = 0

    def cohort_of(self, round: int) -> Ints:
        """Return the clients that are selected in a round, also those that drop out."""
        selection = select(self.cohort, self.sizes, self.seed, round)
        return np.union1d(selection.clients, selection.dropped)

    def participations(self) -> Ints:
        """Return [C] in how many of the rounds each client is selected."""
        return self._participations.copy()

    @cached_property
    def _participations(self) -> Ints:
        return self.selections(0, self.rounds)

    def selections(self, first: int, end: int) -> Ints:
        """Return [C] in how many rounds, from `first` to before `end`, each client is selected."""
        counts = np.zeros(len(self.sizes), dtype=np.int64)
        if self.cohort.sampling == "fixed":
            counts[self.cohort_of(0)] = end - first
            return counts
        for round in range(first, end):
            counts[self.cohort_of(round)] += 1
        return counts

    @property
    def of_clients(self) -> Release:
        """What a round releases of the clients.

        Draws of a fixed size are counted as such only where what a client sends depends on nothing
        but the received model and its data: the account of such draws is not known to hold where it
        also depends on which rounds the client was in before.
        """
        if self.tree:
            return Release()  # a client is in the sums of some nodes, whoever else is
        population = len(self.sizes) - self.cohort.new_count
        size = self.cohort.size(len(self.sizes))
        sampling = self.cohort.sampling
        if sampling == "examples" or self.cohort.by_losses:
            raise ConfigError(
                f"cohort.sampling = {sampling!r} has no account of privacy.",
                why="how often a client is drawn depends on the data of all others",
                do="set cohort.sampling = 'poisson' or 'uniform'",
            )
        if size == population or sampling in ("fixed", "in_turn"):
            return Release()
        if sampling == "poisson":
            return Release("poisson", size, population)
        return Release() if self.is_stateful else Release("fixed_size", size, population)

    def releases_of_clients(self, rounds: int) -> int:
        """Return in how many releases of the first rounds a client may be."""
        return tree_releases(rounds, self.tree) if self.tree else -(-rounds // self.rounds_of_pass)

    @property
    def rounds_of_pass(self) -> int:
        """The rounds among which a client comes once: of cohorts in turn, else each by itself."""
        if self.cohort.sampling != "in_turn":
            return 1
        clients = len(self.sizes)
        return pass_length(clients - self.cohort.new_count, self.cohort.size(clients))

    def of_examples(self, n: int) -> Release:
        """Return what a counted release of a client of `n` examples is, see `releases`."""
        size = max(batches.batch_sizes(self.local, n))
        if self._draws_batches and self.local.sampling == "random":
            return Release("fixed_size", size, n)
        if self._draws_batches and size < n:
            return Release("poisson", size, n)
        return Release()

    @property
    def _draws_batches(self) -> bool:
        """Whether each batch is drawn anew, and not as a part of a pass."""
        local = self.local
        is_all = local.examples_per_step == "all"
        return local.steps is not None and local.sampling != "continue" and not is_all

    def releases(self, n: int, participations: int) -> int:
        """Return how many releases a client of `n` examples makes.

        Where a pass takes each example once, in shuffled batches, the steps of a pass are one
        release: an example is in one of them. No amplification by shuffling is counted.
        """
        steps = participations * batches.count_steps(self.local, n)
        if self._draws_batches:
            return steps
        return -(-steps // batches.batches_per_pass(self.local, n))

    def releases_of_round(self, n: int, done: int) -> int:
        """Return how many releases a client of `n` examples makes in one round by itself.

        A pass that goes on in the next round counts in both.

        Args:
            n: its number of examples.
            done: local steps that it has made before.
        """
        steps = batches.count_steps(self.local, n)
        if self._draws_batches:
            return steps
        length = batches.batches_per_pass(self.local, n)
        return (done + steps - 1) // length - done // length + 1


@dataclass
class Spending:
    """What has been spent so far.

    Args:
        budget: the budget.
        rounds: rounds made.
        trained: [C] in how many of them each client was selected.
    """

    budget: Budget
    rounds: int = 0
    trained: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if not len(self.trained):
            self.trained = np.zeros(len(self.budget.schedule.sizes), dtype=np.int64)

    def add(self, clients: Iterable[int]) -> float:
        """Count a round, and return the epsilon spent with it.

        Args:
            clients: all that were selected, whether or not they replied.
        """
        self.rounds += 1
        self.trained[np.array(list(clients), dtype=np.int64)] += 1
        return self.epsilon

    @property
    def epsilon(self) -> float:
        """The epsilon spent so far."""
        return self.budget.spent(self.rounds, self.trained)

    def overrun(self) -> float | None:
        """Return what the next round would bring epsilon to, None where that is in the budget."""
        trained = self.trained.copy()
        trained[self.budget.schedule.cohort_of(self.rounds)] += 1
        epsilon = self.budget.spent(self.rounds + 1, trained)
        return epsilon if epsilon > self.budget.epsilon else None


@dataclass(frozen=True)
class Budget:
    """The budget of a run, and the account that is kept of it.

    Args:
        schedule: the releases that are planned.
        sigma: the noise, in units of the bound.
        is_calibrated: whether the noise was calibrated for all planned rounds; otherwise the
            method names it.
    """

    schedule: ReleaseSchedule
    sigma: float
    is_calibrated: bool
    _accounts: dict[Release, Account] = field(default_factory=dict, compare=False, repr=False)

    @property
    def privacy(self) -> Privacy:
        """The settings."""
        return self.schedule.privacy

    @property
    def epsilon(self) -> float:
        """The largest epsilon."""
        return self.privacy.epsilon

    @property
    def kind(self) -> Kind:
        """The library's account that counts most of it."""
        schedule = self.schedule
        if self.privacy.unit == "client":
            return schedule.of_clients.kind(self.privacy.accountant)
        worst = worst_releases(schedule, schedule.participations())
        return worst[0][0].kind(self.privacy.accountant)

    def account(self, release: Release) -> Account:
        """Return the account of releases of a kind."""
        kind, rounds = release.kind(self.privacy.accountant), self.schedule.rounds
        local = self.schedule.local
        each = local.steps if local.sampling == "poisson" else local.epochs
        account = Account(release, self.sigma, kind, rounds * (each or 1))
        return self._accounts.setdefault(release, account)

    def spent(self, rounds: int, trained: Ints) -> float:
        """Return the epsilon of a run so far; of unit `example` the largest over the clients.

        Args:
            rounds: rounds made.
            trained: [C] in how many of them each client was selected.
        """
        if self.privacy.unit == "client":
            count = self.schedule.releases_of_clients(rounds)
            return self.account(self.schedule.of_clients).epsilon(count, self.privacy.delta)
        worst = worst_releases(self.schedule, trained)
        return max(
            (self.account(release).epsilon(n, self.privacy.delta) for release, n in worst),
            default=0.0,
        )

    def planned_rounds(self) -> int:
        """Return how many of the planned rounds the budget allows."""
        schedule = self.schedule
        if schedule.privacy.unit == "client":
            account = self.account(schedule.of_clients)
            planned = schedule.releases_of_clients(schedule.rounds)
            most = account.largest_count(self.epsilon, self.privacy.delta, planned)
            allowed = (n for n in range(schedule.rounds + 1))
            return max(n for n in allowed if schedule.releases_of_clients(n) <= most)
        if self.spent(schedule.rounds, schedule.participations()) <= self.epsilon:
            return schedule.rounds
        low, high = 0, schedule.rounds - 1
        trained = np.zeros(len(schedule.sizes), dtype=np.int64)  # in `low` rounds
        while low < high:
            middle = (low + high + 1) // 2
            more = trained + schedule.selections(low, middle)
            if self.spent(middle, more) <= self.epsilon:
                low, trained = middle, more
            else:
                high = middle - 1
        return low


def make_budget(schedule: ReleaseSchedule, sigma: float | None) -> Budget:
    """Return the budget of a run, with the noise that keeps it.

    Args:
        schedule: the releases that are planned.
        sigma: the noise that the method names, in units of the bound; None calibrates it.

    Raises:
        ConfigError: the budget does not allow a single round.
    """
    privacy = schedule.privacy
    if sigma is None:
        pairs = _planned(schedule)
        limit = privacy.epsilon, privacy.delta
        sigmas = [
            kept_sigma(release, release.kind(privacy.accountant), count, *limit)
            for release, count in pairs
        ]
        return Budget(schedule, max(sigmas), is_calibrated=True)
    budget = Budget(schedule, sigma, is_calibrated=False)
    if budget.planned_rounds() == 0:
        trained = np.zeros(len(schedule.sizes), dtype=np.int64)
        trained[schedule.cohort_of(0)] += 1
        raise ConfigError(
            "The privacy budget does not allow a single round.",
            got=f"epsilon {budget.spent(1, trained):.4g} for one round with sigma = {sigma:g}",
            expected=f"at most {privacy.epsilon:g}",
            do="leave out sigma, which is then calibrated, or raise privacy.epsilon",
        )
    return budget


def _planned(schedule: ReleaseSchedule) -> Sequence[tuple[Release, int]]:
    """Return the releases of all planned rounds, with their number, of those that spend most."""
    if schedule.privacy.unit == "client":
        return [(schedule.of_clients, schedule.releases_of_clients(schedule.rounds))]
    worst = worst_releases(schedule, schedule.participations())
    if not worst:
        raise ConfigError("No client is selected in any round, so there is nothing to protect.")
    return worst


def worst_releases(schedule: ReleaseSchedule, trained: Ints) -> list[tuple[Release, int]]:
    """Return releases and their number for the clients that may have spent most.

    Of two kinds of releases that are drawn alike, the one with fewer releases from a smaller share
    of the examples spends less.

    Args:
        schedule: the releases that are planned.
        trained: [C] in how many rounds each client was selected.
    """
    kinds = np.unique(np.stack([schedule.sizes, trained], axis=1), axis=0)
    pairs = {
        (schedule.of_examples(int(n)), schedule.releases(int(n), int(times)))
        for n, times in kinds
        if n and times
    }

    def rate(release: Release) -> float:
        return release.sampled / release.population

    ordered = sorted(pairs, key=lambda pair: (-pair[1], -rate(pair[0])))
    worst: list[tuple[Release, int]] = []
    for release, count in ordered:
        alike = [other for other, _ in worst if other.sampling == release.sampling]
        if all(rate(release) > rate(other) for other in alike):
            worst.append((release, count))
    return worst


def described(budget: Budget) -> str:
    """Return what is counted and assumed, in a sentence."""
    schedule, privacy = budget.schedule, budget.privacy
    if privacy.unit == "client":
        release = schedule.of_clients
        neighbours = _neighbours(release)
        if release.sampling == "all":  # without one of them, the others might be drawn otherwise
            neighbours = "neighbouring data sets differ by a client that sends nothing"
        if schedule.tree:
            return (
                f"a release for each node of a tree over {counted(schedule.tree, 'round')} that a "
                f"client is in; every client once in each tree; {neighbours}"
            )
        length = schedule.rounds_of_pass
        what = "round" if length == 1 else f"pass of {length} rounds, in which a client comes once"
        return f"a release for each {what}; {_drawn(release, 'client')}; {neighbours}"
    worst = worst_releases(schedule, schedule.participations())[0][0]
    what = "local step" if worst.sampling != "all" else "pass over a client's examples"
    return f"a release for each {what}; {_drawn(worst, 'example')}; {_neighbours(worst)}"


def _drawn(release: Release, unit: str) -> str:
    if release.sampling == "all":
        return f"no gain by sampling is counted, as if every {unit} were in each"
    of = f"{release.sampled:g} of {counted(release.population, unit)}"
    how = "each by itself" if release.sampling == "poisson" else "without replacement"
    return f"drawn {how}, {of}"


def _neighbours(release: Release) -> str:
    return f"neighbouring data sets {release.neighbours} one"


def weak_points(budget: Budget) -> list[str]:
    """Return what a user should know about a budget before the run."""
    schedule, privacy = budget.schedule, budget.privacy
    units = len(schedule.sizes)
    if privacy.unit == "example":
        units = int(min((n for n in schedule.sizes if n), default=1))
    warnings = []
    if privacy.delta * units >= 1:
        whose = "clients" if privacy.unit == "client" else "examples of the smallest client"
        warnings.append(
            f"privacy.delta = {privacy.delta:g} is no less than 1 over the {units} {whose}: such a "
            "delta allows a mechanism that reveals one of them in full; set less than "
            f"{1 / units:.2g}"
        )
    planned = budget.planned_rounds()
    if planned < schedule.rounds:
        warnings.append(
            f"the privacy budget ends the run after round {planned} of {schedule.rounds}: "
            f"sigma = {budget.sigma:g} is what the method names; leave it out to have the noise "
            "calibrated for all rounds"
        )
    return warnings
