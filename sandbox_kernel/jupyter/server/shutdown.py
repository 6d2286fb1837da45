"""The end of a server: its kernels end with it, or wait for the next server.

Whoever asks a server to end (Ctrl-C and yes, ``jupyter server stop``, the quit button) means its
kernels, too, as with local ones; so does a program that runs a server in itself. A service that is
stopped (SIGTERM) usually comes back, and its kernels wait for that, within bounds.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterable
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter import process_exit, teardown
from sandbox_kernel.jupyter.jupyter_internals import is_stopping
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.server_kernels import ServerKernels
from sandbox_kernel.jupyter.server.used_kernels import UsedKernels
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.backends import backend_names, load_backend
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.sandboxes.unattended import all_left
from sandbox_kernel.tunnel.background import run

_INFO_TIMEOUT = 5.0


class StopSignal:
    """Whether SIGTERM ends the server, as a service manager sends it."""

    def __init__(self, app: Any) -> None:
        self.received = False
        handler = signal.getsignal(signal.SIGTERM)
        # A program that runs a server in itself keeps its signals to itself.
        if (
            threading.current_thread() is threading.main_thread()
            and callable(handler)
            and getattr(handler, "__self__", None) is app
        ):

            def receive(signum: int, frame: Any) -> None:
                # `jupyter server stop` sends SIGTERM to a server that takes long to end as asked.
                self.received = self.received or not is_stopping(app)
                handler(signum, frame)

            signal.signal(signal.SIGTERM, receive)


class ServerShutdown:
    """Ends kernels of one server, or leaves them running. ``used``: kernels that ran a cell."""

    def __init__(self, kernels: ServerKernels, used: UsedKernels) -> None:
        self._kernels = kernels
        self._manager = kernels.manager
        self._used = used
        self._log = kernels.log

    async def end(self, kernel_ids: Iterable[str]) -> None:
        """Save the files of these kernels, and shut them down; the process does not exit before."""
        async with asyncio.TaskGroup() as tasks:
            for kernel_id in kernel_ids:
                provisioner = self._kernels.provisioner(kernel_id)
                if provisioner is not None:
                    if provisioner.kernel is not None:
                        process_exit.own(provisioner.kernel)
                    tasks.create_task(self._end_one(kernel_id))

    async def _end_one(self, kernel_id: str) -> None:
        try:
            await self._manager.shutdown_kernel(kernel_id)
        except Exception as error:  # noqa: BLE001  (the other kernels must end, too)
            self._log.error("Kernel %s could not be shut down: %s", kernel_id, error)

    async def choose(
        self, kernel_ids: Iterable[str], most: int, most_mib: int
    ) -> tuple[list[str], list[str]]:
        """Which kernels wait for the next server, and which end now: those that have run nothing
        and, beyond the bounds on their number and memory, those that have been idle for longest.
        Sandboxes that earlier servers left end first."""
        found = [one for one in kernel_ids if self._kernels.provisioner(one) is not None]
        ending = [one for one in found if one not in self._used]
        waiting = sorted((one for one in found if one in self._used), key=self._activity)
        earlier = all_left(backend_names())
        theirs = await asyncio.gather(*map(self._memory, earlier))
        kernels = [self._kernels.kernel(one) for one in waiting]
        handles = [None if kernel is None else kernel.handle for kernel in kernels]
        ours = await asyncio.gather(*map(self._memory, handles))
        count, memory = len(earlier) + len(waiting), sum(theirs) + sum(ours)

        def too_much() -> bool:
            return count > most or memory > most_mib

        for record, size in zip(earlier, theirs, strict=True):
            if too_much() and await self._end_left(record):
                count, memory = count - 1, memory - size
        for size in ours:
            if too_much():
                ending.append(waiting.pop(0))
                count, memory = count - 1, memory - size
                self._log.warning(
                    "Kernel %s does not wait for the next server: %d kernels and %d MiB may "
                    "(SandboxServer.max_left, max_left_mib), and it has been idle for longest.",
                    *(ending[-1], most, most_mib),
                )
        return waiting, ending

    def _activity(self, kernel_id: str) -> tuple[bool, float]:
        """Whether a kernel is busy, and when it last was."""
        manager = self._manager.get_kernel(kernel_id)
        busy = getattr(manager, "execution_state", "") == "busy"
        return busy, manager.last_activity.timestamp()

    async def _memory(self, sandbox: Record | SandboxHandle | None) -> int:
        """How much of this machine's memory a sandbox uses, in MiB."""
        if sandbox is None:
            return 0
        try:
            async with asyncio.timeout(_INFO_TIMEOUT):
                return await run(_measure_memory(sandbox.backend, sandbox.name))
        except (SandboxError, OSError) as error:
            self._log.warning("Sandbox %s does not say its memory: %s", sandbox.name, error)
            return 0

    async def _end_left(self, record: Record) -> bool:
        """Whether that could be done."""
        self._log.warning(
            "Sandbox %s, which an earlier server left, ends, its files saved: more sandboxes wait "
            "than SandboxServer.max_left and max_left_mib allow.",
            record.name,
        )
        try:
            await run(teardown.end_left(record, self._log))
        except (SandboxError, OSError) as error:
            self._log.warning("Sandbox %s could not be ended: %s", record.name, error)
            return False
        return True

    async def leave(self, kernel_ids: Iterable[str], *, pause: bool) -> None:
        """Let these kernels wait for the next server, paused where that is wanted and possible."""
        async with asyncio.TaskGroup() as tasks:
            for kernel_id in kernel_ids:
                provisioner = self._kernels.provisioner(kernel_id)
                if provisioner is not None:
                    tasks.create_task(self._leave_one(kernel_id, provisioner, pause=pause))

    async def _leave_one(
        self, kernel_id: str, provisioner: SandboxProvisioner, *, pause: bool
    ) -> None:
        self._manager.get_kernel(kernel_id).stop_restarter()
        name = provisioner.sandbox_name
        hours = provisioner.kernel.handle.spec.lease_seconds / 3600 if provisioner.kernel else 0
        try:
            await self._save_and_pause(kernel_id, provisioner, pause=pause)
            await provisioner.detach()
        except Exception as error:  # noqa: BLE001  (the other kernels must be left in order, too)
            text = "Kernel %s, in sandbox %s, is left as it is: %s"
            self._log.warning(text, kernel_id, name, error)
        self._manager.stop_watching_activity(kernel_id)
        self._manager.remove_kernel(kernel_id)
        self._log.info(
            "Kernel %s goes on without the server, in sandbox %s: for %g h at most, or until a "
            "server for %s takes it over. `sandbox-kernel rm %s` ends it.",
            *(kernel_id, name, round(hours, 2), self._kernels.app.root_dir, name),
        )

    async def _save_and_pause(
        self, kernel_id: str, provisioner: SandboxProvisioner, *, pause: bool
    ) -> None:
        name = provisioner.sandbox_name
        if pause and not provisioner.paused:
            if provisioner.can_pause:
                await provisioner.pause()
            else:
                self._log.warning(
                    "Kernel %s, in sandbox %s, is left running: its backend cannot pause it.",
                    *(kernel_id, name),
                )
        if not provisioner.paused:
            await provisioner.save_or_tell()  # its lease may end before the next server comes
        elif provisioner.saved_workspace is not None and not provisioner.at_rest:
            self._log.warning(
                "The files of kernel %s are not saved; they are in its sandbox, %s, which is "
                "paused.",
                *(kernel_id, name),
            )


async def _measure_memory(backend: str, name: str) -> int:
    client = load_backend(backend)
    if client.capabilities.hosted:
        return 0
    usage = await (await client.get(name)).usage()
    return usage.memory // 2**20 if usage else 0
