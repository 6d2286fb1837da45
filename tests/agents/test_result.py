"""Result: what a cell came to, its text within a limit, its pictures, its error as an exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.agents.images import size_of
from sandbox_kernel.agents.result import (
    TEXT_LIMIT,
    CellError,
    ChangedFile,
    Image,
    OutputPage,
    Result,
    Status,
)
from sandbox_kernel.errors import CellFailed, CellTimeout, KernelError, SandboxTimeout

from .pictures import displayed, encoded, gif, jpeg, png, webp


def printed(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": ["ValueError"]}


def test_text_has_outputs_error_reason_and_files_in_this_order() -> None:
    """What a model reads: what was printed first, then what went wrong, then what changed."""
    result = Result(
        "error",
        3,
        outputs=[printed("one\n"), printed("two\n"), printed("oh\n", "stderr"), ERROR],
        error=CellError("ValueError", "no", ["Cell In[3], line 1\n----> 1 f()", "ValueError: no"]),
        files=[ChangedFile("a.csv", "created", 12), ChangedFile("b", "deleted", 0)],
        why="Ask for less.",
    )
    assert result.text.split("\n") == [
        *("one", "two", "[stderr]", "oh"),
        *("Cell In[3], line 1", "----> 1 f()", "ValueError: no"),
        "[Ask for less.]",
        "[files: 'a.csv' (created, 12 bytes), 'b' (deleted)]",
    ]
    assert result.error_text() == "Cell In[3], line 1\n----> 1 f()\nValueError: no"


@pytest.mark.parametrize("status", ["timeout", "cancelled", "died", "lost"])
def test_how_a_cell_ended_is_said(status: Status) -> None:
    """A cell that did not end by itself has no error; its text still says so, and why."""
    assert Result(status, why="out of memory").text.endswith(": out of memory]")
    assert Result(status).text.startswith("[")


def test_a_result_that_is_not_well_can_be_raised() -> None:
    """The exception has the result, and says where and what; a timeout is a TimeoutError, too."""
    fine = Result("ok")
    assert fine.raise_for_error() is fine
    assert fine.ok
    failed = Result("error", error=CellError("ValueError", "no"), sandbox="box-1")
    with pytest.raises(CellFailed, match="'box-1': ValueError: no") as raised:
        failed.raise_for_error()
    assert raised.value.result is failed
    assert isinstance(raised.value, KernelError)
    with pytest.raises(CellTimeout) as late:
        Result("timeout").raise_for_error()
    assert isinstance(late.value, SandboxTimeout)
    assert isinstance(late.value, TimeoutError)


def test_the_middle_of_long_output_is_left_out_with_a_way_to_read_it() -> None:
    """Beginning, end and error stay; the note counts what is missing and names the job."""
    lines = "".join(f"line {number}\n" for number in range(20_000))
    result = Result("error", outputs=[printed(lines)], error=CellError("E", "last"), job_id="j-7")
    text = result.text
    assert len(text) <= TEXT_LIMIT
    assert text.startswith("line 0\nline 1\n")
    assert text.endswith("line 19999\nE: last")
    assert "lines) left out; all of it: job.output(after=0) of job j-7, or the MCP tool" in text
    kept = text.replace("\nE: last", "").split("\n")
    assert all(line.startswith(("line ", "[... ")) for line in kept)
    missing = next(int(line.split()[3].strip("(")) for line in kept if line.startswith("[..."))
    assert missing == 20_000 - (len(kept) - 1)


@given(
    st.lists(st.text(max_size=300)),
    st.text(max_size=500),
    st.integers(0, 1000),
    st.lists(st.text(max_size=100), max_size=10),
)
def test_no_text_is_longer_than_its_limit(
    texts: list[str], why: str, limit: int, names: list[str]
) -> None:
    """Whatever was printed, said, raised or written."""
    result = Result(
        "error",
        outputs=[printed(text, text[:1]) for text in texts],
        error=CellError(why, why, texts),
        files=[ChangedFile(name, "changed", 1) for name in names],
        why=why,
        job_id=why,
    )
    assert len(result.text_for(limit)) <= limit


PICTURES = {
    "image/png": png(640, 480),
    "image/jpeg": jpeg(640, 480),
    "image/gif": gif(640, 480),
    "image/webp": webp(640, 480),
    "image/svg+xml": b'<?xml version="1.0"?><svg class="x" width="640px" height="480px">',
}


@pytest.mark.parametrize("mime", PICTURES)
def test_pictures_have_their_size(mime: str) -> None:
    """As bytes for the caller, and in words for a model, which sees no object's address."""
    data = PICTURES[mime]
    value = data.decode() if "svg" in mime else encoded(data)
    bundle = {mime: value, "text/plain": "<Figure size 640x480 with 1 Axes>"}
    result = Result("ok", outputs=[{"output_type": "display_data", "data": bundle}])
    assert result.images == [Image(mime, data, 640, 480)]
    assert result.text.startswith(f"[image: {mime} 640x480, ")


def test_the_size_of_an_svg_may_be_in_its_view_box() -> None:
    """As many programs write it."""
    assert size_of("image/svg+xml", b'<svg viewBox="0 0 30 20.4">') == (30, 20)
    assert size_of("image/svg+xml", b'<svg width="100%" height="1">') == (None, None)


@pytest.mark.parametrize(
    ("mime", "value"),
    [
        ("image/png", "not base64!"),
        ("image/png", ["a", 3, None]),
        ("image/png", {"no": "string"}),
        ("image/png", "=" * 1000),
        ("image/png", encoded(png(1, 1)).strip() + "!"),
        ("image/png", encoded(gif(1, 1))),
        ("image/svg+xml", "<html>"),
        ("image/jpeg", "é"),
    ],
)
def test_a_picture_that_is_none_is_left_out(mime: str, value: Any) -> None:
    """The text says that there was one; nothing is raised."""
    result = Result("ok", outputs=[{"output_type": "display_data", "data": {mime: value}}])
    assert result.images == []
    assert result.text == "" or result.text.startswith("[")


@given(st.sampled_from(sorted(PICTURES)), st.binary(max_size=200), st.integers(0, 60))
def test_headers_that_lie_or_end_early_give_no_size(mime: str, noise: bytes, cut: int) -> None:
    """Sizes are whole, positive and bounded, or not known."""
    for data in (noise, PICTURES[mime][:cut] + noise):
        width, height = size_of(mime, data)
        assert (width is None) == (height is None)
        assert width is None or 0 < width < 2**31


def test_a_jpeg_of_nothing_but_segments_is_given_up() -> None:
    """A header without an end costs no more than a bounded part of it."""
    assert size_of("image/jpeg", b"\xff\xd8" + b"\xff\xe1\x00\x02" * 10**6) == (None, None)
    assert size_of("image/jpeg", b"\xff\xd8" + b"\xff\xe1\x00\x00" * 10**6) == (None, None)
    assert size_of("image/jpeg", b"\xff\xd8" + b"\xff" * 10**6) == (None, None)


def test_a_page_of_output_is_text_in_full() -> None:
    """Who pages through output gets all of it."""
    page = OutputPage(2, [printed("x" * 100_000), displayed(text_plain="42")], done=False)
    assert page.text == "x" * 100_000 + "\n42"
