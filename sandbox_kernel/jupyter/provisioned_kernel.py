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
        self.kernel: SandboxedKernel | None = None
        """With its sandbox, once there is one. Its coroutines need the background loop."""
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
        return self.kernel.handle.name if self.kernel else None

    @property
    def death(self) -> str:
        """Why the kernel ended, in words; empty while it runs."""
        return self.kernel.death if self.kernel else ""

    @property
    def _kernel_name(self) -> str:
        return str(getattr(self.parent, "kernel_name", ""))

    @default("log")
    def _visible_log(self) -> Log:
        return visible_log(self._log_default())

    # --- files

    async def save(self, *, wake: bool = True) -> SaveReport:
        """Save the kernel's files in its workspace now. SandboxPaused if that needs a ``wake``."""
        if self.kernel is None or self.saved_workspace is None:
            raise SandboxError(f"Kernel {self.kernel_id} does not run, or has no workspace.")
        report = await kernel_workspace.save(self.kernel, self.saved_workspace, wake=wake)
        self._unsaved = ""
        return report

    async def save_or_tell(self) -> bool:
        """Save the kernel's files if it has a workspace, or log why not. Whether they are saved."""
        if self.kernel is None or self.saved_workspace is None:
            return False
        self._unsaved = await kernel_workspace.last_save(self.kernel, self.saved_workspace)
        return not self._unsaved

    async def note_files(self, notebook: str) -> None:
        """Write to the sandbox's record which notebook it has, if any, and where its files go."""
        if self.kernel is not None:
            handle, facts = self.kernel.handle, {"notebook": notebook} if notebook else {}
            self.kernel.belongs_to(notebook)
            facts |= teardown.facts_of(handle, self.saved_workspace)
            if facts:
                await run(self.kernel.note(**facts))

    # --- pausing

    @property
    def can_pause(self) -> bool:
        return self.kernel is not None and self.kernel.client.capabilities.pause

    @property
    def paused(self) -> bool:
        return self.kernel is not None and self.kernel.tunnel.paused

    @property
    def at_rest(self) -> bool:
        """Paused by this process, after its files were saved."""
        return self.kernel is not None and self.kernel.at_rest

    async def pause(self) -> bool:
        """Save the kernel's files, then freeze its sandbox until ``resume``, or until a client
        sends something. False if one sent something meanwhile. For backends that can."""
        return self.kernel is not None and await run(self.kernel.pause())

    async def resume(self) -> None:
        """Let a kernel that was paused go on. No error if it was not."""
        if self.kernel is not None:
            await run(call(self.kernel.resume))

    async def detach(self) -> None:
        """Leave sandbox and kernel running for ``load_provisioner_info`` in another process."""
        kernel, self.kernel = self.kernel, None
        self._has_process = self._has_run = False
        if kernel is not None:
            process_exit.disown(kernel)
            await run(kernel.detach())
            workspace, reason = self.saved_workspace, self._unsaved
            if reason and workspace is not None:
                note = teardown.make_note(kernel.handle, workspace, reason, kept=False)
                await run(asyncio.to_thread(unsaved_files.note, note))
