"""Going on with jobs that another process has started: what became of them since.

The recorder in the sandbox has the output; the journal says which jobs there were. The recording is
heard first, then what came live meanwhile, each message once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, get_args

from sandbox_kernel.agents.job_queue import JobQueue
from sandbox_kernel.agents.job_state import ENDED, JobState, State
from sandbox_kernel.agents.notebook_kernel import NotebookKernel
from sandbox_kernel.agents.recorded import RecordedNotebook
from sandbox_kernel.jupyter.envelopes import Envelope, open_envelope
from sandbox_kernel.live_notebooks import Journal

_UNSENT = "its caller ended before it was sent to the kernel"
_UNHEARD = "its caller ended while it was sent, and the kernel does not have it"
_AT_ONCE = 200
_LOOK = 0.25
_MOST_LOOKS = 20
"""How often the recording is read until it overlaps with what comes live."""


@dataclass
class EarlierJob:
    """What a journal says about a job."""

    id: str
    code: str
    cell_id: str
    silent: bool
    sent: bool = False
    asks: dict[str, Any] | None = None
    ended: State | None = None
    why: str = ""
    count: int | None = None


@dataclass
class _Live:
    """What came live, while the recording is heard."""

    messages: list[Envelope] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, envelope: Envelope) -> None:
        self.messages.append(envelope)
        self.came.set()


def read_journal(journal: Journal) -> list[EarlierJob]:
    """The jobs in the order in which they were queued. Blocks."""
    found: dict[str, EarlierJob] = {}
    for line in journal.read():
        if "job" in line:
            job_id, code, cell = (str(line.get(key, "")) for key in ("job", "code", "cell"))
            job = EarlierJob(job_id, code, cell, bool(line.get("silent")))
            found[job.id] = job
        for key, apply in _LINES.items():
            if key in line and (known := found.get(str(line[key]))) is not None:
                apply(known, line)
    return list(found.values())


def _asks(job: EarlierJob, line: dict[str, Any]) -> None:
    job.asks = line


def _answered(job: EarlierJob, line: dict[str, Any]) -> None:
    job.asks = None


def _sent(job: EarlierJob, line: dict[str, Any]) -> None:
    job.sent = True


def _ended(job: EarlierJob, line: dict[str, Any]) -> None:
    state = line.get("state")
    if state in ENDED:
        job.ended = next(s for s in get_args(State) if s == state)
        job.why, job.count = str(line.get("why", "")), line.get("count")


_LINES: dict[str, Callable[[EarlierJob, dict[str, Any]], None]] = {
    "sent": _sent,
    "asks": _asks,
    "answered": _answered,
    "end": _ended,
}


class CatchingUp:
    """``begin`` hears what there is; ``go_on`` ends when nothing of the recording is missing, which
    may take as long as the kernel is silent, or when the kernel is dead."""

    def __init__(
        self,
        queue: JobQueue,
        kernel: NotebookKernel,
        earlier: Iterable[EarlierJob],
        record: RecordedNotebook | None,
    ) -> None:
        self._queue = queue
        self._kernel = kernel
        self._earlier = [job for job in earlier if not (job.silent and job.ended)]
        self._record = record
        self._in_file: dict[str, list[dict[str, Any]]] = {}
        self._live = _Live()
        self._known: set[str] = set()
        self._next = 0

    async def begin(self) -> None:
        """Know the jobs, and hear the recording as it is now."""
        queue = self._queue
        for job in self._earlier:
            state = JobState(job.id, job.code, job.cell_id, silent=job.silent, sent=job.sent)
            state.orphan = True
            queue.enter(state)
            if self._record is not None and not job.silent:
                self._in_file[job.id] = self._record.know(state)
        queue.hear_iopub = self._live.hear
        running = [job for job in self._earlier if job.sent and not job.ended]
        queue.current = queue.jobs[running[-1].id] if running else None
        async with queue.held():
            queue.connect()
            await self._hear_recording()
            self._apply_journal()

    async def go_on(self) -> None:
        """Hear the rest of the recording, then what comes live."""
        queue = self._queue
        answer = asyncio.create_task(queue.probes.ask())
        try:
            for _ in range(_MOST_LOOKS):
                while not self._live.messages and not queue.death:
                    await self._ask_for_a_message()
                    await self._hear_recording()
                await self._hear_recording()
                if queue.death:
                    break
                if self._live.messages[0].id in self._known:
                    break
                await asyncio.sleep(_LOOK)
            queue.known = self._known
            waiting, queue.hear_iopub = self._live.messages, queue.heard
            for envelope in waiting:
                queue.heard(envelope)
            if not queue.death:
                await answer
            self._find_lost()
        finally:
            answer.cancel()
            queue.hear_iopub = queue.heard

    async def _ask_for_a_message(self) -> None:
        """Wait for a live message. Kernels say that they answer, if they do so while busy."""
        asking = asyncio.create_task(self._queue.probes.ask("control"))
        try:
            async with asyncio.timeout(_LOOK):
                await self._live.came.wait()
        except TimeoutError:
            pass
        finally:
            asking.cancel()

    async def _hear_recording(self) -> None:
        recording = await self._kernel.recorded(self._next)
        self._next = recording.next
        for number, parts in enumerate(recording.messages):
            envelope = open_envelope(parts)
            if envelope is not None and envelope.id not in self._known:
                self._known.add(envelope.id)
                self._queue.heard(envelope, _time_of(envelope))
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)

    def _apply_journal(self) -> None:
        """What the earlier processes knew, and the recording does not say."""
        queue = self._queue
        for job in self._earlier:
            known = queue.jobs.get(job.id)
            if known is None:
                continue
            facts = known.facts
            if job.ended:
                facts.restore(job.ended, job.why, job.count)
                if not facts.whole:
                    facts.outputs.clear(wait=False)
                    facts.outputs.load(self._in_file.get(job.id, []))
            elif not job.sent:
                queue.end(known, "lost", _UNSENT)
            elif job.asks is not None and not facts.is_over:
                facts.asked(job.asks)

    def _find_lost(self) -> None:
        """The kernel has answered a question, so it has read all that was sent to it before."""
        for job in self._earlier:
            known = self._queue.jobs.get(job.id)
            if known is not None and known.state == "queued":
                self._queue.end(known, "lost", _UNHEARD)


def _time_of(envelope: Envelope) -> float:
    """When the kernel sent a message, as it says."""
    try:
        return datetime.fromisoformat(str(envelope.header.get("date"))).timestamp()
    except (ValueError, OverflowError, OSError):
        return time.time()
