"""The queue of a notebook's jobs: one at a time is in the kernel, in the order of the callers.

All of it runs on the notebook's loop, mostly from the callbacks of its sockets: a cell takes one
message out and some in, and no task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from sandbox_kernel.agents.channels import Channels
from sandbox_kernel.agents.job_state import JobState, JobTable, State
from sandbox_kernel.agents.jobs import Job
from sandbox_kernel.agents.notebook_kernel import NotebookKernel
from sandbox_kernel.agents.probes import Probes
from sandbox_kernel.errors import KernelError, SandboxError, SandboxTimeout
from sandbox_kernel.jupyter.envelopes import Envelope, open_envelope
from sandbox_kernel.live_notebooks import Journal
from sandbox_kernel.recordings import Recording
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks

log = logging.getLogger("sandbox_kernel")

_LATE = 5.0
"""Seconds after which the other half of a job's end is not waited for any more."""


class JobQueue:
    """``on_change`` hears of jobs that begin, end, or say something afterwards; ``kill`` starts the
    kernel again, because a job does not end."""

    def __init__(
        self,
        kernel: NotebookKernel,
        journal: Journal,
        on_change: Callable[[JobState], None],
        kill: Callable[[str], Awaitable[None]],
    ) -> None:
        self.kernel = kernel
        self.sandbox = kernel.sandboxed.handle.name
        self.table = JobTable()
        self.jobs: dict[str, Job] = {}
        self.current: Job | None = None
        """The job that the kernel has."""
        self.death = ""
        """Why the kernel ended; empty while it runs."""
        self.hear_iopub: Callable[[Envelope], None] = self.heard
        """Gets the output; another one while an earlier recording is caught up with."""
        self.known: set[str] = set()
        """Messages that were heard from the recording, and may come once more."""
        self._channels = Channels(kernel.manager, self._hear)
        self.probes = Probes(self._channels)
        self._journal = journal
        self._on_change = on_change
        self._kill = kill
        self._killing = asyncio.Lock()
        self._waiting: deque[Job] = deque()
        self._held = 0
        self._tasks = OwnedTasks()
        self._late: asyncio.TimerHandle | None = None

    def connect(self) -> None:
        self._channels.open()

    async def close(self) -> None:
        if self._late is not None:
            self._late.cancel()
        await self._tasks.cancel()
        self._channels.close()
        self._journal.close()

    # --- the queue

    def add(self, state: JobState) -> Job:
        """Queue a job. KernelError if the kernel is dead."""
        if self.death:
            raise KernelError(
                f"The kernel in sandbox {self.sandbox!r} is dead: {self.death.rstrip('.')}. "
                f"Restart it: the sandbox is there, with its files."
            )
        job = self.enter(state)
        self.note(job=state.id, cell=state.cell_id, code=state.code, silent=state.silent)
        self._waiting.append(job)
        self.pump()
        return job

    def enter(self, state: JobState) -> Job:
        """Know a job, which an earlier process may have queued."""
        job = self.jobs[state.id] = Job(state, self)
        self.table.add(state)
        return job

    def note(self, **facts: object) -> None:
        """Write to the journal what a later process must know."""
        try:
            self._journal.note(**facts)
        except OSError as error:
            log.warning("Another process will not find all jobs of %s: %s", self.sandbox, error)

    def pump(self) -> None:
        """Send the next job if the kernel is free."""
        if self.current is not None or self._held or self.death or not self._waiting:
            return
        job = self.current = self._waiting.popleft()
        facts = job.facts
        self.note(sent=facts.id)
        facts.sent = True
        content = {
            "code": facts.code,
            "silent": facts.silent,
            "store_history": facts.store and not facts.silent,
            "user_expressions": facts.expressions,
            "allow_stdin": facts.allow_input,
            "stop_on_error": False,
        }
        try:
            self._channels.send("shell", "execute_request", content, facts.id)
        except KernelError as error:
            self.end(job, "lost", str(error))

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """No job is sent meanwhile: it would get the interrupt of another, or a dying kernel."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self.pump()

    def end(self, job: Job, state: State, why: str) -> None:
        """A job is over, and not because the kernel said so."""
        if not job.is_over:
            job.facts.end(state, why, time.time())
            with contextlib.suppress(ValueError):
                self._waiting.remove(job)
            self._over(job)
            job.notice()

    def end_all(self, state: State, why: str, unsent: str) -> None:
        """The kernel has ended: so has the job in it; those that wait were meant for that kernel,
        and are cancelled."""
        if self.current is not None:
            self.end(self.current, state, why)
        for job in list(self._waiting):
            self.end(job, "cancelled", unsent)

    def let_go(self, why: str) -> None:
        """Another process has the kernel. What becomes of the jobs is in its journal."""
        self.death = self.death or why
        here = [*([self.current] if self.current else []), *self._waiting]
        self.current = None
        self._waiting.clear()
        for job in here:
            job.facts.end("lost", why, time.time())
            job.notice()

    def _over(self, job: Job) -> None:
        facts = job.facts
        count = facts.execution_count
        self.note(end=facts.id, state=facts.state, why=facts.why, count=count)
        self._on_change(facts)
        if facts.silent:
            self.jobs.pop(facts.id, None)
            self.table.forget(facts)
        if job is self.current:
            self.current = None
            self.pump()

    # --- messages

    def _hear(self, channel: str, envelope: Envelope) -> None:
        if channel == "iopub":
            return self.hear_iopub(envelope)
        parent = str(envelope.parent.get("msg_id"))
        job = self.jobs.get(parent)
        if job is None:
            self.probes.answered(parent, envelope)
        elif channel == "shell" and envelope.kind == "execute_reply":
            job.facts.replied(envelope.content())
            self._changed(job)
        elif channel == "stdin" and envelope.kind == "input_request":
            job.facts.asked(envelope.content())
            if (prompt := job.prompt) is not None:
                self.note(asks=job.id, prompt=prompt.prompt, password=prompt.password)
            self._changed(job)

    def heard(self, envelope: Envelope, at: float | None = None) -> None:
        """A message of the iopub channel."""
        if self.known and envelope.id in self.known:
            return
        parent = str(envelope.parent.get("msg_id"))
        if parent not in self.jobs and envelope.kind != "update_display_data":
            return self.probes.published(parent)
        size, at = len(envelope.content_part), time.time() if at is None else at
        state = self.table.hear(envelope.kind, parent, envelope.content(), size, at)
        if state is not None:
            self._changed(self.jobs[state.id])

    def _changed(self, job: Job) -> None:
        facts = job.facts
        if facts.is_over:
            if job is self.current:
                self._over(job)
            else:
                self._on_change(facts)  # it says something after its end
        elif facts.state != "queued":
            if not facts.told:
                facts.told = True
                self._on_change(facts)
            if facts.end_wanted and not facts.interrupted:
                facts.interrupted = True
                self._tasks.start(self._or_tell(self.interrupt()))
            if facts.half_over and self._late is None:
                self._wait_for_rest(job)
        job.notice()

    def _wait_for_rest(self, job: Job) -> None:
        loop, version = asyncio.get_running_loop(), job.facts.outputs.version
        self._late = loop.call_later(_LATE, self._is_late, job, version)

    def _is_late(self, job: Job, version: int) -> None:
        self._late = None
        if job.is_over:
            return
        if job.facts.outputs.version != version:
            return self._wait_for_rest(job)  # its output is still coming
        self._tasks.start(self._settle(job))

    async def _settle(self, job: Job) -> None:
        """End a job of which some messages did not come, with what the sandbox kept of it."""
        await self.complete(job)
        job.facts.settle(time.time())
        self._changed(job)

    async def complete(self, job: Job) -> None:
        """Put the job's outputs together from the recording, if that has all of them."""
        try:
            recording = await self.kernel.recorded()
        except SandboxError as error:
            log.warning("Output of job %s in %s may be missing: %s", job.id, self.sandbox, error)
            return
        self._hear_again(job, recording)

    def _hear_again(self, job: Job, recording: Recording) -> None:
        found = [open_envelope(parts) for parts in recording.messages]
        ours = [e for e in found if e is not None and e.parent.get("msg_id") == job.id]
        if not ours or ours[0].content().get("execution_state") != "busy":
            return
        job.facts.begin_anew()
        for one in ours:
            content, at = one.content(), job.facts.ended or time.time()
            self.table.hear(one.kind, job.id, content, len(one.content_part), at)
        self.known = {one.id for one in ours}

    # --- what callers do to jobs

    def answer(self, job: Job, text: str) -> bool:
        """Send a job its input. False if it does not wait for any, as far as is known."""
        facts = job.facts
        if job is not self.current or not (facts.prompt or facts.orphan):
            return False
        self._channels.send("stdin", "input_reply", {"value": text}, f"{facts.id}-input")
        self.note(answered=facts.id)
        facts.answered()
        job.notice()
        return True

    async def interrupt(self) -> None:
        """Interrupt whatever the kernel does."""
        async with self.held():
            await self.kernel.interrupt()

    def stop_soon(self, job: Job, why: str) -> None:
        """As ``stop``, for a caller that cannot wait; it never kills the kernel."""
        self._tasks.start(self._or_tell(self.stop(job, why, None)))

    async def _or_tell(self, stopping: Awaitable[None]) -> None:
        try:
            await stopping
        except (SandboxError, OSError) as error:
            log.warning("The kernel in sandbox %s is not interrupted: %s", self.sandbox, error)

    async def stop(self, job: Job, why: str, grace: float | None) -> None:
        """As ``Job.cancel``."""
        facts = job.facts
        if job.is_over:
            return
        if job is not self.current:
            return self.end(job, "cancelled", why)
        facts.end_wanted = facts.end_wanted or why
        if facts.state != "queued" and grace != 0:
            facts.interrupted = True
            await self.interrupt()
        if grace is None:
            return
        try:
            await job.wait(grace)
        except SandboxTimeout:
            await self._stop_by_force(job, why)

    async def _stop_by_force(self, job: Job, why: str) -> None:
        if job.facts.state == "queued":
            raise SandboxTimeout(
                f"Job {job.id} was sent to the kernel in sandbox {self.sandbox!r}, which is busy "
                f"for another client. It is interrupted as soon as it begins."
            )
        async with self._killing:
            if not job.is_over:
                await self._kill(f"{why}, and did not heed the interrupt: its kernel was killed")
