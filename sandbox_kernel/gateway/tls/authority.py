"""A certificate authority for one sandbox. Its key exists in this process's memory only; who takes
the sandbox over makes an authority of its own."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
from collections import OrderedDict
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sandbox_kernel.gateway.names import Target
from sandbox_kernel.untrusted_text import printable

MOST_CONTEXTS = 256
_LIFE = timedelta(days=3 * 365)
_LEAF_LIFE = timedelta(days=7)
_RENEW = timedelta(days=1)
_SKEW = timedelta(days=1)
"""A sandbox's clock may be slow."""
_MOST_NAME = 64


class Authority:
    """Certifies hosts to the clients of one sandbox."""

    def __init__(self, sandbox: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = printable(f"sandbox-kernel gateway of {sandbox}")[:_MOST_NAME]
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(timezone.utc)
        usage = _usage(signs=True)
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key(), now, _LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._key_id(self._key), critical=False)
            .add_extension(self._issuer_id(), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._contexts: OrderedDict[tuple[str, str | None], tuple[ssl.SSLContext, datetime]] = (
            OrderedDict()
        )

    @property
    def certificate(self) -> bytes:
        """For those who shall trust it: the certificate in PEM, without the key."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def for_clients(self, target: Target, protocol: str | None) -> ssl.SSLContext:
        """A server's context that proves to be the target, and agrees on this protocol (ALPN)."""
        now = datetime.now(timezone.utc)
        kept = self._contexts.pop((target.host, protocol), None)
        if kept is None or kept[1] < now + _RENEW:
            kept = self._context(target, protocol, now), now + _LEAF_LIFE
        self._contexts[target.host, protocol] = kept
        while len(self._contexts) > MOST_CONTEXTS:
            self._contexts.popitem(last=False)
        return kept[0]

    def _context(self, target: Target, protocol: str | None, now: datetime) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._leaf(target, key, now)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        if protocol is not None:
            context.set_alpn_protocols([protocol])
        chain = certificate.public_bytes(serialization.Encoding.PEM) + self.certificate
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        # The ssl module reads files only; a pipe is never on a disk.
        with _as_file(chain) as chain_file, _as_file(secret) as key_file:
            context.load_cert_chain(chain_file, key_file)
        return context

    def _leaf(
        self, target: Target, key: ec.EllipticCurvePrivateKey, now: datetime
    ) -> x509.Certificate:
        host: x509.GeneralName = x509.DNSName(target.host)
        if target.address is not None:
            host = x509.IPAddress(ipaddress.ip_address(target.host))
        named = target.host if len(target.host) <= _MOST_NAME else "sandbox-kernel gateway"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, named)])
        return (
            _builder(subject, self._name, key.public_key(), now, _LEAF_LIFE)
            .add_extension(x509.SubjectAlternativeName([host]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(self._key_id(key), critical=False)
            .add_extension(self._issuer_id(), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @staticmethod
    def _key_id(key: ec.EllipticCurvePrivateKey) -> x509.SubjectKeyIdentifier:
        return x509.SubjectKeyIdentifier.from_public_key(key.public_key())

    def _issuer_id(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    life: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + life)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path from which the content can be read once. It must fit into a pipe."""
    reader, writer = os.pipe()
    try:
        try:
            os.set_blocking(writer, False)
            if os.write(writer, content) != len(content):
                raise OSError("a certificate does not fit into a pipe")
        finally:
            os.close(writer)
        yield f"/dev/fd/{reader}"
    finally:
        os.close(reader)
