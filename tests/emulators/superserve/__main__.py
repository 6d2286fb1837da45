"""``python -m tests.emulators.superserve``: the emulated service, to develop against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..certificates import Authority
from ..faults import Faults
from ..http import Server
from ..network import Gateway
from ..running import Emulator, main
from .control import ControlPlane
from .data import DataPlane
from .state import Service

HOST = "sandbox.superserve.ai"
"""The SDK does not let the name of the data plane be chosen (0.11.4: ``_config.py``)."""


class Superserve(Emulator):
    """Control plane in plain HTTP, data plane behind a proxy that ends TLS for its name."""

    def make(self, folder: Path, server: Server, faults: Faults) -> Service:
        service = Service(folder, server.drop)
        ControlPlane(service, server)
        DataPlane(service, server, faults)
        return service

    async def environment(
        self, key: str, base: str, *, folder: Path, server: Server, delay: float
    ) -> Mapping[str, str]:
        authority = Authority(folder, HOST, f"*.{HOST}")
        secure = await server.listen(tls=authority.context)
        proxy = await Gateway(secure, delay=delay, proxy=True).listen()
        return {
            "SUPERSERVE_API_KEY": key,
            "SUPERSERVE_BASE_URL": base,
            "HTTPS_PROXY": f"http://127.0.0.1:{proxy}",
            "NO_PROXY": "127.0.0.1",
            "SSL_CERT_FILE": str(authority.file),
        }


if __name__ == "__main__":
    main(Superserve(), "superserve")
