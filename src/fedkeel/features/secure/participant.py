"""A participant's side of a secure sum: its keys, its masked vector, and the shares it reveals.

Source
    Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
    Figure 4, in the variant for a server that is honest but curious.

Deviations
    A participant commits to its seed and to each share, so that a share that is wrong is found, and
    whose it is. Keys may be signed by whoever uses this: signatures are not its business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pydantic import ConfigDict

from fedkeel.features.secure.primitives import (
    SecureSumError,
    Words,
    commitment,
    decrypt,
    encrypt,
    mask,
    new_key,
    public_key,
    shared_key,
    split,
)

MIN_PARTICIPANTS = 2
"""Smallest number of participants of a sum: a sum of one would show what that one sent."""


def threshold(participants: int, minimum: int | None = None) -> int:
    """Return how many participants a sum needs, and how many shares make a secret.

    It is more than half, so that no two groups of participants can each reveal what the other half
    of a secret is for.

    Args:
        participants: how many are asked to take part.
        minimum: the number of `flower.secure_minimum`, None where it is not set.

    >>> [threshold(n) for n in (1, 2, 3, 4, 10)], threshold(10, 8)
    ([2, 2, 2, 3, 6], 8)
    """
    return max(participants // 2 + 1, MIN_PARTICIPANTS, minimum or 0)


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a participant.

    Args:
        cipher: for shares that are sent to it.
        mask: for the masks that it has in common with others.
    """

    cipher: bytes
    mask: bytes


@dataclass(frozen=True)
class Commitments:
    """What a participant binds itself to when it shares its secrets.

    Args:
        seed: of the seed of its private mask.
        shares: of the shares for each participant, itself too: that of the seed, then that of the
            private key.
    """

    seed: bytes
    shares: Mapping[int, bytes]


@dataclass(frozen=True)
class Revealed:
    """The shares that a participant reveals, by the participant whose secret they are parts of.

    Those are absent of which it has no share that it could reveal.

    Args:
        seeds: of those in the sum: of the seed of their private mask.
        keys: of those that have sent no vector: of the private key of their common masks.
    """

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]


@dataclass(frozen=True)
class Participant:
    """What a participant knows in a sum. Each step returns what it knows after it.

    A vector is masked twice: by masks that each two participants have in common, which cancel in
    the sum; and by one of its own, which the others help to take off once it is known who is in the
    sum. So a vector that comes late stays hidden, although the keys of its common masks are known.

    Args:
        number: names the participant; the others have other ones.
        session: names the sum.
        cipher_key: private key by which shares for it are read.
        mask_key: private key of the masks that it has in common with others.
        seed: seed of its private mask.
        threshold: participants of the sum, at least.
        peers: public keys of all participants, itself too; empty before they have shared.
        sharers: who has shared secrets with it, itself too; empty before it has sent its vector.
        seed_shares: its shares of their seeds, without those that it could not read.
        key_shares: its shares of their mask keys, likewise.
        has_sent: whether it has sent its vector.
    """

    number: int
    session: str
    cipher_key: bytes
    mask_key: bytes
    seed: bytes
    threshold: int = 0
    peers: Mapping[int, PublicKeys] = field(default_factory=dict)
    sharers: frozenset[int] = frozenset()
    seed_shares: Mapping[int, bytes] = field(default_factory=dict)
    key_shares: Mapping[int, bytes] = field(default_factory=dict)
    has_sent: bool = False

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        ser_json_bytes="base64", val_json_bytes="base64"
    )

    @classmethod
    def new(cls, number: int, session: str) -> Participant:
        """Return a participant with new keys."""
        return cls(number, session, new_key(), new_key(), new_key())

    @property
    def public_keys(self) -> PublicKeys:
        """Its public keys, which are sent first."""
        return PublicKeys(public_key(self.cipher_key), public_key(self.mask_key))

    def share(
        self, peers: Mapping[int, PublicKeys], threshold: int
    ) -> tuple[Participant, dict[int, bytes], Commitments]:
        """Share seed and mask key with the others: second step.

        Args:
            peers: public keys of all participants, itself too.
            threshold: participants of the sum, at least.

        Returns:
            The participant, for each other one a text that only that one can read, and what it
            binds itself to.

        Raises:
            SecureSumError: there are too few others, or its own keys are not among them, or keys
                are there twice.
        """
        keys = [key for pair in peers.values() for key in (pair.cipher, pair.mask)]
        if self.peers or peers.get(self.number) != self.public_keys or len(set(keys)) < len(keys):
            raise SecureSumError("The public keys of a secure sum are not what they should be.")
        _check_count("asks", len(peers), threshold)
        numbers = sorted(peers)
        shares = zip(
            numbers,
            split(self.seed, threshold, len(numbers)),
            split(self.mask_key, threshold, len(numbers)),
            strict=True,
        )
        sealed, seed_shares, key_shares = dict[int, bytes](), {}, {}
        bound = dict[int, bytes]()
        for number, of_seed, of_key in shares:
            bound[number] = share_digests(self.session, self.number, number, of_seed, of_key)
            if number == self.number:
                seed_shares[number], key_shares[number] = of_seed, of_key
                continue
            key = self._cipher(peers[number])
            sealed[number] = encrypt(key, of_seed + of_key, self._context(self.number, number))
        after = replace(
            self, threshold=threshold, peers=dict(peers), seed_shares=seed_shares,
            key_shares=key_shares,
        )  # fmt: skip
        seed = seed_digest(self.session, self.number, self.seed)
        return after, sealed, Commitments(seed, bound)

    def masked(
        self, vector: Words, sealed: Mapping[int, bytes], bound: Mapping[int, bytes]
    ) -> tuple[Participant, Words]:
        """Mask the vector: third step.

        A share that it cannot read, or that is not what its sender is bound to, is left out: the
        others may have better ones, and the masks do not depend on it.

        Args:
            vector: [n] what is added up.
            sealed: the texts of all others that have shared.
            bound: what each of them has bound itself to, for its shares to this one.

        Raises:
            SecureSumError: they are too few, or it has sent a vector already: the difference of two
                with the same masks would reveal something.
        """
        others = set(sealed)
        if self.has_sent or not self.peers or not others <= set(self.peers) - {self.number}:
            raise SecureSumError("A vector of a secure sum is asked for out of turn.")
        _check_count("has shares of", len(others) + 1, self.threshold)
        seed_shares, key_shares = dict(self.seed_shares), dict(self.key_shares)
        total = vector + mask(self.seed, len(vector))
        for number, text in sealed.items():
            peer = self.peers[number]
            common = mask(common_key(self.mask_key, peer.mask, self.session), len(vector))
            total = total + common if self.number < number else total - common
            try:
                of_seed, of_key = self._shares_of(number, text)
            except SecureSumError:
                continue
            digests = share_digests(self.session, number, self.number, of_seed, of_key)
            if digests == bound.get(number):
                seed_shares[number], key_shares[number] = of_seed, of_key
        after = replace(
            self, sharers=frozenset(others | {self.number}), seed_shares=seed_shares,
            key_shares=key_shares, has_sent=True,
        )  # fmt: skip
        return after, total

    def _shares_of(self, number: int, text: bytes) -> tuple[bytes, bytes]:
        """Return the shares of a seed and of a key that another one has sent.

        Raises:
            SecureSumError: the text was changed, or is not for this one.
        """
        key = self._cipher(self.peers[number])
        shares = decrypt(key, text, self._context(number, self.number))
        half = len(shares) - len(shares) // 2
        return shares[:half], shares[half:]

    def reveal(self, survivors: Collection[int], dropped: Collection[int]) -> Revealed:
        """Return the shares by which the sum is unmasked: last step.

        Args:
            survivors: who has sent a vector.
            dropped: who has shared and sent none.

        Raises:
            SecureSumError: it is asked for another sum than the one it takes part in, of too few,
                or for both secrets of one participant, by which its vector would be known.
        """
        survivors, dropped = set(survivors), set(dropped)
        is_known = survivors | dropped == self.sharers
        if survivors & dropped or not is_known or self.number not in survivors or not self.has_sent:
            raise SecureSumError(
                "The shares of a secure sum are asked for in a way that is unsafe."
            )
        _check_count("would be of", len(survivors), self.threshold)
        return Revealed(
            {number: self.seed_shares[number] for number in survivors & set(self.seed_shares)},
            {number: self.key_shares[number] for number in dropped & set(self.key_shares)},
        )

    def _cipher(self, peer: PublicKeys) -> bytes:
        return shared_key(self.cipher_key, peer.cipher, f"fedkeel share {self.session}")

    def _context(self, sender: int, receiver: int) -> str:
        return f"{self.session} {sender} {receiver}"


def are_usable(keys: PublicKeys, others: Iterable[PublicKeys]) -> bool:
    """Return whether these keys are valid, differ, and are not those of others."""
    pair = {keys.cipher, keys.mask}
    if len(pair) < 2 or any(pair & {other.cipher, other.mask} for other in others):
        return False
    try:
        for key in pair:
            shared_key(new_key(), key, "")
    except SecureSumError:
        return False
    return True


def common_key(private: bytes, public: bytes, session: str) -> bytes:
    """Return the key of the mask that two participants have in common."""
    return shared_key(private, public, f"fedkeel mask {session}")


def seed_digest(session: str, owner: int, seed: bytes) -> bytes:
    """Return by what a participant binds itself to the seed of its private mask."""
    return commitment(f"fedkeel seed {session} {owner}", seed)


def share_digests(session: str, owner: int, holder: int, of_seed: bytes, of_key: bytes) -> bytes:
    """Return by what a participant binds itself to the shares that it gives to another one.

    >>> both = share_digests("run 0", 1, 2, bytes(36), bytes(36))
    >>> len(both), both[:32] == both[32:]
    (64, False)
    """
    return share_digest("seed", session, owner, holder, of_seed) + share_digest(
        "key", session, owner, holder, of_key
    )


def share_digest(what: str, session: str, owner: int, holder: int, share: bytes) -> bytes:
    """Return the digest of one share, of a ``seed`` or of a ``key``; see `share_digests`."""
    return commitment(f"fedkeel share of {what} {session} {owner} {holder}", share)


def _check_count(what: str, count: int, minimum: int) -> None:
    if count < max(minimum, MIN_PARTICIPANTS):
        raise SecureSumError(
            f"A secure sum {what} too few participants.",
            got=count,
            expected=f"at least {max(minimum, MIN_PARTICIPANTS)}",
        )
