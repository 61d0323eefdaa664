"""Counter-based random streams.

Every random choice of a run is drawn from a stream named by (seed, purpose, round, client), never
from global state. Whoever needs a choice can therefore draw it: the server process, a worker
process or a node of a federation all see the same cohort and the same batches, in any order and
after any restart.
"""

from __future__ import annotations

import zlib

import numpy as np


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


def torch_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """Return a 63-bit seed for a torch generator, from the same name space as `generator`.

    >>> torch_seed(0, "init") == torch_seed(0, "init") != torch_seed(1, "init")
    True
    """
    state = _sequence(seed, purpose, round, client).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
