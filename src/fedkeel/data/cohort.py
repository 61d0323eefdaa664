"""Who takes part in a round.

The cohort is a pure function of (settings, sizes, seed, round): every method, engine and process
sees the same clients, also after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedkeel.base.rng import generator
from fedkeel.config import Cohort
from fedkeel.data.dataset import Ints
from fedkeel.data.partition.common import Floats
from fedkeel.errors import ConfigError, DataError, did_you_mean


@dataclass(frozen=True)
class Selection:
    """The clients of one round. K clients are selected in all.

    Args:
        clients: those that report, ascending; may be empty.
        dropped: those that were selected and do not report, ascending.
        candidates: those that were asked for their loss before, ascending; None where nobody was.
    """

    clients: Ints
    dropped: Ints
    candidates: Ints | None = None


class Select(Protocol):
    """Selects the clients of a round."""

    def __call__(self, round: int, among: Ints | None = None) -> Selection:
        """Return the clients of a round, `among` those that can be reached; None for all."""


def select(
    settings: Cohort,
    sizes: Ints,
    seed: int,
    round: int,
    *,
    among: Ints | None = None,
    count: int | None = None,
    draw: int = 0,
) -> Selection:
    """Select the clients of a round.

    K = settings.size(C) clients are drawn without replacement from the stream (seed, "cohort",
    round): uniformly, or one after the other with probability in proportion to the examples of
    those that are left; a fixed cohort is that of round 0. With ``poisson`` each client is drawn by
    itself with probability K / C from the same stream. Each of them drops with probability
    `settings.dropout`, independently, by the stream (seed, "dropout", round). Everybody may drop.

    Args:
        settings: participation, sampling and dropout.
        sizes: [C] number of examples of each client.
        seed: seed of the run.
        round: round number, from 0.
        among: those of the `selectable` clients that can be reached now, ascending; None for all.
            Where they are fewer than K, all of them are selected.
        count: how many are selected in place of K.
        draw: number of the draw within the round, which has a stream of its own.

    Raises:
        ConfigError: the settings select nobody, or more clients than there are.
        DataError: sampling by examples needs more clients with examples than there are.

    >>> select(Cohort(clients=2), np.array([5, 5, 5, 5]), seed=0, round=3).clients
    array([1, 2])
    """
    count = settings.size(len(sizes)) if count is None else count
    present = np.delete(np.arange(len(sizes)), new_clients(settings, len(sizes), seed))
    chance = count / len(present)
    if settings.sampling == "in_turn":
        chosen = _in_turn(present, settings.size(len(sizes)), seed, round)
        chosen = chosen if among is None else np.intersect1d(chosen, among)
        return with_dropouts(settings, chosen, seed, round, draw)
    if among is not None:
        present, count = among, min(count, len(among))
    sizes, population = sizes[present], len(present)
    is_first = settings.sampling == "fixed" and among is None
    random = generator(seed, "cohort", 0 if is_first else round, draw)
    if settings.sampling == "poisson":
        chosen = np.flatnonzero(random.random(population) < chance)
    elif count == population:
        chosen = np.arange(population, dtype=np.int64)
    elif settings.sampling == "examples":
        chosen = random.choice(population, count, replace=False, p=_shares(sizes, count))
    else:
        chosen = random.choice(population, count, replace=False, shuffle=False)
    chosen = present[np.sort(chosen)].astype(np.int64, copy=False)
    return with_dropouts(settings, chosen, seed, round, draw)


def with_dropouts(
    settings: Cohort,
    chosen: Ints,
    seed: int,
    round: int,
    draw: int = 0,
    candidates: Ints | None = None,
) -> Selection:
    """Return clients, ascending, apart from those that drop out; see `select`."""
    drops = np.zeros(len(chosen), dtype=np.bool_)
    if settings.dropout > 0:
        drops = generator(seed, "dropout", round, draw).random(len(chosen)) < settings.dropout
    return Selection(chosen[~drops], chosen[drops], candidates)


def select_by_seed(settings: Cohort, sizes: Ints, seed: int) -> Select:
    """Return what selects the clients of rounds: by settings, sizes and seed only."""

    def by_seed(round: int, among: Ints | None = None) -> Selection:
        return select(settings, sizes, seed, round, among=among)

    return by_seed


def selectable(settings: Cohort, sizes: Ints, seed: int) -> Ints:
    """Return the clients that some round may select, ascending.

    >>> selectable(Cohort(clients=2, sampling="fixed"), np.array([5, 5, 5, 5]), seed=0)
    array([2, 3])
    """
    if settings.sampling == "fixed":
        first = select(settings, sizes, seed, 0)
        return np.union1d(first.clients, first.dropped)
    present = np.delete(np.arange(len(sizes)), new_clients(settings, len(sizes), seed))
    return present[sizes[present] > 0] if settings.sampling == "examples" else present


def new_clients(settings: Cohort, population: int, seed: int) -> Ints:
    """Return the clients that no round selects, ascending.

    They are those that are given by number; or are drawn without replacement from the stream (seed,
    "new clients").

    >>> new_clients(Cohort(new_clients=2), population=9, seed=0)
    array([4, 5])
    """
    if not isinstance(settings.new_clients, int):
        return np.unique(np.array(settings.new_clients, dtype=np.int64))
    if not settings.new_clients:
        return np.zeros(0, dtype=np.int64)
    random = generator(seed, "new clients")
    drawn = random.choice(population, settings.new_clients, replace=False, shuffle=False)
    return np.sort(drawn).astype(np.int64, copy=False)


def numbered(settings: Cohort, names: Sequence[str], population: int) -> Cohort:
    """Return settings that name new clients by their numbers.

    Args:
        settings: participation; its new clients may be given by name.
        names: [C] names of the clients, empty where they are just numbers.
        population: C.

    Raises:
        ConfigError: there is no such client, or one is named twice.
    """
    requested = settings.new_clients
    if isinstance(requested, int):
        return settings
    place = {name: k for k, name in enumerate(names or map(str, range(population)))}
    for name in requested:
        if (isinstance(name, int) and not 0 <= name < population) or (
            isinstance(name, str) and name not in place
        ):
            raise ConfigError(
                f"cohort.new_clients names a client {name!r} that does not exist.",
                do=did_you_mean(str(name), list(place)),
            )
    numbers = [name if isinstance(name, int) else place[name] for name in requested]
    if len(set(numbers)) < len(numbers):
        raise ConfigError("cohort.new_clients names a client twice.", got=list(requested))
    return settings.model_copy(update={"new_clients": tuple(numbers)})


def largest_cohort(settings: Cohort, sizes: Ints, seed: int, rounds: int) -> int:
    """Return the largest number of clients that train in a round of a run.

    >>> largest_cohort(Cohort(clients=2, sampling="poisson"), np.full(9, 5), seed=0, rounds=20)
    5
    """
    if settings.sampling != "poisson":
        return settings.size(len(sizes))
    return max(len(select(settings, sizes, seed, round).clients) for round in range(rounds))


def _in_turn(present: Ints, count: int, seed: int, round: int) -> Ints:
    """Return a round's piece, ascending, of the order in which all clients of a pass come."""
    number, place = divmod(round, -(-len(present) // count))
    order = generator(seed, "cohort", number).permutation(present)
    return np.sort(order[place * count : (place + 1) * count]).astype(np.int64, copy=False)


def _shares(sizes: Ints, count: int) -> Floats:
    holding = int(np.count_nonzero(sizes > 0))
    if holding < count:
        raise DataError(
            "cohort.sampling = 'examples' finds too few clients with examples.",
            got=f"{holding} of {len(sizes)} clients",
            expected=f"at least {count}, the number selected in a round",
        )
    share: Floats = sizes / sizes.sum()
    return share
