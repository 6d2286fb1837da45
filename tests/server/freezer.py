"""A backend that can pause, for a machine without microVMs: local jails whose processes are
stopped. For tests of what is done with a pause, not of how good it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox_kernel.host_processes import ProcessId
from sandbox_kernel.sandboxes.base import SandboxHandle, SandboxInfo
from sandbox_kernel.sandboxes.capabilities import Capabilities
from sandbox_kernel.sandboxes.local import LocalClient


def members(init: int) -> list[int]:
    """The processes of a jail: its first, and all that descend from it."""
    found = [init]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


class FreezerClient(LocalClient):
    capabilities: Capabilities = replace(  # type: ignore[misc]
        LocalClient.capabilities, pause=True
    )

    async def create(self, spec: Any) -> Any:
        return freezing(await super().create(spec))

    async def get(self, name: str) -> Any:
        return freezing(await super().get(name))


def freezing(handle: SandboxHandle) -> SandboxHandle:
    """The handle, with ``pause`` and ``resume``."""
    info = handle.info
    first = handle._record.data["init"][0]  # type: ignore[attr-defined]

    def signalled(pids: list[int], signum: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def stopped() -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{first}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    async def pause() -> None:
        # The first one before all others: it lets its keepers go on when code in the jail stops
        # them. It need not stop at once.
        signalled([first], signal.SIGSTOP)
        while ProcessId.of(first) is not None and not stopped():
            await asyncio.sleep(0.01)
        signalled(members(first), signal.SIGSTOP)

    async def resume() -> None:
        signalled(members(first), signal.SIGCONT)

    async def info_when_frozen() -> SandboxInfo:
        if stopped():
            name, id_ = handle.name, handle.id
            return SandboxInfo(name, id_, handle.backend, "paused", 0.0)  # it cannot be asked
        return await info()

    handle.pause = pause  # type: ignore[method-assign]
    handle.resume = resume  # type: ignore[method-assign]
    handle.info = info_when_frozen  # type: ignore[method-assign]
    return handle
