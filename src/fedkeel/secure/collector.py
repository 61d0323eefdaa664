"""The server's side of a secure sum: it hands texts around, adds masked vectors, and unmasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fedkeel.secure.participant import PublicKeys, Revealed, common_key
from fedkeel.secure.primitives import SecureSumError, Words, combine, mask, public_key


class Collector:
    """Adds the vectors of several participants. It keeps no single one.

    Args:
        session: names the sum.
        threshold: participants of the sum, at least.
        size: n, numbers of a vector.
        keys: public keys of the participants.
    """

    def __init__(
        self, session: str, threshold: int, size: int, keys: Mapping[int, PublicKeys]
    ) -> None:
        self.threshold = threshold
        self._session, self._keys = session, keys
        self._texts: dict[int, Mapping[int, bytes]] = {}  # by sender and receiver
        self._total: Words = np.zeros(size, dtype=np.uint64)
        self._survivors: set[int] = set()

    @property
    def shared(self) -> list[int]:
        """Who has shared its secrets, ascending."""
        return sorted(self._texts)

    @property
    def survivors(self) -> list[int]:
        """Whose vectors are in the sum, ascending."""
        return sorted(self._survivors)

    @property
    def dropped(self) -> list[int]:
        """Who has shared its secrets and sent no vector, ascending."""
        return sorted(set(self._texts) - self._survivors)

    def take_shares(self, sender: int, texts: Mapping[int, bytes]) -> None:
        """Take the texts of one participant for all others.

        Raises:
            SecureSumError: they are for others than these.
        """
        if set(texts) != set(self._keys) - {sender}:
            raise SecureSumError("The shares of a secure sum are for other participants.")
        self._texts[sender] = texts

    def texts_for(self, receiver: int) -> dict[int, bytes]:
        """Return what the others have written to a participant, by sender."""
        return {
            sender: self._texts[sender][receiver] for sender in self.shared if sender != receiver
        }

    def add(self, sender: int, vector: Words) -> None:
        """Add a participant's masked vector [n]."""
        if sender in self._survivors or sender not in self._texts:
            raise SecureSumError("A vector of a secure sum came out of turn.")
        self._total += vector
        self._survivors.add(sender)

    def unmasked(self, revealed: Iterable[Revealed]) -> Words:
        """Return [n] the sum of the vectors.

        Args:
            revealed: what at least `threshold` survivors have revealed.

        Raises:
            SecureSumError: they are too few, or what they say makes no secret of the others.
        """
        revealed = list(revealed)[: self.threshold]  # more make nothing better
        if len(revealed) < self.threshold:
            raise SecureSumError(
                "Too few participants help to unmask a secure sum.",
                got=len(revealed),
                expected=f"at least {self.threshold}",
            )
        total = self._total.copy()
        for number in self.survivors:
            total -= mask(combine(item.seeds[number] for item in revealed), len(total))
        for number in self.dropped:
            private = combine(item.keys[number] for item in revealed)
            if public_key(private) != self._keys[number].mask:
                raise SecureSumError("Shares of a secure sum do not make the key that they are of.")
            for other in self.survivors:
                key = common_key(private, self._keys[other].mask, self._session)
                common = mask(key, len(total))
                total = total - common if other < number else total + common
        return total
