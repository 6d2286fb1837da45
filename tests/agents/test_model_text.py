"""Text made for a model: terminals, tracebacks, tables and MIME bundles, also hostile ones."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.agents.html_text import html_text
from sandbox_kernel.agents.model_text import (
    Reading,
    bundle_text,
    output_text,
    outputs_text,
    shortened,
)
from sandbox_kernel.agents.terminal_text import MOST_TEXT, terminal_text
from sandbox_kernel.agents.traceback_text import traceback_text

from .pictures import encoded, png


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("plain\n\ttext\n", "plain\n\ttext\n"),
        ("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07", "red link"),
        (" 10%|#   |\r 50%|##  |\r100%|####|\ndone", "100%|####|\ndone"),
        ("a longer line\rshort", "shortger line"),
        ("a longer line\r\x1b[Kshort", "short"),
        ("a longer line\x1b[2K\rshort", "short"),
        ("downloading...\b\b\bed", "downloadinged"),
        ("12\b\b34", "34"),
        ("\b\bx", "x"),
        ("\r\n", "\n"),
        ("one:  0%\ntwo:  0%\x1b[A\rone: 99%\n\rtwo: 50%", "one: 99%\ntwo: 50%"),
        ("\x1b[99A\x1b[0Ax", "x"),
        ("\x1b[9999999999Ax", "x"),
        ("\x1b", ""),
        ("\x1b[12;34", "\x1b[12;34"[2:]),
        ("bell\x07 and \x9b31m", "bell\\x07 and \\x9b31m"),
        ("right\u202eto left", "right\\u202eto left"),
        ("tag\U000e0041, half\ud800", "tag\\U000e0041, half\\ud800"),
        ("\x01\x02kept apart\r", "\\x01\\x02kept apart"),
    ],
)
def test_what_a_terminal_would_show(printed: str, shown: str) -> None:
    """Colours and overwritten text are gone; what could act or hide is written out."""
    assert terminal_text(printed) == shown


@given(st.text(st.sampled_from("\x1b[]()0;12AKm\r\n\b\x07 ab\\P\u202e\ud800\x9b"), max_size=200))
def test_nothing_controls_a_terminal(printed: str) -> None:
    """No control character but newlines and tabs, and it can be sent as UTF-8."""
    shown = terminal_text(printed)
    assert all(character >= " " or character in "\n\t" for character in shown)
    assert not any(character in shown for character in "\x7f\x9b\u202e")
    shown.encode()


def test_progress_bars_in_pieces_are_one_line() -> None:
    """Each update may be a message of its own."""
    pieces = [{"output_type": "stream", "name": "stderr", "text": f"\r{n}%"} for n in range(101)]
    assert outputs_text(pieces, 1000) == "[stderr]\n100%"


HUGE = 3_000_000
"""Characters: what is not linear in them would not end within this suite's time."""


@pytest.mark.parametrize(
    "piece", ["\r", "\b", "\x1b[", "\x1b[A", "\x1b]", "\x1bP", "\x1b[K", "x\r", "\x1b[9", "\n", "<"]
)
def test_hostile_text_costs_no_more_than_its_length(piece: str) -> None:
    """Repeated beginnings of everything that has an end."""
    text = piece * (HUGE // len(piece))
    assert len(terminal_text(text)) <= MOST_TEXT + 1000
    assert len(html_text(text)) <= HUGE
    long = terminal_text("x" * HUGE + piece)
    assert "characters left out" in long


@pytest.mark.parametrize(
    "piece",
    ["<!--", "<a", "<td>", "<tr>", "</table>", "<script>", "&#", "&", "<a href=", "<![", "<td "],
)
def test_hostile_html_costs_no_more_than_its_length(piece: str) -> None:
    """As above, for the tags and references of HTML."""
    assert len(html_text(piece * (HUGE // len(piece)))) < HUGE
    assert html_text("&#" + "9" * 100_000 + ";")


TABLE = """
<style scoped>.x {}</style><div><table border="1" class="dataframe">
  <thead><tr style="text-align: right;"><th></th><th>name</th><th>n</th></tr></thead>
  <tbody><tr><th>0</th><td>a &amp; <b>b</b></td><td>1</td></tr>
  <tr><th>1<td>unclosed<td></tr></tbody>
</table><p>2 r&eacute;sum&eacute;s</p><script>alert("<td>no</td>")</script></div>
"""


def test_tables_are_rows_with_bars() -> None:
    """Also where cells are not closed; what a browser does not show is not there."""
    assert html_text(TABLE).split("\n") == [
        *(" | name | n", "0 | a & b | 1", "1 | unclosed | "),
        "2 résumés",
    ]


def test_huge_tables_are_cut() -> None:
    """Rows, columns, cells, and HTML itself."""
    tall = html_text("<table>" + "<tr><td>x</td></tr>" * 3000)
    assert tall.endswith("[... 2000 rows left out ...]")
    wide = html_text("<tr>" + "<td>y</td>" * 300 + "</tr>")
    assert wide.endswith(" | [200 more]")
    assert len(html_text(f"<td>{'z' * 1000}</td>")) == 200
    assert html_text("a" * 2**19).endswith("[... the rest of the HTML left out ...]")


@given(st.text(st.sampled_from("<>/!-&;#xtdrtablestyle \"'=\n"), max_size=200))
def test_any_html_has_a_text(source: str) -> None:
    """There is nothing that it fails at."""
    assert isinstance(html_text(source), str)


PNG = encoded(png(2, 1))


@pytest.mark.parametrize(
    ("bundle", "shown"),
    [
        ({"text/plain": "   a\n0  1", "text/html": TABLE}, "   a\n0  1"),
        ({"text/html": "<table><tr><td>1</td><td>2</td></tr></table>"}, "1 | 2"),
        ({"text/plain": "<Styler at 0x7f>", "text/html": "<tr><td>1</td></tr>"}, "1"),
        ({"text/plain": "<object object at 0x7f>"}, "<object object at 0x7f>"),
        ({"text/plain": "<IPython.core.display.HTML object>", "text/html": "<script>"}, None),
        ({"text/plain": ["a", "\x1b[1mb"]}, "ab"),
        ({"text/markdown": "# Head", "text/plain": "<Markdown object>"}, "# Head"),
        ({"application/json": {"a": [1]}}, '{"a": [1]}'),
        ({"application/vnd.x+json": {}, "a/b": "xyz"}, "[output: application/vnd.x+json, a/b, "),
        ({"image/png": PNG, "text/plain": "<Figure size 2x1>"}, "[image: image/png 2x1, 68 bytes]"),
        ({"image/png": PNG, "text/plain": "a plot"}, "[image: image/png 2x1, 68 bytes]\na plot"),
        ({}, ""),
        (None, ""),
        (["image/png"], ""),
        ({"text/plain": 3, "image/png": None, "text/html": {}}, "[output: text/plain, image/png"),
        ({"application/json": float("nan"), "text/plain": 7}, "NaN"),
        ({"\x1b[31mx": "y"}, "[output: \\x1b[31mx, 1 bytes]"),
    ],
)
def test_the_plainest_of_a_bundle_is_shown(bundle: Any, shown: str | None) -> None:
    """Text before tables before data; a picture always, and an object's address only as a last
    resort."""
    text = bundle_text(bundle)
    assert text.startswith(bundle["text/plain"] if shown is None else shown)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=10,
)
FIELDS = st.sampled_from(["output_type", "data", "text", "name", "ename", "evalue", "traceback"])
KINDS = st.sampled_from(["stream", "error", "display_data", "execute_result", "new"])
MIMES = st.sampled_from(["text/plain", "text/html", "image/png", "image/svg+xml", "text/latex"])


@given(
    st.dictionaries(FIELDS, JSON),
    KINDS,
    st.dictionaries(MIMES, st.text() | JSON) | st.none(),
)
def test_any_output_has_a_text(output: dict[str, Any], kind: str, bundle: object) -> None:
    """Outputs are a sandbox's: fields may be missing, or of any type."""
    made = {**output, "output_type": kind, **({} if bundle is None else {"data": bundle})}
    output_text(made).encode()
    assert len(outputs_text([made, made], 300)) <= 300


def test_json_that_is_too_deep_is_said() -> None:
    """It cannot end the caller."""
    deep: Any = []
    for _ in range(sys.getrecursionlimit() * 10):
        deep = [deep]
    assert bundle_text({"application/json": deep}) == (
        "[output: application/json that cannot be shown]"
    )


CELL = "Cell In[4], line 2\n      1 import json\n----> 2 json.loads(text)\n"
LIBRARY = "File {}/python3.12/{}:{}, in f(x)\n    1 code\n--> 2 more\n"


def test_a_traceback_keeps_its_own_frames_and_folds_libraries() -> None:
    """Colours, rulers and headers are gone; where in the library it was is left as one line."""
    traceback = [
        "\x1b[31m" + "-" * 75 + "\x1b[39m",
        "\x1b[31mJSONDecodeError\x1b[39m                 Traceback (most recent call last)",
        "\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[4]\x1b[39m, line 2\n----> 2 f()\n",
        LIBRARY.format("/usr/lib", "json/__init__.py", 346),
        LIBRARY.format("/usr/lib", "json/decoder.py", 337),
        "File /workspace/helper.py:3, in <lambda>(x)\n----> 3 g()\n",
        LIBRARY.format("~/v/lib", "site-packages/pandas/core/frame.py", 12),
        "\x1b[31mJSONDecodeError\x1b[39m: Expecting value",
    ]
    assert traceback_text("JSONDecodeError: Expecting value", traceback).split("\n") == [
        *("Cell In[4], line 2", "----> 2 f()"),
        "[2 frames in libraries: json/__init__.py:346 ... json/decoder.py:337]",
        *("File /workspace/helper.py:3, in <lambda>(x)", "----> 3 g()"),
        "[in a library: pandas/core/frame.py:12]",
        "JSONDecodeError: Expecting value",
    ]


def test_chained_errors_stay_in_order() -> None:
    """What caused it is told, too."""
    link = "\nThe above exception was the direct cause of the following exception:\n"
    text = traceback_text("B: two\nlines", [CELL, "A: one", link, CELL, "B: two\nlines"])
    own = CELL.strip("\n")
    assert text == f"{own}\nA: one\n{link.strip()}\n{own}\nB: two\nlines"


def test_an_error_without_a_traceback_has_its_line() -> None:
    """Other kernels, and errors of the kernel's own."""
    assert traceback_text("E: x", []) == "E: x"
    assert traceback_text("E: x", ["anything\nat all"]) == "anything\nat all\nE: x"
    assert traceback_text("", [None, 3]) == ""


def test_endless_tracebacks_are_bounded() -> None:
    """Frames, lines and characters."""
    text = traceback_text("E: last", [CELL] * 1000 + ["Cell In[1], line 1\n" + "x" * 10**6])
    assert "frames left out ...]" in text
    assert text.endswith("E: last")
    assert len(text) < 10_000


@given(st.text(max_size=300), st.integers(0, 200))
def test_shortened_text_keeps_both_ends(text: str, limit: int) -> None:
    """At most the limit, and the text itself if it fits."""
    short = shortened(text, limit, Reading("job"))
    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text
    elif "left out" in short:
        assert text.startswith(short.split("[...")[0].rstrip("\n"))


def test_the_job_named_in_a_note_is_not_believed() -> None:
    """Its id came with a message."""
    assert "\x1b" not in shortened("x" * 500, 300, Reading("\x1b[2J" * 9))
