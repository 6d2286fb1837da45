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

    def __init__(self) -> None:
        self._service: Service | None = None
        self._server: Server | None = None

    async def start(self, folder: Path, delay: float) -> tuple[str, Mapping[str, str]]:
        faults = Faults()
        server = self._server = Server(faults.around)
        service = self._service = Service(folder, server.drop)
        faults.add_routes(server)
        ControlPlane(service, server)
        DataPlane(service, server, faults)
        authority = Authority(folder, HOST, f"*.{HOST}")
        plain = await server.listen()
        secure = await server.listen(tls=authority.context)
        proxy = await Gateway(secure, delay=delay, proxy=True).listen()
        base = await Gateway(plain, delay=delay).listen() if delay else plain
        return f"http://127.0.0.1:{plain}", {
            "SUPERSERVE_API_KEY": service.api_key,
            "SUPERSERVE_BASE_URL": f"http://127.0.0.1:{base}",
            "HTTPS_PROXY": f"http://127.0.0.1:{proxy}",
            "NO_PROXY": "127.0.0.1",
            "SSL_CERT_FILE": str(authority.file),
        }

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()
        if self._server is not None:
            await self._server.close()


if __name__ == "__main__":
    main(Superserve(), "superserve")
