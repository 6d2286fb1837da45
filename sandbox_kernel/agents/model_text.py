"""A cell's outputs as text for a model, which pays for each character and cannot see pictures.

``Result.text`` and the MCP tools are made from it. Outputs are those of nbformat 4; their contents
come from the sandbox and may be anything: nothing of them is run, and the work is linear in their
length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.agents.html_text import html_text
from sandbox_kernel.agents.images import described, in_bytes, joined, picture_of
from sandbox_kernel.agents.terminal_text import ends_of, plain, terminal_text
from sandbox_kernel.agents.traceback_text import traceback_text

_PLAIN, _HTML, _JSON = "text/plain", "text/html", "application/json"
_READABLE = ("text/markdown", "text/latex")
_MOST_KINDS = 20
_REPR = re.compile(r"<[^\n]{0,500}>(?: at 0x[0-9a-f]+)?")
"""How an object describes itself that has nothing to say in text."""


@dataclass(frozen=True)
class Reading:
    """How to read what was left out of a text."""

    job_id: str = ""

    @property
    def how(self) -> str:
        if not self.job_id:
            return ""
        job = plain(self.job_id[:100])
        return f"; all of it: job.output(after=0) of job {job}, or the MCP tool `poll`"


def outputs_text(
    outputs: Iterable[Mapping[str, Any]], limit: int | None, reading: Reading = Reading()
) -> str:
    """Outputs in order, at most ``limit`` characters: of more, the middle is left out."""
    text = join_parts(output_text(output) for output in _merged(outputs))
    return text if limit is None else shortened(text, limit, reading)


def error_text(line: str, traceback: Sequence[object], limit: int) -> str:
    """An error and the frames of its traceback that matter, at most ``limit`` characters. Its last
    line, which says what went wrong, is kept."""
    return shortened(traceback_text(line, traceback), limit)


def shortened(text: str, limit: int, reading: Reading = Reading()) -> str:
    """A text of at most ``limit`` characters, without the middle of what is longer. The note there
    tells how much is missing, and how to read it. Whole lines are kept where there are any."""
    if len(text) <= limit:
        return text
    longest = _note(len(text), len(text), reading)
    room = limit - len(longest)
    if room < 2:
        return text[: max(0, limit)]
    head, tail = room // 2, room - room // 2
    begin, end = text[:head], text[len(text) - tail :]
    cut = begin.rfind("\n", head * 3 // 4)
    begin = begin[: cut + 1] if cut >= 0 else begin + "\n"
    cut = end.find("\n", 0, tail // 4)
    end = end[cut:] if cut >= 0 else "\n" + end
    left_out = text[len(begin.rstrip("\n")) : len(text) - len(end.lstrip("\n"))].strip("\n")
    return begin + _note(len(left_out), left_out.count("\n") + 1, reading) + end


def _note(characters: int, lines: int, reading: Reading) -> str:
    return f"[... {characters} characters ({lines} lines) left out{reading.how} ...]"


def join_parts(parts: Iterable[str]) -> str:
    """Texts on lines of their own; empty ones are left out."""
    return "\n".join(text for part in parts if (text := part.rstrip("\n")))


def output_text(output: Mapping[str, Any]) -> str:
    """One output; empty if it has nothing to say."""
    kind = output.get("output_type")
    if kind == "stream":
        text = terminal_text(joined(output.get("text")))
        return f"[stderr]\n{text}" if output.get("name") == "stderr" and text.strip() else text
    if kind in ("execute_result", "display_data", "update_display_data"):
        return bundle_text(output.get("data"))
    if kind == "error":
        name, value = _word(output.get("ename")), _word(output.get("evalue"))
        traceback = output.get("traceback")
        line = f"{name}: {value}" if value else name
        return traceback_text(line, traceback if isinstance(traceback, list) else [])
    return ""


def bundle_text(bundle: object) -> str:
    """A MIME bundle: a picture with its size, else the plainest text there is."""
    if not isinstance(bundle, Mapping):
        return ""
    said = terminal_text(joined(bundle.get(_PLAIN)))
    only_repr = _REPR.fullmatch(said.strip()) is not None
    mime, picture = picture_of(bundle)
    if picture:
        shown = described(mime, picture)
        return shown if only_repr or not said.strip() else f"{shown}\n{said}"
    if said.strip() and not only_repr:
        return said
    for kind in _READABLE:
        if text := joined(bundle.get(kind)):
            return terminal_text(text)
    if (source := joined(bundle.get(_HTML))) and (text := html_text(source)):
        return terminal_text(text)
    if said.strip():
        return said
    if _JSON in bundle:
        return terminal_text(_json(bundle[_JSON]))
    kinds = [_kind(key, value) for key, value in list(bundle.items())[:_MOST_KINDS]]
    return f"[output: {', '.join(kinds)}]" if kinds else ""


def _merged(outputs: Iterable[object]) -> Iterable[Mapping[str, Any]]:
    """Outputs with what was printed in several pieces put together: a progress bar has many."""
    name: object = None
    pieces: list[str] = []
    for output in outputs:
        if not isinstance(output, Mapping):
            continue
        stream = output.get("output_type") == "stream"
        if pieces and not (stream and output.get("name") == name):
            yield {"output_type": "stream", "name": name, "text": pieces}
            pieces = []
        if stream:
            name = output.get("name")
            pieces.append(joined(output.get("text")))
        else:
            yield output
    if pieces:
        yield {"output_type": "stream", "name": name, "text": pieces}


def _kind(key: object, value: object) -> str:
    text = joined(value)
    size = f", {in_bytes(len(text))}" if text else ""
    return plain(ends_of(str(key), 100)) + size


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=None)
    except (TypeError, ValueError, RecursionError):
        return f"[output: {_JSON} that cannot be shown]"


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""
