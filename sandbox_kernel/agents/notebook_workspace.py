"""What a Notebook does with its sandbox beside running cells: files, packages, variables.

``Notebook`` inherits it. The sandbox's handle lives on the background loop, and is called there.
"""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

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
from sandbox_kernel.agents.result import ChangedFile, Result
from sandbox_kernel.agents.variables import Variable, check_language, request, variables_of
from sandbox_kernel.errors import KernelError, SandboxError, SandboxTimeout
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.tunnel import background
from sandbox_kernel.workspace.reports import Quota

if TYPE_CHECKING:
    from sandbox_kernel.agents.notebook_session import NotebookSession

Changes = list[ChangedFile]
Variables = list[Variable]
log = logging.getLogger("sandbox_kernel")

ANSWER_TIMEOUT = 30.0
"""Seconds that a kernel has to list its variables, the cells before included."""


class NotebookWorkspace(ABC):
    """Paths are relative to the workspace, or absolute and below it; see ``agents/files.py``."""

    sandbox: str
    _watch: tuple[SandboxHandle, ChangedFiles] | None = None

    @abstractmethod
    def _checked(self) -> NotebookSession:
        """The session, for a call that needs it. SandboxError."""

    @abstractmethod
    async def run(self, code: str, *, timeout: float | None = None) -> Result: ...

    # --- files

    async def read(self, path: AnyPath, *, max_bytes: int = MOST_BYTES) -> bytes:
        """A file's contents. FileMissing; QuotaExceeded if it has more than ``max_bytes``."""
        return await background.run(self._files().read(path, max_bytes=max_bytes))

    async def write(self, path: AnyPath, data: bytes | str) -> None:
        """Write a file at once or not at all, and the folders above it that are missing."""
        await background.run(self._files().write(path, data))

    async def list(self, path: AnyPath = ".") -> list[FileInfo]:
        """A folder's entries by name, or a file's own. QuotaExceeded if there are very many."""
        return await background.run(self._files().list(path))

    async def listing(self, path: AnyPath = ".", most: int = 1000) -> Listing:
        """At most so many of a folder's entries by name, and how many more there are."""
        return await background.run(self._files().listing(path, most))

    async def upload(
        self, source: AnyPath, path: AnyPath = ".", *, quota: Quota = MOST_COPIED
    ) -> int:
        """Copy a file or folder of this host into the workspace. A copy into an existing folder
        keeps its own name there. The number of files."""
        return await background.run(self._files().upload(source, path, quota=quota))

    async def download(
        self,
        path: AnyPath,
        target: AnyPath = ".",
        *,
        force: bool = False,
        hidden: bool = False,
        quota: Quota = MOST_COPIED,
    ) -> Copied:
        """Copy a file or folder of the workspace to this host, where it appears when it is
        complete. ``force`` replaces a file; ``hidden`` copies names that begin with a dot, too."""
        files = self._files()
        return await background.run(
            files.download(path, target, force=force, hidden=hidden, quota=quota)
        )

    async def changed_files(self) -> Changes:
        """What has changed in the workspace since this was asked last, by path; nothing at first.
        ``run(files=True)`` asks it for a cell."""
        return await background.run(self._watching().look())

    # --- packages and variables

    async def install(self, *packages: str, timeout: float | None = None) -> Result:
        """Install packages with pip, in a cell: names with perhaps extras and versions, or wheels
        in the workspace. SpecError for anything else. If it fails, ``why`` is what to do."""
        session = self._checked()
        workdir = session.kernel.sandboxed.handle.workdir
        result = await self.run(install_cell(packages, workdir), timeout=timeout)
        if result.status != "error":
            return result
        return replace(result, why=install_advice(result.text))

    async def variables(self, *, timeout: float = ANSWER_TIMEOUT) -> Variables:
        """At most 500 of a Python kernel's variables, by name, when the cells before have ended.
        No code of their classes is run. Unsupported for other languages; SandboxTimeout."""
        session = self._checked()
        kernelspec = session.kernel.kernelspec
        check_language(str(kernelspec.get("language", "")), session.live.kernel_name)
        state = JobState(
            id=secrets.token_hex(16),
            code="",
            cell_id="",
            silent=True,
            store=False,
            allow_input=False,
            expressions=request()["user_expressions"],
        )
        job = session.queue.add(state)
        try:
            await job.wait(timeout)
        except SandboxTimeout:
            await job.cancel(grace=None)
            raise
        if state.reply is None or job.state != "done":
            raise KernelError(
                f"The kernel in sandbox {self.sandbox!r} did not list its variables: "
                f"{job.why or job.state}."
            )
        return variables_of(state.reply, session.live.kernel_name)[0]

    # --- for Notebook

    async def _changes(self) -> Changes:
        """As ``changed_files``, for a cell, which does not fail because of it."""
        try:
            return await self.changed_files()
        except SandboxError as error:
            log.warning("%s", error)
            return []

    async def _stop_watching(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch[1], None
            await background.run(watch.close())

    def _handle(self) -> SandboxHandle:
        return self._checked().kernel.sandboxed.handle

    def _files(self) -> SandboxFiles:
        return SandboxFiles(self._handle())

    def _watching(self) -> ChangedFiles:
        """Of the present sandbox: a restart may have made a new one."""
        handle = self._handle()
        if self._watch is None or self._watch[0] is not handle:
            self._watch = handle, ChangedFiles(handle)
        return self._watch[1]
