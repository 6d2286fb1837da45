"""A certificate authority of the emulator's own, made each time it starts."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Authority:
    """Signs for the names that the emulator answers to. ``file`` is what clients must trust
    (``SSL_CERT_FILE``)."""

    def __init__(self, folder: Path, *names: str) -> None:
        authority = trustme.CA()
        self.file = folder / "authority.pem"
        authority.cert_pem.write_to_path(str(self.file))
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(*names).configure_cert(self.context)
