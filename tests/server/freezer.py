"""A backend that can pause, for a machine without microVMs: local jails whose processes are
stopped. For tests of what is done with a pause, not of how good it is."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox_kernel.sandboxes.base import Capabilities, SandboxHandle, SandboxInfo
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

    async def signalled(signum: int) -> None:
        # The first one, too: it lets its keepers go on when code in the jail stops them.
        for member in members(first):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signum)

    async def told() -> SandboxInfo:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{first}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] == "T":
                name, id_ = handle.name, handle.id
                return SandboxInfo(name, id_, handle.backend, "paused", 0.0)  # it cannot be asked
        return await info()

    handle.pause = lambda: signalled(signal.SIGSTOP)  # type: ignore[method-assign]
    handle.resume = lambda: signalled(signal.SIGCONT)  # type: ignore[method-assign]
    handle.info = told  # type: ignore[method-assign]
    return handle
