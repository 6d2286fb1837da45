"""Which kernels of a server somebody has used: only those wait for the next server."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from jupyter_server.utils import ensure_async

from sandbox_kernel.jupyter.envelopes import open_envelope
from sandbox_kernel.jupyter.jupyter_internals import ServerInternals
from sandbox_kernel.jupyter.server.server_kernels import ServerKernels


class UsedKernels:
    """Listens to what the server hears of its kernels. The server's own ``last_activity`` does not
    help: messages that a kernel sends at its start change it, too."""

    def __init__(self, kernels: ServerKernels, internals: ServerInternals) -> None:
        self._kernels = kernels
        self._manager = kernels.manager
        self._internals = internals
        self._used: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        """By the kernel's manager."""

    def watch(self, start_watching: Any, kernel_id: str) -> None:
        """Around ``MappingKernelManager.start_watching_activity``. Also called after restarts."""
        start_watching(kernel_id)
        if self._kernels.provisioner(kernel_id) is None:
            return
        manager = self._manager.get_kernel(kernel_id)
        if manager not in self._used:
            manager.add_restart_callback(partial(self._given_up, manager), "dead")
        heard = self._internals.hear_kernel(manager, partial(self._hear, manager))
        self._used[manager] = self._used.get(manager, False) or not heard

    def _hear(self, manager: Any, frames: list[bytes]) -> None:
        self._used[manager] = self._used[manager] or self._answers_a_user(frames)

    def _answers_a_user(self, frames: list[bytes]) -> bool:
        """Whether somebody used the kernel. A hostile kernel can only make itself look used."""
        envelope = open_envelope(frames)
        if envelope is None or "msg_type" not in envelope.parent:
            return False
        return bool(self._manager.track_message_type(envelope.parent_kind))

    def add(self, kernel_id: str) -> None:
        """A kernel that was adopted has been used."""
        self._used[self._manager.get_kernel(kernel_id)] = True

    def __contains__(self, kernel_id: str) -> bool:
        """Whether a kernel has run a cell, as far as is known."""
        if kernel_id not in self._manager:
            return True
        return self._used.get(self._manager.get_kernel(kernel_id), True)

    def _given_up(self, manager: Any) -> None:
        """The server could not restart a kernel and forgets it; only we end its sandbox."""

        async def end_sandbox() -> None:
            await ensure_async(manager.cleanup_resources())

        self._kernels.app.io_loop.add_callback(end_sandbox)
