"""Jobs as callers see them: cells that run, or wait to, whoever waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from sandbox_kernel.agents.job_state import InputRequest, JobState, State
from sandbox_kernel.agents.result import CellError, OutputPage, Result, Status
from sandbox_kernel.errors import KernelError, SandboxTimeout

if TYPE_CHECKING:
    from sandbox_kernel.agents.job_queue import JobQueue

GRACE = 5.0
"""Seconds that a cell has to end after an interrupt."""
_STATUS: dict[State, Status] = {
    "done": "ok",
    "failed": "error",
    "cancelled": "cancelled",
    "died": "died",
    "lost": "lost",
}


class Job:
    """A cell that was given to a notebook. It goes on when nobody waits for it, and is found again
    by its ``id``, by another process, too. All methods are for the notebook's loop."""

    def __init__(self, state: JobState, queue: JobQueue) -> None:
        self.facts = state
        """For the queue."""
        self._queue = queue
        self._for_end: list[asyncio.Future[None]] = []
        self._for_change: list[asyncio.Future[None]] = []

    @property
    def id(self) -> str:
        return self.facts.id

    @property
    def code(self) -> str:
        return self.facts.code

    @property
    def cell_id(self) -> str:
        """Of its cell in the recorded notebook."""
        return self.facts.cell_id

    @property
    def state(self) -> State:
        """What the kernel says about it. Of a job that another process sent, "running" may also
        mean that it waits for an input that it asked nobody for."""
        return self.facts.state

    @property
    def why(self) -> str:
        """Why it did not end by itself; empty if it did, or has not ended."""
        return self.facts.why

    @property
    def prompt(self) -> InputRequest | None:
        """What it asks for, while its state is "waiting for input"."""
        return self.facts.prompt

    @property
    def is_over(self) -> bool:
        return self.facts.is_over

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.state}>"

    # --- output

    def output(self, after: int = 0) -> OutputPage:
        """The output from a cursor on: 0, or that of an earlier page."""
        done = self.is_over
        cursor, items, dropped = self.facts.outputs.page(after)
        return OutputPage(cursor=cursor, items=items, done=done, dropped=dropped)

    async def changed(self, after: int = 0, timeout: float | None = None) -> OutputPage:
        """The output from a cursor on, as soon as there is some, the job is over, or it asks for
        input; or as it is after ``timeout`` seconds."""
        ends = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while True:
            page = self.output(after)
            if page.cursor > after or page.done or self.prompt is not None:
                return page
            if not await self._next_change(ends):
                return self.output(after)

    async def follow(self, after: int = 0) -> AsyncIterator[OutputPage]:
        """Pages of output as they come, until the job is over; the last one is ``done``."""
        while True:
            page = self.output(after)
            if page.items or page.done:
                yield page
            if page.done:
                return
            if page.cursor == after:
                await self._next_change(None)
            after = page.cursor

    async def until_asked(self, timeout: float | None = None) -> InputRequest | None:
        """What it asks for, as soon as it does; None when it is over. SandboxTimeout."""
        ends = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while not self.is_over and self.prompt is None:
            if not await self._next_change(ends):
                raise self._not_yet(timeout)
        return self.prompt

    async def _next_change(self, ends: float | None) -> bool:
        waiter = asyncio.get_running_loop().create_future()
        self._for_change.append(waiter)
        try:
            async with asyncio.timeout_at(ends):
                await waiter
            return True
        except TimeoutError:
            return False
        finally:
            if waiter in self._for_change:
                self._for_change.remove(waiter)

    # --- the end

    async def wait(self, timeout: float | None = None) -> Result:
        """How it ended, when it has. SandboxTimeout if it has not after so many seconds; it goes
        on."""
        if not self.is_over:
            waiter = asyncio.get_running_loop().create_future()
            self._for_end.append(waiter)
            try:
                if timeout is None:
                    await waiter
                else:
                    async with asyncio.timeout(timeout):
                        await waiter
            except TimeoutError:
                raise self._not_yet(timeout) from None
            finally:
                if waiter in self._for_end:
                    self._for_end.remove(waiter)
        return self.result()

    def _not_yet(self, timeout: float | None) -> SandboxTimeout:
        return SandboxTimeout(
            f"Job {self.id} in sandbox {self._queue.sandbox!r} is {self.state} after "
            f"{timeout or 0:g} s. It goes on: wait again, or cancel it."
        )

    def result(self) -> Result:
        """What there is of it. Of a job that is not over, the status is "timeout"."""
        job = self.facts
        status: Status = _STATUS.get(job.state, "timeout")
        if job.timed_out and status in ("cancelled", "died"):
            status = "timeout"
        error = job.error
        return Result(
            status=status,
            execution_count=job.execution_count,
            duration=job.duration,
            outputs=job.outputs.merged(),
            error=CellError(error["ename"], error["evalue"], error["traceback"]) if error else None,
            job_id=job.id,
            why=job.why if job.is_over else f"it is {job.state}",
            sandbox=self._queue.sandbox,
        )

    async def cancel(self, *, grace: float | None = GRACE) -> None:
        """Take it out of the queue, or interrupt it. If it has not ended ``grace`` seconds after
        that, its kernel is killed and started again; None: it never is. Returns when the job is
        over, without a grace at once after the interrupt. No error if it was over."""
        await self._queue.stop(self, "it was cancelled", grace)

    async def input(self, text: str) -> None:
        """Answer the cell that asks for input. KernelError if it does not."""
        if not self._queue.answer(self, text):
            raise KernelError(
                f"Job {self.id} in sandbox {self._queue.sandbox!r} is {self.state}, and does not "
                f"wait for input."
            )

    # --- from the queue

    def notice(self) -> None:
        """Something about it has changed."""
        if self._for_change:
            _wake(self._for_change)
        if self._for_end and self.is_over:
            _wake(self._for_end)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
