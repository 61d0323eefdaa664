"""The server's secret: a key from which noise and cohorts are drawn in place of the run's seed."""

from __future__ import annotations

import hashlib

from fedkeel.base.named_files import expanded, read_regular
from fedkeel.errors import ConfigError
from fedkeel.features.budget.settings import Privacy

SHORTEST = 16
"""Bytes of a key, at least."""


def server_seed(seed: int, privacy: Privacy | None) -> int:
    """Return the seed of what the server draws: the run's own, or one made of it and a key.

    Args:
        seed: seed of the run.
        privacy: names the file of the key; None without a budget.

    Raises:
        ConfigError: the file cannot be read, or is too short to be a secret.
    """
    if privacy is None or privacy.key_file is None:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), key=_key(privacy.key_file), digest_size=16)
    return int.from_bytes(digest.digest(), "little")


def key_digest(privacy: Privacy | None) -> str:
    """Return a digest by which a key is recognised; "" without one, and where it is not here."""
    file = None if privacy is None else privacy.key_file
    if file is None or not expanded(file).is_file():
        return ""
    return hashlib.blake2b(b"which key", key=_key(file), digest_size=8).hexdigest()


def _key(file: str) -> bytes:
    try:
        key = read_regular(expanded(file))
    except OSError as error:
        raise ConfigError(
            "The file of the privacy key cannot be read.",
            got=f"privacy.key_file = {file!r}: {error.strerror}",
            do=f"make one: head -c 32 /dev/urandom > {file}; chmod 600 {file}",
        ) from None
    if len(key) < SHORTEST:
        raise ConfigError(
            "The privacy key is too short.",
            got=f"{len(key)} bytes in {file}",
            expected=f"at least {SHORTEST} random bytes",
            do=f"make one: head -c 32 /dev/urandom > {file}",
        )
    return hashlib.blake2b(key, digest_size=32).digest()
