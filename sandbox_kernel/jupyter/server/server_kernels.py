"""The kernels of a server that run in sandboxes: their files on disk, output, and notebooks."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jupyter_server.utils import ApiPath, to_os_path

from sandbox_kernel.jupyter.missing_file_hints import hint
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.kernel_start import in_lines
from sandbox_kernel.jupyter.server.missed_output import KernelOutput
from sandbox_kernel.jupyter.server.saved_kernels import SavedKernel
from sandbox_kernel.kernels import SandboxedKernel


def provisioner_of(manager: Any, kernel_id: str) -> SandboxProvisioner | None:
    """The provisioner of a MappingKernelManager's kernel; None unless it runs in a sandbox."""
    kernel = manager.get_kernel(kernel_id) if kernel_id in manager else None
    found = getattr(kernel, "provisioner", None)
    return found if isinstance(found, SandboxProvisioner) else None


class ServerKernels:
    """By kernel id. All of it runs on the server's loop."""

    def __init__(self, serverapp: Any, record_limit: int, log: logging.Logger) -> None:
        self.app = serverapp
        self.manager = serverapp.kernel_manager
        self.record_limit = record_limit
        """Bytes of output that each sandbox keeps for the next server."""
        self.log = log
        self._writing = asyncio.Lock()
        self.saved: dict[str, SavedKernel] = {}
        self.outputs: dict[str, KernelOutput] = {}

    def provisioner(self, kernel_id: str) -> SandboxProvisioner | None:
        return provisioner_of(self.manager, kernel_id)

    def kernel(self, kernel_id: str) -> SandboxedKernel | None:
        provisioner = self.provisioner(kernel_id)
        return provisioner.kernel if provisioner is not None else None

    async def add(self, saved: SavedKernel) -> KernelOutput:
        """A kernel runs now, for the first time or again."""
        kernel_id = saved.kernel_id
        self.saved[kernel_id] = saved
        try:
            await self._write(saved)
        except OSError as error:  # a full disk is no reason to refuse a kernel that runs
            text = "Kernel %s goes on, but the next server will not find it: %s"
            self.log.warning(text, kernel_id, error)
        if kernel_id not in self.outputs:
            self.outputs[kernel_id] = KernelOutput(self, kernel_id)
        return self.outputs[kernel_id]

    async def _write(self, saved: SavedKernel) -> None:
        async with self._writing:
            if self.saved.get(saved.kernel_id) is saved:  # else it has ended meanwhile
                await asyncio.to_thread(saved.save)

    async def remove(self, kernel_id: str) -> None:
        """A kernel has ended. Idempotent."""
        saved, output = self.saved.pop(kernel_id, None), self.outputs.pop(kernel_id, None)
        if output is not None:
            output.close()
        if saved is not None:
            async with self._writing:
                saved.forget()

    def close(self) -> None:
        for output in self.outputs.values():
            output.close()

    def say(self, kernel_id: str, text: str) -> None:
        """Show a text in the kernel's notebooks."""
        if kernel_id in self.outputs:
            self.outputs[kernel_id].notices.say(in_lines(text))

    def hint(self, kernel_id: str, error: Mapping[str, Any]) -> str:
        """What to say in a notebook after an error of a cell."""
        provisioner, paths = self.with_paths().get(kernel_id, (None, []))
        if provisioner is None or provisioner.kernel is None or not paths:
            return ""
        folder = os.path.dirname(self.on_host(paths[0]))
        handle, workspace = provisioner.kernel.handle, provisioner.saved_workspace
        shown = "the mount" if handle.spec.folder is not None else ""
        if workspace is not None and workspace.upload not in ("none", "", ()):
            shown = f"upload={workspace.upload!r}"
        return in_lines(hint(error, folder, handle.workdir, shown))

    def on_host(self, path: str) -> str:
        """A path of the contents service, as the host has it."""
        return os.path.abspath(to_os_path(ApiPath(path), self.app.root_dir)) if path else ""

    def with_paths(self) -> dict[str, tuple[SandboxProvisioner, list[str]]]:
        """The running kernels, each with the paths of its sessions."""
        return {
            kernel_id: (provisioner, [str(s["path"]).strip("/") for s in saved.sessions])
            for kernel_id, saved in self.saved.items()
            if (provisioner := self.provisioner(kernel_id)) is not None
        }

    async def save_workspace(self, kernel_id: str) -> None:
        """A kernel's files are saved in another workspace from now on."""
        saved, provisioner = self.saved[kernel_id], self.provisioner(kernel_id)
        workspace = provisioner.saved_workspace if provisioner is not None else None
        saved.provisioner["saved_workspace"] = asdict(workspace) if workspace else None
        await self._write(saved)

    async def save_sessions(self, sessions: list[dict[str, Any]]) -> None:
        """The server has these sessions now, which it keeps in memory only."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for model in sessions:
            row = {key: model[key] for key in ("path", "name", "type")}
            rows.setdefault(model["kernel"]["id"], []).append({"session_id": model["id"], **row})
        for kernel_id, saved in list(self.saved.items()):
            found = rows.get(kernel_id, [])
            if found != saved.sessions:
                saved.sessions = found
                try:
                    await self._write(saved)
                except OSError as error:
                    text = "The next server will not find the session of kernel %s: %s"
                    self.log.warning(text, kernel_id, error)
