"""What a notebook can do besides running cells: files, saves, packages, variables, copies.

A part of ``Notebook``. The sandbox's surface is used on the background loop, and the kernel is not
needed for files: they can be read and saved while a cell runs.
"""

from __future__ import annotations

import builtins
import os
import secrets
from dataclasses import replace

from sandbox_kernel.agents.changed_files import ChangedFiles
from sandbox_kernel.agents.files import MOST_BYTES, Copied, FileInfo, SandboxFiles
from sandbox_kernel.agents.install import install_advice, install_cell
from sandbox_kernel.agents.job_state import JobState
from sandbox_kernel.agents.jobs import Job
from sandbox_kernel.agents.notebook_session import NotebookSession
from sandbox_kernel.agents.result import ChangedFile, Result
from sandbox_kernel.agents.variables import Variable, check_language, request, variables_of
from sandbox_kernel.errors import KernelError, SandboxTimeout, WorkspaceError
from sandbox_kernel.jupyter.kernel_workspace import open_store
from sandbox_kernel.spec import check_name
from sandbox_kernel.tunnel.background import aside, run
from sandbox_kernel.workspace import hydrate, persist

AnyPath = str | os.PathLike[str]
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

    async def upload(self, source: AnyPath, path: AnyPath = ".") -> int:
        """Copy a file or folder of this host into the workspace. The number of files."""
        return await run(self._files.upload(source, path))

    async def download(
        self, path: AnyPath, target: AnyPath = ".", *, force: bool = False, hidden: bool = False
    ) -> Copied:
        """Copy a file or folder of the workspace to this host. ``force`` replaces a file;
        without ``hidden``, names with a dot are left out."""
        return await run(self._files.download(path, target, force=force, hidden=hidden))

    async def _changed_files(self) -> builtins.list[ChangedFile]:
        """What has changed in the workspace since the last look; nothing at the first one."""
        if self._watched is None:
            self._watched = ChangedFiles(self._checked().kernel.sandboxed.handle)
        return await run(self._watched.look())

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
        advice = install_advice(result.text, without_egress=not handle.spec.egress)
        return replace(result, why=advice or result.why)

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
        except BaseException as error:
            session.queue.stop_soon(job, "its caller has left")
            if isinstance(error, SandboxTimeout):
                raise SandboxTimeout(
                    f"The variables in sandbox {session.queue.sandbox!r} were not listed within "
                    f"{timeout:g} s: the kernel is busy. Wait for its jobs, or interrupt it."
                ) from None
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
