"""Notebook: code that runs as the cells of a real notebook, in a sandbox, for pipelines and agents.

    async with Notebook.open("analysis.ipynb", memory_mib=1024, egress=["@pip"]) as notebook:
        result = await notebook.run("df.describe()")

Cells are jobs: they run one after the other, in the order in which they were given, whoever gave
them, and go on when their caller does not wait for them, or has died (``Notebook.attach``).
"""

from __future__ import annotations

import asyncio
import builtins
import inspect
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

from sandbox_kernel.agents.files import AnyPath
from sandbox_kernel.agents.job_state import JobState
from sandbox_kernel.agents.jobs import GRACE, Job
from sandbox_kernel.agents.notebook_session import NotebookSession
from sandbox_kernel.agents.notebook_tools import NotebookTools
from sandbox_kernel.agents.opening import Opening
from sandbox_kernel.agents.recorded import RecordedNotebook, check_cell_id
from sandbox_kernel.agents.result import Result
from sandbox_kernel.errors import SandboxError, SandboxExists, SandboxNotFound, SandboxTimeout
from sandbox_kernel.jupyter.kernel_workspace import folder_of
from sandbox_kernel.live_notebooks import LiveNotebook, find_notebook, live_notebooks, notebook_at

OnTimeout = Literal["interrupt", "kill", "leave"]
Answer = Callable[[str], str | Awaitable[str]]
"""Gets a cell's prompt."""
Input = str | Sequence[str] | Answer
State = Literal["idle", "busy", "dead", "closed"]

_TOO_LITTLE_INPUT = "it asked for more input than it was given"
_CALLER_GONE = "its caller was cancelled"


class Notebook(NotebookTools):
    """A notebook with its kernel in a sandbox. Made by ``open`` and ``attach``, ended by ``close``;
    all of it on one event loop."""

    def __init__(self, session: NotebookSession) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        handle = session.kernel.sandboxed.handle
        self.sandbox = handle.name
        """Name of the sandbox, for ``attach`` and for the command ``sandbox-kernel``."""
        self.backend = handle.backend
        self.kernel_name = session.live.kernel_name
        self.path = session.record.path if session.record else None
        """Where it is recorded."""
        self._closing: asyncio.Task[None] | None = None

    # --- beginning

    @classmethod
    def open(
        cls,
        path: AnyPath | None = None,
        *,
        kernel: str | None = None,
        backend: str | None = None,
        output: AnyPath | None = None,
        content: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Opening:
        """A new kernel in a new sandbox: ``await`` it, or enter it with ``async with``.

        Cells are recorded in the file at ``path``, after those that it has, or in ``output``, which
        begins with them; without either, nowhere. With ``content``, a notebook of format 4.5, the
        file has that instead, before anything is started. ``kernel`` names one of our kernelspecs,
        else it is ipykernel. ``settings`` are those of a kernelspec (docs/settings.md), and like
        those of a kernelspec they give way to ``SANDBOX_KERNEL_*`` in the environment.
        """
        start = {"kernel": kernel, "backend": backend, "settings": settings}
        return Opening(partial(cls._open, path, output, content, start))

    @classmethod
    async def _open(
        cls,
        path: AnyPath | None,
        output: AnyPath | None,
        content: Mapping[str, Any] | None,
        start: dict[str, Any],
    ) -> Notebook:
        record = await asyncio.to_thread(_record, path, output, content)
        if record is not None and content is not None:
            await record.write(lasting=False)
        cwd = await asyncio.to_thread(_folder, path)
        # A copy of a notebook does not share the saved files of the original.
        notebook = str(record.path) if record is not None and output is None else ""
        return cls(await NotebookSession.begin(record, **start, notebook=notebook, cwd=cwd))

    @classmethod
    def attach(cls, sandbox: AnyPath, *, take_over: bool = False) -> Opening:
        """Go on with a notebook that another process has left, or that has died: by its sandbox's
        name, the beginning of it, or the notebook's path. Its jobs, and their output, are there.
        SandboxExists if a process uses it, unless that is to lose it (``take_over``)."""
        return Opening(partial(cls._attach, os.fspath(sandbox), take_over))

    @classmethod
    async def _attach(cls, sandbox: str, take_over: bool) -> Notebook:
        live = await asyncio.to_thread(find_notebook, sandbox)
        owner = await asyncio.to_thread(lambda: live.owner)
        if owner is not None and not take_over:
            whose = "this process" if owner == os.getpid() else f"process {owner}"
            raise SandboxExists(
                f"The notebook in sandbox {live.sandbox!r} is in use by {whose}. Let it detach, or "
                f"take the notebook over (take_over=True)."
            )
        path = Path(live.path)
        record = await asyncio.to_thread(RecordedNotebook.open, path) if live.path else None
        return cls(await NotebookSession.go_on(live, record))

    @staticmethod
    def live() -> builtins.list[LiveNotebook]:
        """This user's notebooks whose sandboxes exist, the oldest first. Blocks for a moment."""
        return live_notebooks()

    # --- what it is

    def __repr__(self) -> str:
        return f"<Notebook in {self.backend} sandbox {self.sandbox}: {self.state}>"

    @property
    def state(self) -> State:
        if self._session.closed:
            return "closed"
        if self.death:
            return "dead"
        return "busy" if self._session.queue.current is not None else "idle"

    @property
    def death(self) -> str:
        """Why the kernel ended, or this process has it no more; empty while it runs."""
        return self._session.closed or self._session.queue.death

    @property
    def jobs(self) -> Mapping[str, Job]:
        """All jobs by id, in the order in which they were queued; also those of earlier callers."""
        return MappingProxyType(self._session.queue.jobs)

    def job(self, job_id: str) -> Job:
        """SandboxNotFound if there is none of that id."""
        found = self._session.queue.jobs.get(job_id)
        if found is None:
            raise SandboxNotFound(
                f"The notebook in sandbox {self.sandbox!r} has no job {job_id!r}; its `jobs` lists "
                f"those that there are."
            )
        return found

    # --- cells

    async def run(
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
        """Run a cell, after those that were given before, and wait for its end.

        If it has not ended ``timeout`` seconds after it was given, it is interrupted (and after
        some seconds killed, with its kernel), or killed at once, or left running (``Result.job_id``
        finds it). ``input`` answers what the cell asks: texts, or a function of the prompt; without
        it, asking is an error in the cell. A cell whose caller is cancelled is interrupted.
        ``silent`` cells are not recorded; ``store`` puts it into the kernel's history; with
        ``files``, the result tells what has changed in the workspace from this call on.
        """
        if files:
            await self._changes()
        result = await self._run_to_end(
            code, timeout, on_timeout, input, silent=silent, store=store, cell_id=cell_id
        )
        return replace(result, files=await self._changes()) if files else result

    async def _run(self, code: str, timeout: float | None) -> Result:
        return await self.run(code, timeout=timeout)

    async def _run_to_end(
        self,
        code: str,
        timeout: float | None,
        on_timeout: OnTimeout,
        input: Input | None,  # noqa: A002
        **options: Any,
    ) -> Result:
        job = await self.start(code, allow_input=input is not None, **options)
        try:
            if input is not None:
                return await self._answer_until(job, input, timeout, on_timeout)
            return await job.wait(timeout)
        except SandboxTimeout:
            return await self._late(job, timeout or 0.0, on_timeout)
        except asyncio.CancelledError:
            self._session.queue.stop_soon(job, _CALLER_GONE)
            raise

    async def start(
        self,
        code: str,
        *,
        cell_id: str | None = None,
        silent: bool = False,
        store: bool = True,
        allow_input: bool = True,
    ) -> Job:
        """Queue a cell, and come back at once. ``cell_id`` is that of a cell in the notebook, which
        gets this code and its outputs, or of a new one at the end. KernelError if the kernel is
        dead."""
        session = self._checked()
        job_id = secrets.token_hex(16)
        state = JobState(
            id=job_id,
            code=code,
            cell_id=check_cell_id(cell_id) if cell_id is not None else job_id[:16],
            silent=silent,
            store=store,
            allow_input=allow_input,
        )
        if session.record is not None and not silent:
            session.record.place(state)
        return session.queue.add(state)

    async def _late(self, job: Job, timeout: float, on_timeout: OnTimeout) -> Result:
        if on_timeout != "leave" and not job.is_over:
            job.facts.timed_out = True
            why = f"it had not ended after {timeout:g} s"
            await self._session.queue.stop(job, why, 0.0 if on_timeout == "kill" else GRACE)
        return job.result()

    async def _answer_until(
        self, job: Job, given: Input, timeout: float | None, on_timeout: OnTimeout
    ) -> Result:
        """Answer a job's prompts until it ends. SandboxTimeout."""
        texts = iter([given] if isinstance(given, str) else () if callable(given) else given)
        ends = None if timeout is None else self._loop.time() + timeout
        while not job.is_over:
            prompt = await job.until_asked(None if ends is None else ends - self._loop.time())
            if prompt is None:
                continue
            answer = given(prompt.prompt) if callable(given) else next(texts, None)
            if inspect.isawaitable(answer):
                answer = await answer
            if answer is None:
                await self._session.queue.stop(job, _TOO_LITTLE_INPUT, GRACE)
            elif not job.is_over:
                await job.input(str(answer))
        return job.result()

    # --- the kernel

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C does. Those that wait go on."""
        await self._checked().queue.interrupt()

    async def restart(self) -> None:
        """A new kernel in the same sandbox: the files stay, variables do not. Jobs that run or wait
        are cancelled."""
        await self._checked().restart()

    async def fork(self) -> Notebook:
        """A second notebook that goes on from this one's variables and files, in a sandbox of its
        own; nothing is shared from then on. It is recorded nowhere, and knows none of the jobs: one
        that runs goes on in both. Unsupported where the backend cannot."""
        kernel = await self._checked().kernel.fork()
        return Notebook(await NotebookSession.begin_with(kernel, None))

    async def save(self) -> None:
        """Write the recorded notebook now; without it, that happens within about a second."""
        record = self._checked().record
        if record is not None:
            await record.write()

    # --- the end

    async def detach(self) -> None:
        """Leave it running for another process, until its lease ends. A job that runs goes on;
        those that wait are lost."""
        session = self._checked()
        await self._stop_watching()
        await session.detach()

    async def close(self, *, save: bool = True) -> None:
        """End the kernel and its sandbox, after its files were saved if it has a saved workspace.
        Idempotent."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(save=save))
        await asyncio.shield(self._closing)

    async def _close(self, *, save: bool) -> None:
        try:
            await self._stop_watching()
        finally:
            await self._session.close(save=save)

    async def __aenter__(self) -> Notebook:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _checked(self) -> NotebookSession:
        """The session, for a call that needs it. SandboxError."""
        if self._loop is not asyncio.get_running_loop():
            raise SandboxError(
                "A Notebook belongs to the event loop on which it was opened. From other threads, "
                "use BlockingNotebook, or asyncio.run_coroutine_threadsafe."
            )
        if self._session.closed:
            raise SandboxError(
                f"The notebook in sandbox {self.sandbox!r} cannot be used here: "
                f"{self._session.closed}. Notebook.live() lists those that can be attached to."
            )
        return self._session


def _record(
    path: AnyPath | None, output: AnyPath | None, content: Mapping[str, Any] | None
) -> RecordedNotebook | None:
    """Blocks. SpecError, or SandboxExists if a process records another notebook there."""
    if path is None and output is None:
        return None
    to = Path(os.path.abspath(output if output is not None else path or ""))
    source = Path(os.path.abspath(path)) if path is not None and output is not None else None
    _check_unused(to)
    return RecordedNotebook.open(to, source, content)


def _folder(path: AnyPath | None) -> str:
    """Of the notebook, or that of this process."""
    return os.path.dirname(os.path.abspath(path)) if path is not None else folder_of(None)


def _check_unused(path: Path) -> None:
    """SandboxExists if a process has opened the notebook at that path."""
    found = notebook_at(str(path))
    owner = found.owner if found is not None else None
    if found is not None and owner is not None:
        raise SandboxExists(
            f"The notebook {path} is open already, in sandbox {found.sandbox!r} of process "
            f"{owner}. Close it there, or record this one elsewhere (output)."
        )
