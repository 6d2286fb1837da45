"""Jobs without I/O: their states, and their outputs within bounds, message by message."""

from __future__ import annotations

import json
from typing import Any

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_kernel.agents.job_state import JobState, JobTable
from sandbox_kernel.agents.outputs import CellOutputs, as_output

Message = tuple[str, dict[str, Any]]


class Kernel:
    """Feeds a table as a kernel's messages would."""

    def __init__(self) -> None:
        self.table = JobTable()

    def job(self, name: str = "a") -> JobState:
        job = JobState(name, "code", name)
        self.table.add(job)
        return job

    def say(self, kind: str, parent: str = "a", **content: Any) -> None:
        self.table.hear(kind, parent, content, len(json.dumps(content)), at=1.0)

    def run(self, *messages: Message, parent: str = "a") -> None:
        """Busy, these, and idle."""
        self.say("status", parent, execution_state="busy")
        for kind, content in messages:
            self.say(kind, parent, **content)
        self.say("status", parent, execution_state="idle")


def stream(text: str, name: str = "stdout") -> Message:
    return "stream", {"name": name, "text": text}


def test_a_job_is_done_when_both_channels_say_so() -> None:
    """The reply may come before or after the last output."""
    for reply_first in (True, False):
        kernel = Kernel()
        job = kernel.job()
        kernel.say("status", execution_state="busy")
        assert job.state == "running"
        if reply_first:
            job.replied({"status": "ok", "execution_count": 3})
            assert job.half_over
        kernel.say("status", execution_state="idle")
        if not reply_first:
            assert job.half_over
            job.replied({"status": "ok", "execution_count": 3})
        assert (job.state, job.execution_count) == ("done", 3)


def test_a_job_of_another_process_needs_no_reply() -> None:
    """That went to the process that sent it; an error among the outputs tells that it failed."""
    for messages, state in (((), "done"), ((("error", {"ename": "E"}),), "failed")):
        kernel = Kernel()
        job = kernel.job()
        job.orphan = True
        kernel.run(*messages)
        assert job.state == state


def test_messages_of_others_change_nothing() -> None:
    """Other clients of the kernel run cells, too."""
    kernel = Kernel()
    job = kernel.job()
    kernel.run(stream("theirs"), parent="somebody's")
    assert (job.state, job.outputs.merged()) == ("queued", [])


@pytest.mark.parametrize(
    ("reply", "wanted", "state", "why"),
    [
        ({"status": "error", "ename": "E"}, "", "failed", ""),
        ({"status": "error", "ename": "KeyboardInterrupt"}, "stop", "cancelled", "stop"),
        ({"status": "ok"}, "stop", "done", ""),
        ({"status": "aborted"}, "", "cancelled", "skipped"),
    ],
)
def test_how_a_job_ended(reply: dict[str, Any], wanted: str, state: str, why: str) -> None:
    """An interrupted cell is cancelled only if it did not end well all the same."""
    kernel = Kernel()
    job = kernel.job()
    job.end_wanted = wanted
    kernel.run()
    job.replied(reply)
    assert job.state == state
    assert why in job.why


def test_what_is_over_stays_over() -> None:
    """Later messages, of a thread that a cell has left, add output and change no state."""
    kernel = Kernel()
    job = kernel.job()
    job.end("died", "gone", at=2.0)
    kernel.run(stream("late"), ("error", {"ename": "E"}))
    job.replied({"status": "ok"})
    assert (job.state, job.why, job.error) == ("died", "gone", None)
    assert job.outputs.merged()[0]["text"] == "late"


def test_input_is_asked_for_and_answered() -> None:
    """Output after the question shows that somebody has answered it."""
    kernel = Kernel()
    job = kernel.job()
    kernel.say("status", execution_state="busy")
    job.asked({"prompt": "who?", "password": True})
    assert job.state == "waiting for input"
    assert job.prompt is not None
    assert (job.prompt.prompt, job.prompt.password) == ("who?", True)
    kernel.say("stream", name="stdout", text="x")
    assert [job.state, job.prompt] == ["running", None]


def test_streams_are_merged_like_nbclient_does() -> None:
    """Texts of one stream that follow each other are one output."""
    kernel = Kernel()
    job = kernel.job()
    kernel.run(stream("a"), stream("b"), stream("c", "stderr"), stream("d"))
    assert [(o["name"], o["text"]) for o in job.outputs.merged()] == [
        ("stdout", "ab"),
        ("stderr", "c"),
        ("stdout", "d"),
    ]


def test_a_reader_that_keeps_up_gets_everything() -> None:
    """However much there is; one that comes late gets beginning and end, and the number between."""
    outputs = CellOutputs(limit=20_000)
    read, cursor = [], 0
    for number in range(1000):
        outputs.add({"output_type": "stream", "name": "stdout", "text": f"{number}\n"}, 10)
        cursor, items, dropped = outputs.page(cursor)
        read += [int(item["text"]) for item in items]
        assert not dropped
    assert read == list(range(1000))
    _, items, dropped = outputs.page(0)
    assert dropped == 1000 - len(items) > 0
    text = "".join(output["text"] for output in outputs.merged())
    assert text.startswith("0\n1\n")
    assert text.endswith("999\n")
    assert f"{dropped} outputs" in text
    assert outputs.size <= 20_000


def test_one_output_that_is_too_big_is_cut() -> None:
    """A stream keeps its end; other outputs, which have no use in part, say their size."""
    outputs = CellOutputs(limit=100_000)
    outputs.add({"output_type": "stream", "name": "stdout", "text": "x" * 10**6 + "end"}, 10**6)
    picture = {"image/png": "x" * 10**6}
    value = as_output("display_data", {"data": picture, "metadata": {}})
    assert value is not None
    outputs.add(value, 10**6)
    text, picture_note = outputs.merged()
    assert text["text"].endswith("xend")
    assert "left out here" in text["text"]
    assert "left out" in picture_note["data"]["text/plain"]
    assert outputs.size < 100_000


def test_a_display_is_updated_wherever_it_is() -> None:
    """In the cell that showed it; a reader of the cell that updates it gets the new content."""
    kernel = Kernel()
    first, second = kernel.job("a"), kernel.job("b")
    shown = {"data": {"text/plain": "old"}, "transient": {"display_id": "d"}}
    kernel.run(("display_data", shown), parent="a")
    cursor = second.outputs.page(0)[0]
    for number in range(5):
        new = {"data": {"text/plain": f"new {number}"}, "transient": {"display_id": "d"}}
        kernel.run(("update_display_data", new), parent="b")
    assert first.outputs.merged()[0]["data"] == {"text/plain": "new 4"}
    assert second.outputs.merged() == []
    items = second.outputs.page(cursor)[1]
    assert [item["data"]["text/plain"] for item in items] == ["new 4"]


def test_clearing_waits_for_the_next_output() -> None:
    """A progress bar that clears and prints keeps one output."""
    kernel = Kernel()
    job = kernel.job()
    for number in range(100):
        kernel.run(("clear_output", {"wait": True}), stream(f"{number} %"))
    assert [o["text"] for o in job.outputs.merged()] == ["99 %"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
KINDS = ("stream", "display_data", "execute_result", "error", "clear_output", "status", "x")
FIELDS = ("name", "text", "data", "metadata", "ename", "evalue", "traceback", "execution_count")


CONTENTS = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), CONTENTS), max_size=3))
def test_whatever_comes_is_valid_in_a_notebook(messages: list[Message]) -> None:
    """Outputs of any content are valid nbformat 4.5, and strict JSON."""
    kernel = Kernel()
    job = kernel.job()
    kernel.run(*messages)
    outputs = job.outputs.merged()
    json.dumps(outputs, allow_nan=False)
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": "", "outputs": outputs}
    notebook = {"cells": [cell | {"execution_count": job.execution_count}], "metadata": {}}
    nbformat.validate(notebook | {"nbformat": 4, "nbformat_minor": 5})
