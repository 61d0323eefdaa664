"""The cryptography of secure sums, all of it from `cryptography` and `pycryptodome`.

Both are what Flower itself is built on. Flower's own SecAgg+ (flwr 1.40 to 1.42) is not used: it
reduces the seed of each pairwise mask to 28 bits, and that of each private one to 32, before it
gives them to numpy's Mersenne Twister (`secaggplus_utils.pseudo_rand_gen`). All seeds can be tried
in minutes. Here a mask is the key stream of AES-256 under the whole key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedkeel.errors import FedkeelError, RunError

try:
    from Crypto.Protocol.SecretSharing import Shamir
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise RunError(
        "Secure aggregation needs the packages cryptography and pycryptodome.",
        got=str(error),
        do="pip install 'fedkeel[flower]'",
    ) from None

Words = NDArray[np.uint64]
"""Whole numbers modulo 2^64, whose sums and differences wrap around."""

KEY_BYTES = 32
"""Bytes of a key, a seed and a public key."""

_NONCE_BYTES, _CHUNK, _INDEX_BYTES = 12, 16, 4


DIGEST_BYTES = 32
"""Bytes of a commitment."""


class SecureSumError(FedkeelError):
    """A secure sum cannot go on."""


class WrongSecretError(SecureSumError):
    """What a participant has shared is not what it has committed to.

    Attributes:
        number: the participant.
    """

    number = -1

    @classmethod
    def of(cls, number: int, what: str) -> WrongSecretError:
        """Return the error of a participant."""
        error = cls(what)
        error.number = number
        return error


def new_key() -> bytes:
    """Return a private key, or a seed, from the system's source of randomness."""
    return os.urandom(KEY_BYTES)


def public_key(private: bytes) -> bytes:
    """Return the public key of a private one (X25519)."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_key(private: bytes, public: bytes, purpose: str) -> bytes:
    """Return the key that two have in common, each from its own private and the other's public one.

    Args:
        private: of one of them.
        public: of the other.
        purpose: what it is for; keys for different purposes have nothing in common.

    Raises:
        SecureSumError: the public key is not valid.
    """
    try:
        point = X25519PublicKey.from_public_bytes(public)
        secret = X25519PrivateKey.from_private_bytes(private).exchange(point)
    except ValueError:
        raise SecureSumError("A public key of a secure sum is not valid.") from None
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose.encode()).derive(secret)


def encrypt(key: bytes, text: bytes, context: str) -> bytes:
    """Return a text that only those with the key can read, and nobody can change (AES-GCM).

    Args:
        key: used only for this text, or for few.
        text: what is hidden.
        context: has to be the same at the other end.
    """
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, context.encode())


def decrypt(key: bytes, data: bytes, context: str) -> bytes:
    """Return the text that was encrypted.

    Raises:
        SecureSumError: the key or the context is another one, or the data were changed.
    """
    try:
        nonce, sealed = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        return AESGCM(key).decrypt(nonce, sealed, context.encode())
    except (InvalidTag, ValueError):
        raise SecureSumError("A share of a secure sum was changed on its way.") from None


def commitment(purpose: str, secret: bytes) -> bytes:
    """Return what binds to a secret of 32 random bytes or more, and says nothing of it (SHA-256).

    Args:
        purpose: what it is for; the same secret for another purpose has another commitment.
        secret: the secret. One that can be guessed would be found by trying.
    """
    return hashlib.sha256(f"{purpose}\0".encode() + secret).digest()


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return shares of a secret: any `threshold` of them make it, fewer say nothing of it.

    >>> shares = split(bytes(range(32)), 2, 3)
    >>> combine(shares[1:]) == combine(shares[:2]) == bytes(range(32))
    True
    """
    shares: list[bytes] = []
    for start in range(0, KEY_BYTES, _CHUNK):
        parts = Shamir.split(threshold, count, secret[start : start + _CHUNK], ssss=False)
        shares = shares or [index.to_bytes(_INDEX_BYTES, "little") for index, _ in parts]
        shares = [share + part for share, (_, part) in zip(shares, parts, strict=True)]
    return shares


def combine(shares: Iterable[bytes]) -> bytes:
    """Return the secret of some shares.

    Raises:
        SecureSumError: they are not shares of one secret.
    """
    shares = list(shares)
    if any(len(share) != _INDEX_BYTES + KEY_BYTES for share in shares):
        raise SecureSumError("A share of a secure sum has another length.")
    indices = [int.from_bytes(share[:_INDEX_BYTES], "little") for share in shares]
    secret = b""
    for start in range(_INDEX_BYTES, _INDEX_BYTES + KEY_BYTES, _CHUNK):
        parts = [share[start : start + _CHUNK] for share in shares]
        try:
            secret += Shamir.combine(list(zip(indices, parts, strict=True)), ssss=False)
        except ValueError:
            raise SecureSumError("Two shares of a secure sum are the same.") from None
    return secret


def mask(key: bytes, size: int) -> Words:
    """Return [size] numbers modulo 2^64 that look random without the key, the same for one key.

    Args:
        key: used only for this mask.
        size: how many.
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(_CHUNK))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), dtype="<u8").astype(np.uint64)
