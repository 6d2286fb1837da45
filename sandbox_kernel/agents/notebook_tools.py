"""What a notebook can do besides running cells: files, saves, packages, variables, copies.

A part of ``Notebook``. The sandbox's surface is used on the background loop, and the kernel is not
needed for files: they can be read and saved while a cell runs.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import secrets
from dataclasses import replace

from sandbox_kernel.agents.changed_files import ChangedFiles
from sandbox_kernel.agents.files import (
    MOST_BYTES,
    MOST_COPIED,
    AnyPath,
    Copied,
    FileInfo,
    Listing,
    SandboxFiles,
)
from sandbox_kernel.agents.install import install_advice, install_cell
from sandbox_kernel.agents.job_state import JobState
from sandbox_kernel.agents.jobs import Job
from sandbox_kernel.agents.notebook_session import NotebookSession
from sandbox_kernel.agents.result import ChangedFile, Result
from sandbox_kernel.agents.variables import Variable, check_language, request, variables_of
from sandbox_kernel.errors import KernelError, SandboxError, SandboxTimeout, WorkspaceError
from sandbox_kernel.jupyter.kernel_workspace import open_store
from sandbox_kernel.spec import check_name
from sandbox_kernel.tunnel.background import aside, run
from sandbox_kernel.workspace import hydrate, persist
from sandbox_kernel.workspace.reports import Quota

log = logging.getLogger("sandbox_kernel")

_ANSWER = 30.0


class NotebookTools:
    """Its methods need the notebook's session."""

    _session: NotebookSession
    _watched: ChangedFiles | None = None

    def _checked(self) -> NotebookSession:
        raise NotImplementedError

    # --- files

    @property
    def _files(self) -> SandboxFiles:
        return SandboxFiles(self._checked().kernel.sandboxed.handle)

    async def read(self, path: AnyPath, *, max_bytes: int = MOST_BYTES) -> bytes:
        """A file of the workspace. FileMissing; QuotaExceeded if it has more bytes."""
        return await run(self._files.read(path, max_bytes=max_bytes))

    async def write(self, path: AnyPath, data: bytes | str) -> None:
        """Write a file of the workspace at once or not at all, with the folders above it."""
        await run(self._files.write(path, data))

    async def list(self, path: AnyPath = ".") -> builtins.list[FileInfo]:
        """The entries of a folder of the workspace by name, or a file's own."""
        return await run(self._files.list(path))

    async def listing(self, path: AnyPath = ".", most: int = 1000) -> Listing:
        """At most so many entries of a folder by name, and how many more there are."""
        return await run(self._files.listing(path, most))

    async def upload(
        self, source: AnyPath, path: AnyPath = ".", *, quota: Quota = MOST_COPIED
    ) -> int:
        """Copy a file or folder of this host into the workspace; into an existing folder, under
        its own name. The number of files. QuotaExceeded if there is more than ``quota``."""
        return await run(self._files.upload(source, path, quota=quota))

    async def download(
        self,
        path: AnyPath,
        target: AnyPath = ".",
        *,
        force: bool = False,
        hidden: bool = False,
        quota: Quota = MOST_COPIED,
    ) -> Copied:
        """Copy a file or folder of the workspace to this host; into an existing folder, under its
        own name. ``force`` replaces a file; without ``hidden``, names with a dot are left out."""
        copying = self._files.download(path, target, force=force, hidden=hidden, quota=quota)
        return await run(copying)

    async def changed_files(self) -> builtins.list[ChangedFile]:
        """What has changed in the workspace since this was asked last; nothing at first."""
        handle = self._checked().kernel.sandboxed.handle
        if self._watched is None or self._watched.handle is not handle:
            await self._stop_watching()  # a restart may have made a new sandbox
            self._watched = ChangedFiles(handle)
        return await run(self._watched.look())

    async def _changes(self) -> builtins.list[ChangedFile]:
        """The same for a cell, which does not fail because of it."""
        try:
            return await self.changed_files()
        except SandboxError as error:
            log.warning("%s", error)
            return []

    async def _stop_watching(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            await run(watched.close())

    # --- saves

    async def persist(self, workspace: str | None = None) -> str:
        """Save the files of the workspace, under this name or as the notebook's own. The id of the
        save, for ``restore``. WorkspaceError if the notebook has no saved workspace."""
        session = self._checked()
        provisioner = session.kernel.provisioner
        if workspace is None:
            self._own_workspace(session)
            return (await provisioner.save()).save.id
        check_name(workspace, "A workspace name")
        store, kernel = await aside(open_store), session.kernel.sandboxed
        path, name = session.live.path, session.live.kernel_name
        report = await persist(kernel, store, workspace, notebook=path, kernel=name)
        return report.save.id

    async def restore(self, workspace: str | None = None, at: str | None = None) -> int:
        """Bring the latest save of a workspace, or the one with this id, into the sandbox: files
        that are not in it are deleted, variables stay. The number of files."""
        session = self._checked()
        name = workspace if workspace is not None else self._own_workspace(session)
        check_name(name, "A workspace name")
        store = await aside(open_store)
        report = await hydrate(session.kernel.sandboxed, store, name, at=at or "")
        if report.save is None:
            raise WorkspaceError(
                f"Nothing was brought into sandbox {session.queue.sandbox!r}: the workspace "
                f"{name!r} has no save. `sandbox-kernel workspace ls` lists those that have."
            )
        return report.files

    @staticmethod
    def _own_workspace(session: NotebookSession) -> str:
        own = session.kernel.provisioner.saved_workspace
        if own is None:
            raise WorkspaceError(
                f"The notebook in sandbox {session.queue.sandbox!r} has no saved workspace: it has "
                f"no path, or persist is off. Name a workspace."
            )
        return own.name

    # --- the interpreter

    async def install(self, *packages: str, timeout: float | None = None) -> Result:
        """Install packages with pip, as a cell of the notebook. Each is a name with perhaps extras
        and versions, or the path of a wheel in the workspace. The sandbox needs a way to the index
        (``egress=["@pip"]``), and the result says so if that is missing (``why``)."""
        session = self._checked()
        handle = session.kernel.sandboxed.handle
        result = await self._run(install_cell(packages, handle.workdir), timeout)
        if result.status != "error":
            return result
        return replace(result, why=install_advice(result.text) or result.why)

    async def _run(self, code: str, timeout: float | None) -> Result:
        raise NotImplementedError

    async def variables(self, *, timeout: float | None = _ANSWER) -> builtins.list[Variable]:
        """The user's variables by name, after the cells that were given before. None of their code
        is run. SandboxTimeout if the kernel is busy for longer; Unsupported for other languages
        than Python."""
        session = self._checked()
        name = session.live.kernel_name
        check_language(str(session.kernel.kernelspec.get("language", "")), name)
        asked = request()
        state = JobState(
            id=secrets.token_hex(16),
            code=asked["code"],
            cell_id="",
            silent=True,
            allow_input=False,
            expressions=asked["user_expressions"],
        )
        job: Job = session.queue.add(state)
        try:
            result = await job.wait(timeout)
        except SandboxTimeout:
            await session.queue.stop(job, "it took too long", None)
            raise SandboxTimeout(
                f"The variables in sandbox {session.queue.sandbox!r} were not listed within "
                f"{timeout:g} s: the kernel is busy. Wait for its jobs, or interrupt it."
            ) from None
        except asyncio.CancelledError:
            session.queue.stop_soon(job, "its caller has left")
            raise
        if state.reply is None:
            raise KernelError(
                f"The variables in sandbox {session.queue.sandbox!r} were not listed: "
                f"{result.why or result.status}."
            )
        return variables_of(state.reply, name)[0]

    # --- copies

    async def checkpoint(self, name: str) -> None:
        """Keep the sandbox's present state under a name, with the memory of its processes where
        the backend can. Unsupported, or SandboxExists if the name is taken."""
        await run(self._checked().kernel.sandboxed.handle.snapshot(name))
