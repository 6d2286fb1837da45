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
    """The processes of a jail: all that descend from its first."""
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

    async def signalled(signum: int) -> None:
        pid = (await info()).detail["pid"]
        for member in members(pid)[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signum)

    async def told() -> SandboxInfo:
        known = await info()
        state = ""
        if known.detail.get("pid"):
            for member in members(known.detail["pid"])[1:2]:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    stat = Path(f"/proc/{member}/stat").read_text()
                    state = stat.rpartition(")")[2].split()[0]
        return replace(known, status="paused") if state == "T" else known

    handle.pause = lambda: signalled(signal.SIGSTOP)  # type: ignore[method-assign]
    handle.resume = lambda: signalled(signal.SIGCONT)  # type: ignore[method-assign]
    handle.info = told  # type: ignore[method-assign]
    return handle
