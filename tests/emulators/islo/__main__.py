"""``python -m tests.emulators.islo``: the emulated service, to develop against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..faults import Faults
from ..http import Server
from ..network import Gateway
from ..running import Emulator, main
from .compute import ComputePlane
from .control import ControlPlane
from .state import Service


class Islo(Emulator):
    """Both planes in plain HTTP: the SDK takes the addresses from the environment."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._server: Server | None = None

    async def start(self, folder: Path, delay: float) -> tuple[str, Mapping[str, str]]:
        faults = Faults()
        server = self._server = Server(faults.around)
        service = self._service = Service(folder, server.drop)
        faults.add_routes(server)
        ControlPlane(service, server)
        ComputePlane(service, server, faults)
        plain = await server.listen()
        port = await Gateway(plain, delay=delay).listen() if delay else plain
        return f"http://127.0.0.1:{plain}", {
            "ISLO_API_KEY": service.api_key,
            "ISLO_BASE_URL": f"http://127.0.0.1:{port}",
            "ISLO_COMPUTE_URL": f"http://127.0.0.1:{port}",
        }

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()
        if self._server is not None:
            await self._server.close()


if __name__ == "__main__":
    main(Islo(), "islo")
