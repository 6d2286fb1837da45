"""A notebook while a process has it: its kernel, the queue of its jobs, and what is kept of both.

``Notebook`` is the face of it. A session begins with a new kernel or with one that another process
has left, and ends with the kernel or leaves it to another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from sandbox_kernel.agents.catching_up import CatchingUp, read_journal
from sandbox_kernel.agents.job_queue import JobQueue
from sandbox_kernel.agents.job_state import JobState
from sandbox_kernel.agents.notebook_kernel import NotebookKernel
from sandbox_kernel.agents.recorded import RecordedNotebook
from sandbox_kernel.errors import KernelLaunchFailed, SandboxTimeout
from sandbox_kernel.live_notebooks import LiveNotebook
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks

_UNSENT = "the kernel it was meant for ended before it was sent: {}"
_FIRST_ANSWER = 60.0


class NotebookSession:
    """All of it on one event loop."""

    def __init__(
        self, kernel: NotebookKernel, live: LiveNotebook, record: RecordedNotebook | None
    ) -> None:
        self.kernel = kernel
        self.live = live
        self.record = record
        self.closed = ""
        """Why this process has the kernel no more; empty while it has."""
        self.queue = JobQueue(kernel, live.journal(), self._note, self.restart)
        self._tasks = OwnedTasks()
        self._watch: asyncio.Task[None] | None = None
        self._restarting = asyncio.Lock()

    # --- beginning

    @classmethod
    async def begin(cls, record: RecordedNotebook | None, **start: Any) -> NotebookSession:
        """With a new kernel, for which ``start`` are the arguments. On any failure nothing is
        left."""
        return await cls.begin_with(await NotebookKernel.start(**start), record)

    @classmethod
    async def begin_with(
        cls, kernel: NotebookKernel, record: RecordedNotebook | None
    ) -> NotebookSession:
        """With a kernel that has no notebook yet."""
        self: NotebookSession | None = None
        try:
            live = await kernel.describe(str(record.path) if record else "")
            self = cls(kernel, live, record)
            self.queue.connect()
            saving = asyncio.create_task(asyncio.to_thread(live.save))
            try:
                self._watch_kernel()
                await self._until_ready()
            finally:
                await saving
            return self
        except BaseException:
            await asyncio.shield(_undo(kernel, self))
            raise

    @classmethod
    async def go_on(cls, live: LiveNotebook, record: RecordedNotebook | None) -> NotebookSession:
        """With the kernel of a notebook that another process has left. On a failure the kernel is
        left as it was."""
        kernel = await NotebookKernel.take_over(live)
        self: NotebookSession | None = None
        try:
            self = cls(kernel, live, record)
            earlier = await asyncio.to_thread(read_journal, live.journal())
            await kernel.record()
            catching_up = CatchingUp(self.queue, kernel, earlier, record)
            await catching_up.begin()
            self._watch_kernel()  # not earlier: a kernel that has died ends the jobs that it had
            self._tasks.start(catching_up.go_on())
            return self
        except BaseException:
            await asyncio.shield(_leave(kernel, self))
            raise

    async def _until_ready(self) -> None:
        """Record its output, and wait until it answers."""
        timeout = self.kernel.provisioner.get_stable_start_time(_FIRST_ANSWER)
        ready = asyncio.create_task(self._first_answer())
        waits = {ready} | ({self._watch} if self._watch else set())
        done, _ = await asyncio.wait(waits, timeout=timeout, return_when="FIRST_COMPLETED")
        if ready not in done:
            ready.cancel()
            await asyncio.wait([ready])
            if self.queue.death:
                raise KernelLaunchFailed(
                    f"The kernel in sandbox {self.queue.sandbox!r} died while it started: "
                    f"{self.queue.death}"
                )
            raise SandboxTimeout(
                f"The kernel in sandbox {self.queue.sandbox!r} has not answered within "
                f"{timeout:g} s. Give it more time (start_timeout), or a larger sandbox."
            )
        info = ready.result()
        if self.record is not None:
            spec, name = self.kernel.kernelspec, self.kernel.manager.kernel_name
            self.record.describe(spec, name, info.get("language_info"))

    async def _first_answer(self) -> Mapping[str, Any]:
        recording = asyncio.create_task(self.kernel.record())
        try:
            return await self.queue.probes.until_heard()
        finally:
            await recording

    # --- the kernel's end

    def _watch_kernel(self) -> None:
        self._watch = self._tasks.start(self._until_death())

    async def _until_death(self) -> None:
        why = await self.kernel.died()
        queue = self.queue
        if self.kernel.has_lost_it:
            self.closed = f"another process has taken it over ({why.rstrip('.')})"
            return queue.let_go(self.closed)
        if queue.current is not None and self.kernel.sandboxed.tunnel.failure is None:
            await queue.complete(queue.current)
        queue.death = why or "it ended"
        queue.end_all("died", queue.death, _UNSENT.format(queue.death))

    async def restart(self, why: str = "the kernel was restarted") -> None:
        """Another kernel in the same sandbox. The job in the old one, and those that wait, are
        cancelled."""
        async with self._restarting, self.queue.held():
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])
            try:
                await self.kernel.restart()
            except BaseException as error:
                self.queue.death = self.queue.death or f"it could not be restarted: {error}"
                raise
            finally:
                self.queue.end_all("cancelled", why, _UNSENT.format(why))
            self.queue.death = ""
            self._watch_kernel()
            await self._until_ready()

    # --- the end

    async def detach(self) -> None:
        """Leave the kernel to another process, with the job in it. Those that wait are lost."""
        self.queue.let_go("its notebook was left to another process")
        await self.stop("it was left to another process")
        if self.record is not None:
            await self.record.close()
        await self.kernel.detach()

    async def close(self, *, save: bool = True) -> None:
        """End the kernel, and the sandbox with it."""
        if self.closed:  # another process has it
            await self.stop(self.closed)
            return await self.kernel.detach()
        why = "the notebook was closed"
        self.queue.death = self.queue.death or why
        self.queue.end_all("cancelled", why, why)
        await self.stop("it was closed")
        try:
            if self.record is not None:
                await self.record.close()
        finally:
            await self.kernel.end(save=save)
            await asyncio.to_thread(self.live.forget)

    async def stop(self, why: str) -> None:
        """Hear and send nothing any more."""
        self.closed = self.closed or why
        await self._tasks.cancel()
        await self.queue.close()

    def _note(self, job: JobState) -> None:
        if self.record is not None and not job.silent:
            self.record.changed(job)


async def _undo(kernel: NotebookKernel, session: NotebookSession | None) -> None:
    """Leave nothing of a notebook whose kernel does not answer."""
    if session is not None:
        await session.stop("it did not start")
        await asyncio.to_thread(session.live.forget)
    await kernel.end(save=False)


async def _leave(kernel: NotebookKernel, session: NotebookSession | None) -> None:
    """Leave a notebook that another process may still go on with."""
    if session is not None:
        await session.stop("it could not be taken over")
    await kernel.detach()
