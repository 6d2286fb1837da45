"""The certificates that this machine trusts: for the gateway's own connections to servers, and for
sandboxes, beside the gateway's authority."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
BUNDLE_VARIABLES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "PIP_CERT", "CARGO_HTTP_CAINFO", "CONDA_SSL_VERIFY"),
    *("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "DENO_CERT"),
)
"""Variables that name a file with certificates to trust."""
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----")
_MOST = 8 << 20


def for_servers() -> ssl.SSLContext:
    """Trusts what this machine trusts, ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` included, and
    verifies everything."""
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if not any((paths.cafile, paths.capath)):
        # An interpreter that was built for another place finds none by itself.
        for path in _system_files():
            context.load_verify_locations(path)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def for_sandbox(named: Mapping[str, str] | None = None) -> bytes:
    """What programs of this machine trust, as one bundle: the system's certificates, and those of
    files that usual variables (of this process, and in ``named``) name."""
    found: dict[bytes, None] = {}
    for path in dict.fromkeys(_files({**os.environ, **(named or {})})):
        found.update(dict.fromkeys(certificates_in(path)))
    return b"".join(one + b"\n" for one in found)


def certificates_in(path: str) -> list[bytes]:
    """The certificates in a file, in PEM; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            found = _CERTIFICATE.findall(file.read(_MOST))
    except OSError:
        return []
    return [one.replace(b"\r", b"") for one in found]


def _files(variables: Mapping[str, str]) -> Iterator[str]:
    default = ssl.get_default_verify_paths()
    yield from filter(None, [default.cafile])
    yield from _system_files()
    yield from (variables[name] for name in BUNDLE_VARIABLES if name in variables)
    if "SSL_CERT_DIR" in variables:
        yield from _in_folders(variables["SSL_CERT_DIR"].split(os.pathsep))


def _system_files() -> Iterable[str]:
    return [path for path in SYSTEM_BUNDLES if os.path.isfile(path)][:1]


def _in_folders(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        try:
            yield from sorted(str(path) for path in Path(folder).iterdir() if path.is_file())
        except OSError:
            continue
