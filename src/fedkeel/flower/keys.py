"""Certificates and keys of a federation: TLS for the server, a key pair for each node.

Made with the `cryptography` package: a private authority signs the server's certificate, and each
node has a key on the curve P-384, whose public half the server is told.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from fedkeel.errors import RunError

CA, CERTIFICATE, SERVER_KEY = "ca.crt", "server.pem", "server.key"


def make(folder: Path, hosts: Sequence[str], nodes: int, days: int = 365) -> None:
    """Write ``ca.crt``, ``server.pem``, ``server.key`` and ``node-0``, ``node-0.pub``, ... .

    The authority's own key is thrown away: to sign again, make everything again.

    Args:
        folder: where to; it must not hold keys yet.
        hosts: names and addresses under which nodes reach the server.
        nodes: number of nodes.
        days: how long the certificates are valid.

    Raises:
        RunError: there are keys already.
    """
    if (folder / CA).exists():
        raise RunError(f"{folder} holds keys already.", do="choose another folder (--out)")
    folder.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedkeel federation")])
    root = (
        _certificate(issuer, issuer, authority.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), False)
        .sign(authority, hashes.SHA384())
    )
    server = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    certificate = (
        _certificate(subject, issuer, server.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_name(h) for h in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority, hashes.SHA384())
    )
    (folder / CA).write_bytes(root.public_bytes(Encoding.PEM))
    (folder / CERTIFICATE).write_bytes(certificate.public_bytes(Encoding.PEM))
    _private(folder / SERVER_KEY, server, PrivateFormat.PKCS8)
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        _private(folder / f"node-{number}", key, PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (folder / f"node-{number}.pub").write_bytes(public + b"\n")


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    """Write a private key that nobody else may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, form, NoEncryption()))
