"""Certificates and keys of a federation: TLS for the server, a key pair for each node.

A private authority signs the server's certificate. Each node has a key on the curve P-384, whose
public half is registered at the server.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
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

from fedkeel.base.named_files import writing
from fedkeel.errors import RunError

CA, CERTIFICATE, SERVER_KEY = "ca.crt", "server.pem", "server.key"

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_MAX_SUBJECT = 64
"""Characters that the name in a certificate's subject may have."""


def make(folder: Path, hosts: Sequence[str], nodes: int, days: int = 365) -> None:
    """Write ``ca.crt``, ``server.pem``, ``server.key`` and ``node-0``, ``node-0.pub``, ... .

    The authority's own key is not kept: to sign again, make everything again.

    Args:
        folder: the folder; it must not hold keys yet.
        hosts: names and addresses under which nodes reach the server.
        nodes: number of nodes.
        days: how long the certificates are valid.

    Raises:
        RunError: a host is not a name or address, there are keys already, or the folder cannot be
            written to.
    """
    names = [_host_name(host) for host in hosts]
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
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:_MAX_SUBJECT])])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    certificate = (
        _certificate(subject, issuer, server.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority, hashes.SHA384())
    )
    files = {
        CA: root.public_bytes(Encoding.PEM),
        CERTIFICATE: certificate.public_bytes(Encoding.PEM),
        SERVER_KEY: _private_bytes(server, PrivateFormat.PKCS8),
    }
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        files[f"node-{number}"] = _private_bytes(key, PrivateFormat.OpenSSH)
        files[f"node-{number}.pub"] = public + b"\n"
    _write(folder, files)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files that are not there yet; only their owner may read private keys."""
    with writing(f"{folder} cannot be written to.", "choose another folder (--out)"):
        folder.mkdir(parents=True, exist_ok=True)
        if any((folder / name).exists() for name in files):
            raise RunError(f"{folder} holds keys already.", do="choose another folder (--out)")
        for name, data in files.items():
            mode = 0o644 if name.endswith((".crt", ".pem", ".pub")) else 0o600
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(handle, "wb") as file:
                file.write(data)


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


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if _HOST.fullmatch(host):
            return x509.DNSName(host)
    raise RunError(
        "A certificate cannot be made for this host.",
        got=repr(host),
        expected="a name or an address, such as superlink.example.org or 10.0.0.1",
        do="leave out https:// and the port; write an international name as xn--...",
    )


def _private_bytes(key: ec.EllipticCurvePrivateKey, format: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, format, NoEncryption())
