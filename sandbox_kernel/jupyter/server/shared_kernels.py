"""Kernels of notebooks that a program has open: the server is one more client of them.

The program keeps the sandbox, so nothing that its cells put out is lost to it, and people see the
same kernel: their cells run between its cells. They can interrupt it; only the program can restart
or end it. When the program ends, or lets go of the notebook, the server takes the kernel over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.jupyter_internals import (
    never_shut_down,
    set_protocol_version,
    shut_down_again,
    use_kernelspec,
)
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.adoption import Adopter
from sandbox_kernel.live_notebooks import LiveNotebook
from sandbox_kernel.tunnel.background import run
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks

_LOOK = 1.0
"""Seconds between two looks whether the program still has the notebook."""
_PROTOCOL = "5.3"


class SharedKernel(SandboxProvisioner):
    """Stands for the kernel of another process, which alone signals it and watches it."""

    @property
    def has_process(self) -> bool:
        return True

    async def poll(self) -> int | None:
        return None


class SharedKernels:
    """``taken`` hears the id of each kernel that has become the server's own."""

    def __init__(
        self, adopter: Adopter, taken: Callable[[str], object], log: logging.Logger
    ) -> None:
        self._adopter = adopter
        self._manager = adopter.kernels.manager
        self._taken = taken
        self._log = log
        self._watching = OwnedTasks()

    async def share(self, live: LiveNotebook) -> None:
        """Have a kernel under its id whose sandbox another process has."""
        saved, multi = self._adopter.saved_of(live), self._manager
        manager, _, kernel_id = multi.pre_start_kernel(
            saved.kernel_name, {"kernel_id": saved.kernel_id}
        )
        manager.kernel_id = kernel_id
        # Only its owner could send a signal; ipykernel also takes a message.
        use_kernelspec(manager, {**live.kernelspec, "interrupt_mode": "message"})
        never_shut_down(manager)
        shared = SharedKernel(kernel_id=kernel_id, kernel_spec=manager.kernel_spec, parent=manager)
        try:
            await self._adopter.enter(manager, shared, saved)
        except BaseException:
            manager.stop_restarter()
            multi.remove_kernel(kernel_id)
            raise
        manager.execution_state = await asyncio.to_thread(_state, live)
        # Asking would take until the cell that runs has ended.
        set_protocol_version(manager, live.kernelspec.get("kernel_protocol_version") or _PROTOCOL)
        self._watching.start(self._watch(live, manager))

    async def restart(self, usual: Any, kernel_id: str, *args: Any, **kwargs: Any) -> Any:
        """Around ``MappingKernelManager.restart_kernel``."""
        manager = self._manager.get_kernel(kernel_id) if kernel_id in self._manager else None
        if manager is not None and isinstance(manager.provisioner, SharedKernel):
            why = (
                "The kernel was not restarted: a program has this notebook open, and only that "
                "program can restart it. Interrupt it, or end the program first."
            )
            self._log.warning("%s", why)  # the answer to the request does not say it
            raise SandboxError(why)
        return await usual(kernel_id, *args, **kwargs)

    async def close(self) -> None:
        """The server stops. The kernels are not its own, so they go on."""
        await self._watching.cancel()

    async def _watch(self, live: LiveNotebook, manager: Any) -> None:
        """Until the kernel is the server's, or no kernel of the server any more."""
        multi, kernel_id = self._manager, live.kernel_id
        while kernel_id in multi and multi.get_kernel(kernel_id) is manager:
            if await asyncio.to_thread(lambda: live.owner) is None:
                return await self._take_or_drop(live, manager)
            await asyncio.sleep(_LOOK)

    async def _take_or_drop(self, live: LiveNotebook, manager: Any) -> None:
        try:
            if await asyncio.to_thread(live.record) is not None:
                async with asyncio.timeout(self._adopter.timeout):
                    return await self._take(live, manager)
            why = "its program has closed it"
        except (SandboxError, OSError, TimeoutError) as error:
            why = str(error) or "its sandbox did not answer"
        self._log.warning("Kernel %s of %s has ended: %s", live.kernel_id, live.path, why)
        manager.execution_state = "dead"
        manager.stop_restarter()
        self._manager.remove_kernel(live.kernel_id)

    async def _take(self, live: LiveNotebook, manager: Any) -> None:
        """From now on it is a kernel of this server like any other."""
        app, kernels = self._adopter.kernels.app, self._adopter.kernels
        provisioner = SandboxProvisioner(
            kernel_id=live.kernel_id,
            kernel_spec=manager.kernel_spec,
            parent=manager,
            **live.kernelspec["metadata"]["kernel_provisioner"].get("config", {}),
        )
        await provisioner.load_provisioner_info(live.provisioner)
        manager.provisioner = provisioner
        shut_down_again(manager)
        assert provisioner.kernel is not None
        await run(provisioner.kernel.record(kernels.record_limit))
        await kernels.add(self._adopter.saved_of(live))
        await kernels.save_sessions(await app.session_manager.list_sessions())
        self._adopter.egress.watch(live.kernel_id, provisioner)
        self._taken(live.kernel_id)
        self._log.info("Took over kernel %s of %s", live.kernel_id, live.path)


def _state(live: LiveNotebook) -> str:
    """Whether the program has a cell in the kernel, as its journal says. Blocks."""
    running: set[str] = set()
    for line in live.journal().read():
        if "sent" in line:
            running.add(str(line["sent"]))
        elif "end" in line:
            running.discard(str(line["end"]))
    return "busy" if running else "idle"
