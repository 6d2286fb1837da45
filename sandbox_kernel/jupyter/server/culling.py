"""Culling: an idle kernel is paused, where its backend can, and not ended."""

from __future__ import annotations

import logging
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner


class PausingCuller:
    """Stands between a MappingKernelManager's culler and the shutdown that it asks for. The
    manager decides when a kernel is idle; a paused one goes on when a client connects."""

    def __init__(self, manager: Any, log: logging.Logger) -> None:
        self._manager = manager
        self._log = log
        self._culling: set[str] = set()
        self._cull = manager.cull_kernel_if_idle
        self._shutdown = manager.shutdown_kernel
        manager.cull_kernel_if_idle = self.cull_kernel_if_idle
        manager.shutdown_kernel = self.shutdown_kernel

    async def cull_kernel_if_idle(self, kernel_id: str) -> None:
        provisioner = self._provisioner(kernel_id)
        if provisioner is not None and provisioner.paused:
            return
        self._culling.add(kernel_id)
        try:
            await self._cull(kernel_id)
        finally:
            self._culling.discard(kernel_id)

    async def shutdown_kernel(self, kernel_id: str, *args: Any, **kwargs: Any) -> Any:
        provisioner = self._provisioner(kernel_id)
        if kernel_id in self._culling and provisioner is not None and provisioner.can_pause:
            try:
                paused = await provisioner.pause()
            except SandboxError as error:
                self._log.warning("Kernel %s could not be paused: %s", kernel_id, error)
            else:
                if paused:
                    self._log.info("Kernel %s is idle, and was paused", kernel_id)
                return None
        return await self._shutdown(kernel_id, *args, **kwargs)

    def _provisioner(self, kernel_id: str) -> SandboxProvisioner | None:
        manager = self._manager._kernels.get(kernel_id)
        found = getattr(manager, "provisioner", None)
        return found if isinstance(found, SandboxProvisioner) else None
