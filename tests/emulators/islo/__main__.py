"""``python -m tests.emulators.islo``: the emulated service, to develop against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..faults import Faults
from ..http import Server
from ..running import Emulator, main
from .compute import ComputePlane
from .control import ControlPlane
from .state import Service


class Islo(Emulator):
    """Both planes in plain HTTP: the SDK takes the addresses from the environment."""

    def make(self, folder: Path, server: Server, faults: Faults) -> Service:
        service = Service(folder, server.drop)
        ControlPlane(service, server)
        ComputePlane(service, server, faults)
        return service

    async def environment(
        self, key: str, base: str, *, folder: Path, server: Server, delay: float
    ) -> Mapping[str, str]:
        return {"ISLO_API_KEY": key, "ISLO_BASE_URL": base, "ISLO_COMPUTE_URL": base}


if __name__ == "__main__":
    main(Islo(), "islo")
