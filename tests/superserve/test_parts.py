"""The parts without I/O: marks among a command's output, and a kernel's activity."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.jupyter.idle_pause import Activity
from sandbox_kernel.sandboxes import wrapped_command
from sandbox_kernel.sandboxes.wrapped_command import Marks

OUTPUT = st.lists(st.binary(max_size=30) | st.just(b"\0") | st.just(b"\n"), max_size=8)


@given(OUTPUT, OUTPUT, st.integers(1, 7))
def test_marks_are_found_wherever_the_output_is_cut(
    before: list[bytes], after: list[bytes], size: int
) -> None:
    """All words come, in order, and of the output nothing is lost or added."""
    marks = Marks()
    word = b"\0" + marks.mark.encode()
    stream = b"".join(before) + word + b" started 12 34\n" + b"".join(after) + word + b" exit -9\n"
    plain, words = b"", []
    for start in range(0, len(stream), size):
        more, found = marks.feed(stream[start : start + size])
        plain += more
        words += found
    assert words == ["started 12 34", "exit -9"]
    assert plain + marks.rest() == b"".join([*before, *after])


def test_a_mark_without_an_end_is_bounded() -> None:
    """Hostile output does not pile up."""
    marks = Marks()
    endless = b"\0" + marks.mark.encode() + b" " + b"x" * 10_000
    plain, words = marks.feed(endless)
    assert len(words) == 1
    assert plain + marks.rest() == b""


def test_what_the_sandbox_says_is_checked() -> None:
    """Numbers are numbers of a sane size, or nothing."""
    assert wrapped_command.process("12 345") == (12, "345")
    assert wrapped_command.process("12 ") == (12, "-")
    assert wrapped_command.exit_code("-9") == -9
    for words in ("", "x", "1 2 3", "9" * 50, "-1 0"):
        assert wrapped_command.process(words) is None
    for words in ("", "x", "1e5", "99999"):
        assert wrapped_command.exit_code(words) is None


def status(state: object, request: str = "a", kind: str = "status") -> list[bytes]:
    parts: tuple[dict[str, object], ...] = (
        {"msg_id": "1", "msg_type": kind},
        {"msg_id": request},
        {},
        {"execution_state": state},
    )
    encoded = [json.dumps(part).encode() for part in parts]
    return [b"kernel.1.status", b"<IDS|MSG>", b"signature", *encoded]


def test_a_kernel_is_idle_when_all_that_it_began_is_done() -> None:
    """Not before it has said anything, and not while one of several requests is at work."""
    activity = Activity(0.0)
    assert not activity.idle
    activity.hear(status("idle"), 1.0)
    assert (activity.idle, activity.changed, activity.topic) == (True, 1.0, b"kernel.1.status")
    activity.hear(status("busy", "a"), 2.0)
    activity.hear(status("busy", "b"), 3.0)
    activity.hear(status("idle", "a"), 4.0)
    assert not activity.idle
    activity.hear(status("idle", "b"), 5.0)
    assert activity.idle


def test_what_is_no_status_is_passed_over() -> None:
    """Other messages, and anything that a hostile kernel may send."""
    activity = Activity(0.0)
    for frames in (
        [],
        [b"x"],
        [b"<IDS|MSG>"],
        [b"<IDS|MSG>", *[b"{"] * 6],
        [b"<IDS|MSG>", *[b"[]"] * 6],
        [b"<IDS|MSG>", b"", b"{}", b"null", b"{}", b"{}"],
        [b"<IDS|MSG>", b"", *[b"[" * 100_000] * 5],
        status("idle", kind="stream"),
    ):
        activity.hear(frames, 1.0)
    assert not activity.idle
    assert activity.changed == 0.0
