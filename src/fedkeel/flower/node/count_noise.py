"""Noise on a site's counts that is the same whenever the same is asked, and that nobody else knows.

Source
    A. Ghosh, T. Roughgarden, M. Sundararajan, "Universally utility-maximizing privacy mechanisms",
    2009: the geometric mechanism, Laplace's for whole numbers. A count with the difference of two
    geometric variables of ratio exp(-epsilon / s) is epsilon-differentially private, where two
    data sets that differ in one example have counts that differ by s in all.

Here two data sets have as many examples, because a site tells how many it has: one example is
another one, which changes two counts of a histogram by one.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkeel.errors import RunError
from fedkeel.features.budget.ledger import Ledger, Spent
from fedkeel.features.budget.policy import Policy, StatisticsKind
from fedkeel.features.secure.primitives import KEY_BYTES, mask
from fedkeel.flower.node.log import disk_errors
from fedkeel.records.files import synchronise, write_bytes

FILE = "statistics-key"
"""File in a node's folder with the key of the noise. Another key makes other noise, which the
ledger counts anew."""

NAME = "statistics"
"""Name of statistics in the ledger, in the place of a run's."""

Ints = NDArray[np.int64]


@dataclass
class CountNoise:
    """Adds noise to counts and knows what that spends.

    Args:
        key: of the site.
        epsilon: of all counts of one kind together.

    Attributes:
        deviations: standard deviation of the noise of a count, by kind.
    """

    key: bytes
    epsilon: float
    deviations: dict[StatisticsKind, float] = field(default_factory=dict)
    _releases: list[tuple[StatisticsKind, str, float]] = field(default_factory=list)

    @classmethod
    def kept_in(cls, folder: Path, epsilon: float) -> CountNoise:
        """Return the noise of the node's key, which is made where there is none.

        Raises:
            RunError: the key cannot be read or written.
        """
        file = folder / FILE
        with disk_errors("The key of a site's noise cannot be kept"):
            if not file.exists():
                folder.mkdir(parents=True, exist_ok=True)
                new = file.with_name(f"{FILE}.{os.getpid()}")
                write_bytes(new, os.urandom(KEY_BYTES), mode=0o600)
                with suppress(FileExistsError):  # another process was quicker
                    os.link(new, file)
                new.unlink()
                synchronise(folder)
            key = file.read_bytes()
        if len(key) != KEY_BYTES:
            raise RunError(
                "The key of this site's noise is damaged.",
                got=f"{len(key)} bytes in {file}",
                expected=f"{KEY_BYTES} bytes",
                do="restore it; or remove it, and its noise is drawn, and counted, anew",
            )
        return cls(key, epsilon)

    def added(
        self, kind: StatisticsKind, name: str, counts: Ints, sensitivity: int, of: int
    ) -> Ints:
        """Return counts with noise, which the same counts get again, however many zeros follow.

        Args:
            kind: what is counted.
            name: of the column.
            counts: how many of each there are.
            sensitivity: by how much one other example changes them in all.
            of: columns among which the epsilon of a kind is divided.
        """
        epsilon = self.epsilon / of
        rate = epsilon / sensitivity
        told = np.trim_zeros(counts, "b").tolist()
        facts = repr((kind, name, epsilon, sensitivity, told)).encode()
        seed = hmac.digest(self.key, facts, "sha256")
        self.deviations[kind] = deviation(rate)
        self._releases.append((kind, hashlib.blake2b(seed, digest_size=8).hexdigest(), epsilon))
        return counts + _geometric_difference(seed, rate, len(counts))

    def beyond(self, sensitivity: int, of: int, cells: int) -> int:
        """Return a count above which noise is once among so many cells."""
        return math.ceil(math.log(cells) * sensitivity * of / self.epsilon)

    def charge(self, policy: Policy, client: int) -> None:
        """Write into the ledger what the noisy counts spend; what was sent before is paid for.

        Raises:
            PolicyError: the site would spend more than it allows.
            RunError: the ledger cannot be used.
        """
        Ledger(Path(policy.ledger)).charge_once(self._spendings(client), policy)

    def _spendings(self, client: int) -> Sequence[Spent]:
        return [
            Spent(
                run=NAME,
                method=kind,
                client=client,
                sampling="all",
                sampled=1.0,
                population=1,
                sigma=0.0,
                count=1,
                plan=digest,
                epsilon=epsilon,
            )
            for kind, digest, epsilon in self._releases
        ]


def deviation(rate: float) -> float:
    """Return the standard deviation of the difference of two geometric variables.

    >>> round(deviation(1.0), 3)
    1.357
    """
    return math.sqrt(2.0 * math.exp(-rate)) / -math.expm1(-rate)


def _geometric_difference(seed: bytes, rate: float, count: int) -> Ints:
    """Return differences of two variables of which each is at least k with probability e^(-rate k).

    They are made of the key stream of AES-256, 64 bits for each variable. Of more differences, the
    first are the same.
    """
    words = mask(seed, 2 * count).astype(np.float64)
    steps = np.floor(-np.log((words + 1.0) / 2.0**64) / rate).astype(np.int64)
    differences: Ints = steps[0::2] - steps[1::2]
    return differences
