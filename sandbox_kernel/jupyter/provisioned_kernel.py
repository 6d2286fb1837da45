"""The part of the provisioner that the Jupyter Server extension uses: files and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import default

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter import kernel_workspace, process_exit, teardown
from sandbox_kernel.jupyter.death_message import visible_log
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.sandboxes import unsaved_files
from sandbox_kernel.tunnel.background import run

if TYPE_CHECKING:
    from sandbox_kernel.workspace import SaveReport


async def call(function: Callable[[], None]) -> None:
    """For ``run``: call a plain function on the background loop."""
    function()


class ProvisionedKernel(KernelProvisionerBase):
    """A kernel in a sandbox whose files are saved, once it has been launched."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._kernel: SandboxedKernel | None = None
        self.saved_workspace: kernel_workspace.KernelWorkspace | None = None
        """Where the kernel's files are saved, once it has been launched; None: nowhere."""
        self._unsaved = ""
        """Why the files are not saved, if the last save before a pause or a shutdown failed."""
        self.notices: list[str] = []
        """Texts for the user; whoever shows them takes them from here."""
        self._has_process = False
        self._has_run = False
        """A kernel was launched, also if it could not be restarted since."""

    @property
    def sandbox_name(self) -> str | None:
        """Name of the sandbox, once there is one."""
        return self._kernel.handle.name if self._kernel else None

    @property
    def kernel(self) -> SandboxedKernel | None:
        """The kernel with its sandbox, once there is one. Its coroutines are for the background
        loop."""
        return self._kernel

    @property
    def death(self) -> str:
        """Why the kernel ended, in words; empty while it runs."""
        return self._kernel.death if self._kernel else ""

    @property
    def _kernel_name(self) -> str:
        return str(getattr(self.parent, "kernel_name", ""))

    @default("log")
    def _visible_log(self) -> Log:
        return visible_log(self._log_default())

    # --- files

    async def save(self, *, wake: bool = True) -> SaveReport:
        """Save the kernel's files in its workspace now. SandboxPaused if it is paused and is not
        to be woken for that."""
        if self._kernel is None or self.saved_workspace is None:
            raise SandboxError(f"Kernel {self.kernel_id} does not run, or has no workspace.")
        report = await kernel_workspace.save(
            self._kernel, self.saved_workspace, self._kernel_name, wake=wake
        )
        self._unsaved = ""
        return report

    async def save_or_tell(self) -> bool:
        """Save the kernel's files if it has a workspace, and log a failure. Whether they are saved.
        On any loop."""
        if self._kernel is None or self.saved_workspace is None:
            return False
        self._unsaved = await kernel_workspace.last_save(
            self._kernel, self.saved_workspace, self._kernel_name
        )
        return not self._unsaved

    async def note_files(self, notebook: str) -> None:
        """Write to the sandbox's record which notebook it belongs to now, if any, and where its
        files are saved. On any loop."""
        if self._kernel is not None:
            handle, facts = self._kernel.handle, {"notebook": notebook} if notebook else {}
            facts |= teardown.facts_of(handle, self.saved_workspace, self._kernel_name)
            if facts:
                await run(self._kernel.note(**facts))

    # --- pausing

    @property
    def can_pause(self) -> bool:
        return self._kernel is not None and self._kernel.client.capabilities.pause

    @property
    def paused(self) -> bool:
        return self._kernel is not None and self._kernel.tunnel.paused

    @property
    def at_rest(self) -> bool:
        """Paused by this process, after its files were saved."""
        return self._kernel is not None and self._kernel.at_rest

    async def pause(self) -> bool:
        """Freeze the sandbox with the kernel in it, until ``resume``, or until a client sends
        something; its files are saved first. False if a client sent something meanwhile: then it
        goes on. For backends that can."""
        return self._kernel is not None and await run(self._kernel.pause())

    async def resume(self) -> None:
        """Let a kernel that was paused go on. No error if it was not."""
        if self._kernel is not None:
            await run(call(self._kernel.resume))

    async def detach(self) -> None:
        """Leave sandbox and kernel running for ``load_provisioner_info`` in another process."""
        kernel, self._kernel = self._kernel, None
        self._has_process = self._has_run = False
        if kernel is not None:
            process_exit.disown(kernel)
            await run(kernel.detach())
            workspace, reason = self.saved_workspace, self._unsaved
            if reason and workspace is not None:
                name = self._kernel_name
                note = teardown.make_note(kernel.handle, workspace, name, reason, kept=False)
                await run(asyncio.to_thread(unsaved_files.note, note))
