"""Counter-based random streams.

Every random choice of a run is drawn from a stream named by (seed, purpose, round, client), never
from global state. Whoever needs a choice can therefore draw it: the server process, a worker
process or a node of a federation all see the same cohort and the same batches, in any order and
after any restart.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.base.lazy import torch

Words = NDArray[np.uint32]


def _sequence(seed: int, purpose: str, round: int, client: int) -> np.random.SeedSequence:
    words = seed, zlib.crc32(purpose.encode()), round, client
    if min(words) >= 0 and max(words) < 1 << 32:  # the same stream, made in half the time
        return np.random.SeedSequence(np.array(words, dtype=np.uint32))
    return np.random.SeedSequence(words)


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return the stream of random numbers for one purpose.

    Args:
        seed: seed of the run, >= 0.
        purpose: what the numbers are for, e.g. ``"cohort"``; other purposes are independent.
        round: round number, >= 0, or any counter that belongs to the purpose.
        client: stable client index, >= 0.

    >>> a, b = generator(0, "batches", 3, 7), generator(0, "batches", 3, 7)
    >>> bool(a.random() == b.random())
    True
    >>> bool(generator(0, "batches", 3, 8).random() == generator(0, "cohort", 3, 8).random())
    False
    """
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, round, client)))


def generators(
    seed: int, purpose: str, round: int, clients: Sequence[int]
) -> list[np.random.Generator]:
    """Return what `generator` returns for each of these clients, in a fraction of the time.

    Args:
        seed: as in `generator`.
        purpose: as in `generator`.
        round: as in `generator`.
        clients: stable client indices, >= 0.

    >>> first, _ = generators(0, "batches", 3, [7, 8])
    >>> bool(first.random() == generator(0, "batches", 3, 7).random())
    True
    """
    states = _together(seed, purpose, round, clients)
    if states is None:
        return [generator(seed, purpose, round, client) for client in clients]
    seeds: list[Any] = [_KnownSeed(state) for state in states]  # the stubs ask for another type
    return [np.random.Generator(np.random.PCG64(seed)) for seed in seeds]


class _KnownSeed(np.random.bit_generator.ISeedSequence):
    """The words that a bit generator starts from, computed before."""

    def __init__(self, state: NDArray[np.uint64]) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> NDArray[np.uint64]:
        return self._state


def _hashes(start: int, factor: int, count: int) -> list[tuple[np.uint32, np.uint32]]:
    """Return what one word after the other is combined with, and then multiplied by."""
    pairs, word = [], start
    for _ in range(count):
        after = word * factor % (1 << 32)
        pairs.append((np.uint32(word), np.uint32(after)))
        word = after
    return pairs


_TAKE_IN = _hashes(0x43B0D7E5, 0x931E8875, 16)
_GIVE_OUT = _hashes(0x8B51F9DD, 0x58F38DED, 8)
_LEFT, _RIGHT, _HALF = np.uint32(0xCA01F9DD), np.uint32(0x4973F715), np.uint32(16)


FEW = 16
"""Streams of which fewer are made one by one, which takes less time."""


def _together(
    seed: int, purpose: str, round: int, clients: Sequence[int]
) -> NDArray[np.uint64] | None:
    """Return the words of streams, None where they are few, or are not named by 32 bits each."""
    words = seed, zlib.crc32(purpose.encode()), round
    if len(clients) < FEW or min(*words, *clients) < 0 or max(*words, *clients) >= 1 << 32:
        return None
    return _states(words, np.array(clients, dtype=np.uint32))


def _states(common: Sequence[int], last: Words) -> NDArray[np.uint64]:
    """Return [n, 4] words that `numpy.random.SeedSequence` makes of three common words and a last.

    Source: M. O'Neill, "Developing a seed_seq Alternative", whose constants NumPy has; that it
        makes the same is compared by `tests/test_rng.py`.
    """

    def mixed(word: Words, with_: tuple[np.uint32, np.uint32]) -> Words:
        word = (word ^ with_[0]) * with_[1]
        return word ^ (word >> _HALF)

    hashes = iter(_TAKE_IN)
    words = [*(np.full_like(last, word) for word in common), last]
    pool = [mixed(word, next(hashes)) for word in words]
    for source in range(4):
        for to in range(4):
            if to != source:
                word = _LEFT * pool[to] - _RIGHT * mixed(pool[source], next(hashes))
                pool[to] = word ^ (word >> _HALF)
    given = [mixed(pool[i % 4], with_) for i, with_ in enumerate(_GIVE_OUT)]
    # two make one of 64 bits, the lower one first, whatever this machine's order of bytes
    return np.stack(given, axis=1).astype("<u4").view("<u8").astype(np.uint64)


def torch_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """Return a 63-bit seed for a torch generator, from the same name space as `generator`.

    >>> torch_seed(0, "init") == torch_seed(0, "init") != torch_seed(1, "init")
    True
    """
    state = _sequence(seed, purpose, round, client).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def torch_seeds(seed: int, purpose: str, round: int, clients: Sequence[int]) -> list[int]:
    """Return what `torch_seed` returns for each of these clients, in a fraction of the time."""
    states = _together(seed, purpose, round, clients)
    if states is None:
        return [torch_seed(seed, purpose, round, client) for client in clients]
    return [int(word) for word in states[:, 0] >> np.uint64(1)]


def seed_torch(seed: int) -> None:
    """Seed the generators that a module draws from, for dropout or noise.

    `torch.manual_seed` also records a stack trace for each kind of accelerator that is not in use,
    which takes longer than a step of a small network.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def continue_torch(source: torch.Generator) -> None:
    """Let torch's own generator go on from the state of `source`."""
    if source.device.type == "cuda":
        torch.cuda.set_rng_state(source.get_state(), source.device)
    else:
        torch.default_generator.set_state(source.get_state())
