"""Signed keys in secure sums: a node signs its own, and takes those of nodes that its site trusts.

The key is the one by which the node authenticates at Flower, an ECDSA key in OpenSSH's format. The
trusted public keys are in a file of the site, one a line, as in ``authorized_keys``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedkeel.base.named_files import read_regular
from fedkeel.errors import ConfigError
from fedkeel.features.secure.primitives import SecureSumError

_ALGORITHM = ec.ECDSA(SHA256())


@dataclass(frozen=True)
class Signing:
    """A node's own key, and the keys of those whose signatures it takes.

    Args:
        key: signs the node's keys in a sum; None where they are not signed.
        peers: public keys of the nodes that may be in a sum; None for any node, signed or not.
    """

    key: ec.EllipticCurvePrivateKey | None = None
    peers: tuple[ec.EllipticCurvePublicKey, ...] | None = None

    def sign(self, text: bytes) -> bytes:
        """Return a signature of a text, nothing without a key."""
        return b"" if self.key is None else self.key.sign(text, _ALGORITHM)

    def check(self, signed: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Refuse texts that the trusted nodes have not signed, each with a key of its own.

        Args:
            signed: text and signature of the other nodes, by number.

        Raises:
            SecureSumError: names the node.
        """
        if self.peers is None:
            return
        this_node = None if self.key is None else self.key.public_key()
        unused = [key for key in self.peers if key != this_node]
        for number, (text, signature) in signed.items():
            signer = next((key for key in unused if _is_signed(key, text, signature)), None)
            if signer is None:
                raise SecureSumError(
                    f"The keys of node {number} are not signed by a key that this site trusts.",
                    got="another signature" if signature else "no signature",
                    expected="that of one of the keys in the site's file of peers, of another "
                    "one for each node",
                    why="a server could answer in the node's place",
                    do="start the node with --peers too, and add its public key to the file",
                )
            unused.remove(signer)


UNSIGNED = Signing()
"""Keys are not signed, and those of any node are taken."""


def _is_signed(key: ec.EllipticCurvePublicKey, text: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, text, _ALGORITHM)
    except InvalidSignature:
        return False
    return True


def read_signing(key: Path | None, peers: Path | None) -> Signing:
    """Read a node's private key, and the public keys that its site trusts.

    Args:
        key: the private key, as ``ssh-keygen -t ecdsa -b 384`` writes it, without a passphrase.
        peers: the public keys, one a line; empty lines and lines with ``#`` are passed over.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    private = None if key is None else _read_private(key)
    trusted = None if peers is None else _read_peers(peers)
    if trusted is not None and private is None:
        raise ConfigError(
            "A node that takes only signed keys has to sign its own.",
            got="peers without a key",
            do="start it with --auth-supernode-private-key, which is the key that signs",
        )
    return Signing(private, trusted)


def _read_private(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(read_regular(file), password=None)
    except OSError as error:
        raise _unusable("private key", file, error.strerror) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _unusable("private key", file, "no OpenSSH key without a passphrase") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _unusable("private key", file, "a key of another kind than ECDSA")
    return key


def _read_peers(file: Path) -> tuple[ec.EllipticCurvePublicKey, ...]:
    try:
        lines = read_regular(file).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _unusable("file of peers", file, reason) from None
    keys = dict[str, ec.EllipticCurvePublicKey]()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = load_ssh_public_key(line.strip().encode())
        except (ValueError, UnsupportedAlgorithm):
            raise _unusable("file of peers", file, f"line {number} is not a public key") from None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise _unusable("file of peers", file, f"line {number} is a key of another kind")
        keys[" ".join(line.split()[:2])] = key  # the same one twice is one node
    return tuple(keys.values())


def _unusable(what: str, file: Path, reason: object) -> ConfigError:
    return ConfigError(
        f"The {what} of this node cannot be used.",
        got=f"{file}: {reason}",
        expected="ECDSA keys in OpenSSH's format, as ssh-keygen -t ecdsa -b 384 makes them",
        why="without it nothing is answered",
        do="check the path",
    )
