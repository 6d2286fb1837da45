"""BlockingNotebook: a Notebook for programs without an event loop.

    with BlockingNotebook.open("analysis.ipynb") as notebook:
        print(notebook.run("1 + 1").text)

It has Notebook's methods, which wait. The notebook itself lives on a loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sandbox_kernel.agents.files import MOST_BYTES, MOST_COPIED, AnyPath, Copied, FileInfo, Listing
from sandbox_kernel.agents.job_state import InputRequest
from sandbox_kernel.agents.job_state import State as JobState
from sandbox_kernel.agents.jobs import GRACE, Job
from sandbox_kernel.agents.notebook import Input, Notebook, OnTimeout, State
from sandbox_kernel.agents.opening import Opening
from sandbox_kernel.agents.result import ChangedFile, OutputPage, Result
from sandbox_kernel.agents.variables import Variable
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.live_notebooks import LiveNotebook
from sandbox_kernel.workspace.reports import Quota

T = TypeVar("T")


class _LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.notebooks = 1
        """How many live on it: forks share it."""
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="sandbox-kernel-notebook", daemon=True
        )
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and wait for it. Ctrl-C cancels it. SandboxError after the end."""
        if self.loop.is_closed():
            coroutine.close()
            raise SandboxError(
                "The notebook was closed or detached here. BlockingNotebook.live() lists those "
                "that can be attached to; open it again for a new kernel."
            )
        outcome = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return outcome.result()
        except BaseException:
            outcome.cancel()
            raise

    def end(self) -> None:
        """One of its notebooks has ended."""
        self.notebooks -= 1
        if self.notebooks:
            return
        self.call(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


class BlockingJob:
    """A Job whose methods wait."""

    def __init__(self, job: Job, thread: _LoopThread) -> None:
        self._job = job
        self._thread = thread

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def code(self) -> str:
        return self._job.code

    @property
    def cell_id(self) -> str:
        return self._job.cell_id

    @property
    def state(self) -> JobState:
        return self._job.state

    @property
    def why(self) -> str:
        return self._job.why

    @property
    def prompt(self) -> InputRequest | None:
        return self._job.prompt

    @property
    def is_over(self) -> bool:
        return self._job.is_over

    def output(self, after: int = 0) -> OutputPage:
        return self.changed(after, timeout=0)

    def changed(self, after: int = 0, timeout: float | None = None) -> OutputPage:
        return self._thread.call(self._job.changed(after, timeout))

    def follow(self, after: int = 0) -> Iterator[OutputPage]:
        pages = self._job.follow(after)
        while (page := self._thread.call(_result(anext(pages, None)))) is not None:
            yield page

    def wait(self, timeout: float | None = None) -> Result:
        return self._thread.call(self._job.wait(timeout))

    def cancel(self, *, grace: float | None = GRACE) -> None:
        self._thread.call(self._job.cancel(grace=grace))

    def input(self, text: str) -> None:
        self._thread.call(self._job.input(text))


class BlockingNotebook:
    """As Notebook says. It may be used from several threads."""

    def __init__(self, notebook: Notebook, thread: _LoopThread) -> None:
        self._notebook = notebook
        self._thread = thread
        self._ended = False

    @classmethod
    def open(
        cls,
        path: AnyPath | None = None,
        *,
        kernel: str | None = None,
        backend: str | None = None,
        output: AnyPath | None = None,
        **settings: Any,
    ) -> BlockingNotebook:
        opening = Notebook.open(path, kernel=kernel, backend=backend, output=output, **settings)
        return cls._begin(opening)

    @classmethod
    def attach(cls, sandbox: AnyPath, *, take_over: bool = False) -> BlockingNotebook:
        return cls._begin(Notebook.attach(sandbox, take_over=take_over))

    @classmethod
    def _begin(cls, opening: Opening) -> BlockingNotebook:
        thread = _LoopThread()
        try:
            return cls(thread.call(_result(opening)), thread)
        except BaseException:
            thread.end()
            raise

    @staticmethod
    def live() -> builtins.list[LiveNotebook]:
        return Notebook.live()

    @property
    def sandbox(self) -> str:
        return self._notebook.sandbox

    @property
    def backend(self) -> str:
        return self._notebook.backend

    @property
    def path(self) -> Path | None:
        return self._notebook.path

    @property
    def kernel_name(self) -> str:
        return self._notebook.kernel_name

    @property
    def state(self) -> State:
        return self._notebook.state

    @property
    def death(self) -> str:
        return self._notebook.death

    @property
    def jobs(self) -> Mapping[str, BlockingJob]:
        jobs = list(self._notebook.jobs.items())
        return {job_id: BlockingJob(job, self._thread) for job_id, job in jobs}

    def job(self, job_id: str) -> BlockingJob:
        return BlockingJob(self._notebook.job(job_id), self._thread)

    def run(
        self,
        code: str,
        *,
        timeout: float | None = None,
        on_timeout: OnTimeout = "interrupt",
        input: Input | None = None,  # noqa: A002  (as Python calls it)
        silent: bool = False,
        store: bool = True,
        cell_id: str | None = None,
        files: bool = False,
    ) -> Result:
        return self._thread.call(
            self._notebook.run(
                code,
                timeout=timeout,
                on_timeout=on_timeout,
                input=input,
                silent=silent,
                store=store,
                cell_id=cell_id,
                files=files,
            )
        )

    def start(
        self,
        code: str,
        *,
        cell_id: str | None = None,
        silent: bool = False,
        store: bool = True,
        allow_input: bool = True,
    ) -> BlockingJob:
        starting = self._notebook.start(
            code, cell_id=cell_id, silent=silent, store=store, allow_input=allow_input
        )
        return BlockingJob(self._thread.call(starting), self._thread)

    def interrupt(self) -> None:
        self._thread.call(self._notebook.interrupt())

    def restart(self) -> None:
        self._thread.call(self._notebook.restart())

    def install(self, *packages: str, timeout: float | None = None) -> Result:
        return self._thread.call(self._notebook.install(*packages, timeout=timeout))

    def variables(self) -> builtins.list[Variable]:
        return self._thread.call(self._notebook.variables())

    def read(self, path: AnyPath, *, max_bytes: int = MOST_BYTES) -> bytes:
        return self._thread.call(self._notebook.read(path, max_bytes=max_bytes))

    def write(self, path: AnyPath, data: bytes | str) -> None:
        self._thread.call(self._notebook.write(path, data))

    def list(self, path: AnyPath = ".") -> builtins.list[FileInfo]:
        return self._thread.call(self._notebook.list(path))

    def listing(self, path: AnyPath = ".", most: int = 1000) -> Listing:
        return self._thread.call(self._notebook.listing(path, most))

    def upload(self, source: AnyPath, path: AnyPath = ".", *, quota: Quota = MOST_COPIED) -> int:
        return self._thread.call(self._notebook.upload(source, path, quota=quota))

    def download(
        self,
        path: AnyPath,
        target: AnyPath = ".",
        *,
        force: bool = False,
        hidden: bool = False,
        quota: Quota = MOST_COPIED,
    ) -> Copied:
        copying = self._notebook.download(path, target, force=force, hidden=hidden, quota=quota)
        return self._thread.call(copying)

    def changed_files(self) -> builtins.list[ChangedFile]:
        return self._thread.call(self._notebook.changed_files())

    def persist(self, workspace: str | None = None) -> str:
        return self._thread.call(self._notebook.persist(workspace))

    def restore(self, workspace: str | None = None, at: str | None = None) -> int:
        return self._thread.call(self._notebook.restore(workspace, at))

    def checkpoint(self, name: str) -> None:
        self._thread.call(self._notebook.checkpoint(name))

    def fork(self) -> BlockingNotebook:
        copy = self._thread.call(self._notebook.fork())
        self._thread.notebooks += 1
        return BlockingNotebook(copy, self._thread)

    def save(self) -> None:
        self._thread.call(self._notebook.save())

    def detach(self) -> None:
        self._thread.call(self._notebook.detach())
        self._end()

    def close(self, *, save: bool = True) -> None:
        """Idempotent."""
        if not self._ended:
            try:
                self._thread.call(self._notebook.close(save=save))
            finally:
                self._end()

    def _end(self) -> None:
        self._ended = True
        self._thread.end()

    def __enter__(self) -> BlockingNotebook:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
