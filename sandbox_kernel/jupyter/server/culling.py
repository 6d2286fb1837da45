"""Culling pauses the sandbox of an idle kernel, where the backend can, instead of ending it."""

from __future__ import annotations

import logging
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.server.server_kernels import provisioner_of


class PausingCuller:
    """Stands between a MappingKernelManager's culler and the shutdown that it asks for: ``cull``
    goes around ``cull_kernel_if_idle``, ``shut_down`` around ``shutdown_kernel``. The manager
    decides when a kernel is idle; a paused kernel goes on when a client connects."""

    def __init__(self, manager: Any, log: logging.Logger) -> None:
        self._manager = manager
        self._log = log
        self._culling: set[str] = set()

    async def cull(self, cull: Any, kernel_id: str) -> None:
        provisioner = provisioner_of(self._manager, kernel_id)
        if provisioner is not None and provisioner.paused:
            return
        self._culling.add(kernel_id)
        try:
            await cull(kernel_id)
        finally:
            self._culling.discard(kernel_id)

    async def shut_down(self, shut_down: Any, kernel_id: str, *args: Any, **kwargs: Any) -> Any:
        provisioner = provisioner_of(self._manager, kernel_id)
        if kernel_id in self._culling and provisioner is not None and provisioner.can_pause:
            try:
                paused = await provisioner.pause()
            except SandboxError as error:
                self._log.warning("Kernel %s could not be paused: %s", kernel_id, error)
            else:
                if paused:
                    self._log.info("Kernel %s is idle and was paused.", kernel_id)
                return None
        return await shut_down(kernel_id, *args, **kwargs)
