"""Jobs without I/O: what a kernel's messages say about the cells that were sent to it.

A job is one execute_request, and its id is that message's. Only messages with this parent change
its state, so what other clients of the same kernel do is not mistaken for it. The messages come
from the sandbox: live, or from the recording that its agent keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox_kernel.agents.outputs import (
    LIMIT,
    CellOutputs,
    Output,
    as_output,
    bundle,
    count_of,
    json_object,
)

State = Literal[
    "queued", "running", "waiting for input", "done", "failed", "cancelled", "died", "lost"
]
ENDED = frozenset({"done", "failed", "cancelled", "died", "lost"})
MAX_IN_ALL = 128 * 2**20
"""Bytes of all outputs of a notebook beyond which its next cells keep little."""
_LITTLE = 2**18
_MAX_PROMPT, _MAX_DISPLAY_ID, _MAX_DISPLAYS, _MAX_SAME_DISPLAY = 10_000, 500, 10_000, 100
_SKIPPED = "the kernel skipped it, as an earlier cell had failed"


@dataclass(frozen=True)
class InputRequest:
    """What a cell asks its user for."""

    prompt: str
    password: bool


@dataclass
class JobState:
    """One cell on its way through the kernel."""

    id: str
    code: str
    cell_id: str
    silent: bool = False
    """It is not recorded in the notebook."""
    store: bool = True
    state: State = "queued"
    why: str = ""
    """Why it did not end by itself."""
    allow_input: bool = True
    expressions: dict[str, str] = field(default_factory=dict)
    """What the kernel evaluates afterwards, for whoever reads the ``reply``."""
    sent: bool = False
    told: bool = False
    """Whoever records the notebook has heard that it began."""
    interrupted: bool = False
    timed_out: bool = False
    end_wanted: str = ""
    """Why somebody has interrupted it; empty if nobody has."""
    execution_count: int | None = None
    error: dict[str, Any] | None = None
    prompt: InputRequest | None = None
    began: float = 0.0
    ended: float = 0.0
    outputs: CellOutputs = field(default_factory=CellOutputs)
    orphan: bool = False
    """Another process has sent it, which the kernel's answer went to."""
    whole: bool = False
    """What came of it came from its beginning on."""
    reply: Mapping[str, Any] | None = None
    """The content of the kernel's answer."""
    _idle: bool = False

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def duration(self) -> float:
        passed = self.ended - self.began if self.began and self.ended else 0.0
        return max(0.0, passed) if math.isfinite(passed) else 0.0

    @property
    def half_over(self) -> bool:
        """The kernel has answered, or told the end on the other channel, but not both."""
        return not self.is_over and (self._idle or self.reply is not None)

    def hear(self, kind: str, content: Mapping[str, Any], at: float) -> None:
        """A message of the iopub channel that is no output."""
        if kind == "status" and not self.is_over:
            state = content.get("execution_state")
            if state == "busy":
                self.whole = True
                self._begin(at)
            elif state == "idle":
                self._idle = True
                self.ended = at
                self._end_if_all_is_there()
        elif kind == "execute_input":
            self.whole = True
            self._begin(at)
            self.execution_count = count_of(content) or self.execution_count

    def _begin(self, at: float) -> None:
        if self.state == "queued":
            self.state, self.began = "running", at

    def hear_output(self, output: dict[str, Any], at: float) -> None:
        """The job goes on: what it had asked for has been answered."""
        self._begin(at)
        if self.state == "waiting for input":
            self.answered()
        if output["output_type"] == "error" and not self.is_over:
            self.error = output

    def replied(self, content: Mapping[str, Any]) -> None:
        """The kernel's answer on the shell channel."""
        self.reply = content
        self.execution_count = count_of(content) or self.execution_count
        if content.get("status") == "error" and self.error is None:
            self.error = as_output("error", content)
        self._end_if_all_is_there()

    def asked(self, content: Mapping[str, Any]) -> None:
        """The cell wants input."""
        if not self.is_over:
            prompt = str(content.get("prompt", ""))[:_MAX_PROMPT]
            self.prompt = InputRequest(prompt, bool(content.get("password")))
            self.state = "waiting for input"
            self.outputs.version += 1

    def answered(self) -> None:
        self.prompt = None
        if self.state == "waiting for input":
            self.state = "running"

    def settle(self, at: float = 0.0) -> None:
        """End it with what is there: the rest will not come."""
        if self.is_over:
            return
        status = self.reply.get("status") if self.reply is not None else None
        failed = status == "error" or (status is None and self.error is not None)
        if failed and self.end_wanted:
            self.end("cancelled", self.end_wanted, at)
        elif status in ("aborted", "abort"):
            self.end("cancelled", self.end_wanted or _SKIPPED, at)
        else:
            self.end("failed" if failed else "done", "", at)

    def end(self, state: State, why: str, at: float) -> None:
        """It is over. Nothing changes its state afterwards."""
        if not self.is_over:
            self.state, self.why, self.prompt = state, why, None
            self.ended = self.ended or at
            self.outputs.version += 1

    def restore(self, state: State, why: str, count: object) -> None:
        """It ended in an earlier process, which noted how."""
        self.state, self.why, self.prompt = state, why, None
        self.execution_count = count_of({"execution_count": count}) or self.execution_count

    def begin_anew(self) -> None:
        """Before the recording is heard, which has everything from the job's beginning."""
        self.outputs = CellOutputs(self.outputs.limit)
        self._idle = False

    def _end_if_all_is_there(self) -> None:
        if self._idle and (self.reply is not None or self.orphan):
            self.settle()


class JobTable:
    """The jobs of one kernel, by id, in the order in which they were queued."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobState] = {}
        self._displays: dict[str, list[tuple[JobState, Output]]] = {}

    def add(self, job: JobState) -> None:
        self.jobs[job.id] = job
        job.outputs.limit = LIMIT if self._room() else _LITTLE

    def _room(self) -> bool:
        return sum(job.outputs.size for job in self.jobs.values()) < MAX_IN_ALL

    def forget(self, job: JobState) -> None:
        """A job that nobody asks for again."""
        self.jobs.pop(job.id, None)

    def hear(
        self, kind: str, parent: str, content: Mapping[str, Any], size: int, at: float
    ) -> JobState | None:
        """A message of the iopub channel; the job that it belongs to, if it is one of ours."""
        job = self.jobs.get(parent)
        if kind == "update_display_data":
            self._update(job, content, size)
        elif job is None:
            return None
        elif kind == "clear_output":
            job.outputs.clear(wait=bool(content.get("wait")))
        elif (value := as_output(kind, content)) is not None:
            job.hear_output(value, at)
            self._note_display(job, job.outputs.add(value, size), content)
        else:
            job.hear(kind, content, at)
        return job

    def _note_display(self, job: JobState, output: Output, content: Mapping[str, Any]) -> None:
        display = _display_id(content)
        if display:
            known = self._displays.setdefault(display, [])
            known[:] = [*known[-_MAX_SAME_DISPLAY:], (job, output)]
            if len(self._displays) > _MAX_DISPLAYS:
                del self._displays[next(iter(self._displays))]

    def _update(self, job: JobState | None, content: Mapping[str, Any], size: int) -> None:
        display = _display_id(content)
        data, metadata = bundle(content.get("data")), json_object(content.get("metadata"))
        shown_in = self._displays.get(display, ())
        for owner, output in shown_in:
            owner.outputs.replace(output, data, metadata)
        if shown_in:
            (job or shown_in[-1][0]).outputs.tell_update(display, data, size)


def _display_id(content: Mapping[str, Any]) -> str:
    transient = content.get("transient")
    found = transient.get("display_id") if isinstance(transient, dict) else None
    return found if isinstance(found, str) and len(found) <= _MAX_DISPLAY_ID else ""
