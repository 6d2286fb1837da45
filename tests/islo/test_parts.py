"""The parts by themselves: events and records in pieces, pushes, and a relay that lies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.islo import IsloClient
from sandbox_kernel.sandboxes.islo import handle as module
from sandbox_kernel.sandboxes.islo.pushes import PUSH, WINDOW, Pusher
from sandbox_kernel.sandboxes.islo.stream import Event, EventParser, RecordReader
from tests.helpers.waiting import settled, until

from ..hosted.sandboxes import LIMIT, sandbox

EVENTS = (
    b": a comment\n\n"
    b"event: stdout\r\ndata: plain\r\n\r\n"
    b'event: stdout\ndata: {"data": "wrapped \xc3\xa9\\n"}\n\n'
    b'event: stderr\ndata: "a string"\n\n'
    b'data: {"type": "stdout", "data": "named inside"}\n\n'
    b"event: stdout\ndata: two\ndata: lines\n\n"
    b'event: exit\ndata: {"exit_code": 0}\n\n'
)


@given(st.lists(st.integers(1, 40), min_size=1))
def test_events_do_not_care_where_they_are_cut(sizes: list[int]) -> None:
    """In any pieces they are the same, in all three wrappings."""
    parser, found, start = EventParser(), [], 0
    while start < len(EVENTS):
        for size in sizes:
            found += parser.feed(EVENTS[start : start + size])
            start += size
    assert [(event.name, event.text) for event in found[:-1]] == [
        ("stdout", "plain"),
        ("stdout", "wrapped é\n"),
        ("stderr", "a string"),
        ("stdout", "named inside"),
        ("stdout", "two\nlines"),
    ]
    assert found[-1].name == "exit"


def test_an_event_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can fill the host's memory with one event, be it one line or many."""
    monkeypatch.setattr("sandbox_kernel.sandboxes.islo.stream.MAX_EVENT", 1000)
    for piece in (b"data: " + b"x" * 2000, b"data: x\n" * 500):
        parser = EventParser()
        parser.feed(piece[:900])
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            parser.feed(piece)


def test_what_is_no_json_is_text() -> None:
    assert Event("stdout", "{not json").text == "{not json"
    assert Event("stdout", '{"other": 1}').text == '{"other": 1}'


@given(st.lists(st.integers(1, 9), min_size=1))
def test_records_do_not_care_where_they_are_cut(sizes: list[int]) -> None:
    """Nor whether line ends are kept."""
    text, records, found, start = "s1;\no aGk=;\r\nx0;\n;", RecordReader(), [], 0
    while start < len(text):
        for size in sizes:
            found += records.feed(text[start : start + size])
            start += size
    assert found == [("s", b"1"), ("o", b" aGk="), ("x", b"0")]


def test_a_record_without_an_end_is_not_kept() -> None:
    with pytest.raises(ValueError, match="without an end"):
        RecordReader().feed("o" + "A" * 300_000)


@pytest.mark.parametrize(
    "lie", ["a-1x;", "xno;", "o===A;", "x99999999999999999999;", "\U0001f600" * 10 + ";", "hx;"]
)
async def test_a_relay_that_lies_ends_its_own_stream_only(
    client: IsloClient, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """The sandbox is hostile: what is no record ends the stream, and the host is well."""
    async with sandbox(client) as handle:
        with monkeypatch.context() as patch:
            script = f"import time; print('s1;' + {lie!r}, flush=True)"
            command = ["python3", "-c", script + "; time.sleep(2)"]
            patch.setattr(module, "relay_command", lambda *_: command)
            stream = await handle.open_stream(["true"])
        await asyncio.wait_for(stream.read(), LIMIT)
        ended = await asyncio.gather(stream.wait(), return_exceptions=True)
        assert isinstance(ended[0], (SandboxError, int))
        await stream.close()
        assert (await handle.shell("echo well", timeout=LIMIT)).stdout == "well\n"


# --- pushes


class Sandbox:
    """Takes pushes, and lets some of them wait."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def execute(self, command: Sequence[str]) -> None:
        self.seen.append((command[5], command[6].partition(":")[2]))
        await self.gate.wait()


async def test_pushes_are_bounded_and_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of unacknowledged pushes, each as large as it may be; more waits in ``write``."""
    far = Sandbox()
    pusher = Pusher("/folder", far.execute)
    writing = asyncio.ensure_future(pusher.write(b"x" * PUSH * 20))
    await until(lambda: len(far.seen) >= WINDOW)
    await settled()
    assert not writing.done()
    assert [name for name, _ in far.seen] == [str(number) for number in range(WINDOW)]
    assert {len(text) for _, text in far.seen} == {PUSH // 3 * 4}
    pusher.acknowledged(3)
    await until(lambda: len(far.seen) >= WINDOW + 3)
    await settled()
    assert len(far.seen) == WINDOW + 3
    await pusher.close()
    with pytest.raises(BrokenPipeError):
        await writing


async def test_urgent_pushes_do_not_wait_for_the_window() -> None:
    far = Sandbox()
    pusher = Pusher("/folder", far.execute)
    writing = asyncio.ensure_future(pusher.write(b"x" * PUSH * 20))
    await until(lambda: len(far.seen) >= WINDOW)
    await pusher.urge("signal 2")
    assert far.seen[-1] == ("u0", "signal 2")
    await pusher.close()
    await asyncio.gather(writing, return_exceptions=True)


async def test_what_the_relay_misses_is_pushed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it has had its time to arrive; the same number, the same content."""
    monkeypatch.setattr("sandbox_kernel.sandboxes.islo.pushes._LATE", 0.0)
    far = Sandbox()
    pusher = Pusher("/folder", far.execute)
    await pusher.write(b"hi")
    await settled()
    pusher.missing(0)
    pusher.missing(7)
    await until(lambda: len(far.seen) >= 2)
    await settled()
    assert far.seen == [("0", "aGk="), ("0", "aGk=")]
    pusher.acknowledged(1)
    pusher.missing(0)
    await settled()
    assert len(far.seen) == 2
    await pusher.close()


async def test_a_flood_of_acknowledgements() -> None:
    """A hostile sandbox acknowledges as often as it likes; that costs next to nothing."""

    async def execute(command: object) -> None:
        """Nothing is pushed."""

    pusher = Pusher("/folder", execute)
    try:
        before = len(asyncio.all_tasks())
        for _ in range(10_000):
            pusher.acknowledged(1)
        assert len(asyncio.all_tasks()) <= before + 1
    finally:
        await pusher.close()
