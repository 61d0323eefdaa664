"""The server's side of a secure sum: it hands texts around, adds masked vectors, and unmasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from fedkeel.features.secure.participant import (
    Commitments,
    PublicKeys,
    Revealed,
    common_key,
    seed_digest,
    share_digest,
)
from fedkeel.features.secure.primitives import (
    DIGEST_BYTES,
    SecureSumError,
    Words,
    WrongSecretError,
    combine,
    mask,
    public_key,
)


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
        self._session, self.keys = session, keys
        self._texts: dict[int, Mapping[int, bytes]] = {}  # by sender and receiver
        self.commitments: dict[int, Commitments] = {}  # of those that have shared
        self.total: Words = np.zeros(size, dtype=np.uint64)
        self._survivors: set[int] = set()
        self.revealed: dict[int, Revealed] = {}  # by who has revealed it

    @classmethod
    def restored(
        cls,
        session: str,
        threshold: int,
        keys: Mapping[int, PublicKeys],
        commitments: Mapping[int, Commitments],
        survivors: Collection[int],
        total: Words,
    ) -> Collector:
        """Return a collector that has all vectors, as another one had them.

        Args:
            session: names the sum.
            threshold: participants of the sum, at least.
            keys: public keys of the participants.
            commitments: what those that have shared are bound to.
            survivors: whose vectors are in the sum.
            total: [n] the sum of their masked vectors.
        """
        made = cls(session, threshold, len(total), keys)
        made.commitments, made.total, made._survivors = dict(commitments), total, set(survivors)
        return made

    @property
    def shared(self) -> list[int]:
        """Who has shared its secrets, ascending."""
        return sorted(self.commitments)

    @property
    def survivors(self) -> list[int]:
        """Whose vectors are in the sum, ascending."""
        return sorted(self._survivors)

    @property
    def dropped(self) -> list[int]:
        """Who has shared its secrets and sent no vector, ascending."""
        return sorted(set(self.commitments) - self._survivors)

    def take_shares(
        self, sender: int, texts: Mapping[int, bytes], commitments: Commitments
    ) -> None:
        """Take the texts of one participant for all others, and what it binds itself to.

        Raises:
            SecureSumError: they are for others than these.
        """
        others = set(self.keys) - {sender}
        sizes = {len(commitments.seed) * 2, *map(len, commitments.shares.values())}
        is_bound = set(commitments.shares) == set(self.keys) and sizes == {2 * DIGEST_BYTES}
        if set(texts) != others or not is_bound:
            raise SecureSumError("The shares of a secure sum are for other participants.")
        self._texts[sender], self.commitments[sender] = texts, commitments

    def texts_for(self, receiver: int) -> dict[int, bytes]:
        """Return what the others have written to a participant, by sender."""
        return {
            sender: self._texts[sender][receiver] for sender in self.shared if sender != receiver
        }

    def commitments_for(self, receiver: int) -> dict[int, bytes]:
        """Return what the others are bound to, of their shares to a participant, by sender."""
        return {
            sender: self.commitments[sender].shares[receiver]
            for sender in self.shared
            if sender != receiver
        }

    def add(self, sender: int, vector: Words) -> None:
        """Add a participant's masked vector [n]."""
        if sender in self._survivors or sender not in self.commitments:
            raise SecureSumError("A vector of a secure sum came out of turn.")
        self.total += vector
        self._survivors.add(sender)

    def take_revealed(self, sender: int, revealed: Revealed) -> None:
        """Take the shares that a participant reveals.

        A share may be absent. One that is there has to be what its owner is bound to: the sender
        has looked at it when it came, and leaves out a wrong one.

        Raises:
            SecureSumError: it reveals other shares than it was asked for.
            WrongSecretError: a share is wrong, so the sender lies.
        """
        is_asked = set(revealed.seeds) <= self._survivors and set(revealed.keys) <= set(
            self.dropped
        )
        if not is_asked or sender not in self._survivors:
            raise SecureSumError("reveals other shares than it was asked for")
        kinds = (("seed", revealed.seeds, 0), ("key", revealed.keys, DIGEST_BYTES))
        for what, shares, start in kinds:
            for owner, share in shares.items():
                digest = share_digest(what, self._session, owner, sender, share)
                bound = self.commitments[owner].shares[sender]
                if digest != bound[start : start + DIGEST_BYTES]:
                    raise WrongSecretError.of(sender, "reveals a wrong share")
        self.revealed[sender] = revealed

    @property
    def is_open(self) -> bool:
        """Whether enough shares of all that is needed are revealed."""
        return self._missing() is None

    def _missing(self) -> int | None:
        """Return a participant of whose secret too few shares are revealed, None for nobody."""
        for number in self.shared:
            if len(self._shares_of(number)) < self.threshold:
                return number
        return None

    def _shares_of(self, number: int) -> list[bytes]:
        """Return the first shares of the secret of a participant that has to be known."""
        shares = [
            (item.seeds if number in self._survivors else item.keys).get(number)
            for item in self.revealed.values()
        ]
        return [share for share in shares if share is not None][: self.threshold]

    def unmasked(self) -> Words:
        """Return [n] the sum of the vectors.

        A participant is named for shares that others could not use where so many of them say so
        that the honest ones, `threshold` at least, are too few for them all to lie.

        Raises:
            SecureSumError: too few have revealed their shares.
            WrongSecretError: names who has given shares to the others that do not fit together.
        """
        missing = self._missing()
        if missing is not None:
            count = len(self._shares_of(missing))
            if len(self.revealed) - count > len(self._survivors) - self.threshold:
                raise WrongSecretError.of(missing, "gave shares to others that they could not use")
            raise SecureSumError(
                "Too few participants help to unmask a secure sum.",
                got=count,
                expected=f"at least {self.threshold}",
            )
        total = self.total.copy()
        for number in self.survivors:
            seed = self._secret(number)
            if seed_digest(self._session, number, seed) != self.commitments[number].seed:
                raise WrongSecretError.of(number, "gave shares to others that do not fit together")
            total -= mask(seed, len(total))
        for number in self.dropped:
            private = self._secret(number)
            if public_key(private) != self.keys[number].mask:
                raise WrongSecretError.of(number, "gave shares to others that do not fit together")
            for other in self.survivors:
                key = common_key(private, self.keys[other].mask, self._session)
                common = mask(key, len(total))
                total = total - common if other < number else total + common
        return total

    def _secret(self, number: int) -> bytes:
        try:
            return combine(self._shares_of(number))
        except SecureSumError:
            text = "gave shares to others that do not fit together"
            raise WrongSecretError.of(number, text) from None
