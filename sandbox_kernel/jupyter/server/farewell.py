"""What becomes of the kernels of a server that ends: they end with it, or wait for the next one.

Who asks a server to end (Ctrl-C and yes, ``jupyter server stop``, the quit button) means its
kernels, too, as with local ones; so does a program that runs a server in itself. A service that is
stopped (SIGTERM) comes back, as a rule, and its kernels wait for that; but not without bounds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter import hosting, keeping
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.backends import backend_names, load_backend
from sandbox_kernel.sandboxes.left import all_left
from sandbox_kernel.tunnel.background import run

_INFO_TIMEOUT = 5.0


class Stopped:
    """Whether the server was told to end by SIGTERM, as a service manager does."""

    def __init__(self, app: Any) -> None:
        self.by_signal = False
        handler = signal.getsignal(signal.SIGTERM)
        # A program that runs a server in itself keeps its signals to itself.
        if (
            threading.current_thread() is threading.main_thread()
            and callable(handler)
            and getattr(handler, "__self__", None) is app
        ):

            def noticed(signum: int, frame: Any) -> None:
                # `jupyter server stop` sends one to a server that takes long to end as asked.
                self.by_signal = self.by_signal or not getattr(app, "_stopping", False)
                handler(signum, frame)

            signal.signal(signal.SIGTERM, noticed)


@dataclass
class Bounds:
    """How much may be left waiting, of all servers of this user together."""

    count: int
    memory_mib: int

    @classmethod
    def of(cls, count: int, memory_mib: int) -> Bounds:
        """``memory_mib`` 0: a quarter of the machine's."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(count, memory_mib or pages // 4 // 2**20)


@dataclass
class _Leaving:
    """A kernel that could be left."""

    kernel_id: str
    provisioner: SandboxProvisioner
    busy: bool
    last_activity: float


class Farewell:
    """Of one server. ``used`` says whether a kernel has run anything."""

    def __init__(self, manager: Any, log: logging.Logger, used: Callable[[str], bool]) -> None:
        self._manager = manager
        self._log = log
        self._used = used

    def provisioner(self, kernel_id: str) -> SandboxProvisioner | None:
        found = getattr(self._manager._kernels.get(kernel_id), "provisioner", None)
        return found if isinstance(found, SandboxProvisioner) else None

    async def end(self, kernel_ids: Iterable[str]) -> None:
        """Shut these kernels down, their files saved first. If the process ends meanwhile, it goes
        on with that at its exit."""
        ids = [kernel_id for kernel_id in kernel_ids if self.provisioner(kernel_id)]
        for kernel_id in ids:
            provisioner = self.provisioner(kernel_id)
            if provisioner is not None and provisioner.kernel is not None:
                hosting.own(provisioner.kernel)
        await asyncio.gather(*(self._end_one(kernel_id) for kernel_id in ids))

    async def _end_one(self, kernel_id: str) -> None:
        try:
            await self._manager.shutdown_kernel(kernel_id)
        except Exception as error:  # noqa: BLE001  (one kernel must not keep the others)
            self._log.error("Kernel %s could not be shut down: %s", kernel_id, error)

    async def choose(
        self, kernel_ids: Iterable[str], bounds: Bounds
    ) -> tuple[list[str], list[str]]:
        """Which kernels wait for the next server, and which end now: those that have run nothing
        and, beyond the bounds, those that have been idle for longest. What earlier servers have
        left goes first."""
        found = [one for one in map(self._look, kernel_ids) if one is not None]
        unused = [one.kernel_id for one in found if not self._used(one.kernel_id)]
        waiting = [one for one in found if one.kernel_id not in unused]
        waiting.sort(key=lambda one: (one.busy, one.last_activity))
        earlier = all_left(backend_names())
        theirs = await asyncio.gather(*(self._memory(r.backend, r.name) for r in earlier))
        ours = await asyncio.gather(*(self._memory_of(one.provisioner) for one in waiting))
        count, memory = len(earlier) + len(waiting), sum(theirs) + sum(ours)

        def too_much() -> bool:
            return count > bounds.count or memory > bounds.memory_mib

        for record, size in zip(earlier, theirs, strict=True):
            if too_much() and await self._end_left(record):
                count, memory = count - 1, memory - size
        ended: list[_Leaving] = []
        for size in ours:
            if too_much():
                ended.append(waiting.pop(0))
                count, memory = count - 1, memory - size
        for one in ended:
            self._log.warning(
                "Kernel %s does not wait for the next server: %d kernels and %d MiB may "
                "(SandboxServer.max_left, max_left_mib), and it has been idle for longest.",
                *(one.kernel_id, bounds.count, bounds.memory_mib),
            )
        return [one.kernel_id for one in waiting], unused + [one.kernel_id for one in ended]

    def _look(self, kernel_id: str) -> _Leaving | None:
        manager, provisioner = self._manager._kernels.get(kernel_id), self.provisioner(kernel_id)
        if provisioner is None:
            return None
        busy = getattr(manager, "execution_state", "") == "busy"
        return _Leaving(kernel_id, provisioner, busy, manager.last_activity.timestamp())

    async def _memory_of(self, provisioner: SandboxProvisioner) -> int:
        kernel = provisioner.kernel
        return await self._memory(kernel.handle.backend, kernel.handle.name) if kernel else 0

    async def _memory(self, backend: str, name: str) -> int:
        """What a sandbox uses of this machine's memory, in MiB."""
        try:
            return await asyncio.wait_for(run(_measured(backend, name)), _INFO_TIMEOUT)
        except (SandboxError, OSError, asyncio.TimeoutError) as error:
            self._log.warning("How much memory sandbox %s uses is not known: %s", name, error)
            return 0

    async def _end_left(self, record: Record) -> bool:
        """Whether that could be done."""
        self._log.warning(
            "Sandbox %s, which an earlier server has left, ends, its files saved: more wait than "
            "may (SandboxServer.max_left, max_left_mib).",
            record.name,
        )
        try:
            await run(keeping.end_left(record, self._log))
        except (SandboxError, OSError) as error:
            self._log.warning("Sandbox %s could not be ended: %s", record.name, error)
            return False
        return True


async def _measured(backend: str, name: str) -> int:
    client = load_backend(backend)
    if client.capabilities.hosted:
        return 0
    usage = await (await client.get(name)).usage()
    return usage.memory // 2**20 if usage else 0
