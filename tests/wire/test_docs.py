"""docs/wire.md says what the code does: its tables are compared with the code."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.guest import rekey
from sandbox_kernel.guest.agent import Agent
from sandbox_kernel.guest.commands import box
from sandbox_kernel.guest.control_calls import CALLS, ControlCalls
from sandbox_kernel.guest.egress import ways_out
from sandbox_kernel.guest.endpoints import CHANNELS
from sandbox_kernel.tunnel.endpoints import PRIORITY
from sandbox_kernel.wire import codec, connection, fdlink, frames, handshake, lines, mux, session
from sandbox_kernel.wire.codec import PREAMBLE
from sandbox_kernel.wire.frames import LINK_TYPES, SESSION_TYPES

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
UNITS = {"": 1, "bytes": 1, "s": 1, "KiB": 2**10, "MiB": 2**20}
TYPES = LINK_TYPES | SESSION_TYPES
NOT_LIMITS = {name for name, value in vars(frames).items() if name.isupper() and value in TYPES}
PRIORITIES = ("CONTROL", "URGENT", "INTERACTIVE", "OUTPUT", "BULK")


def table(*header: str) -> list[list[str]]:
    """The rows of the one table with these headings, without the marks of code."""
    start = PAGE.index(f"| {' | '.join(header)} |\n")
    rows: list[list[str]] = []
    for line in [*PAGE[start:].splitlines()[2:], ""]:
        if not line.startswith("|"):
            return rows
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == len(header), line
        rows.append(cells)
    raise AssertionError("the page ends with a table")


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_frame_types() -> None:
    """Numbers and names."""
    found = {row[1]: int(row[0]) for row in table("type", "name", "stream", "payload")}
    assert found == {name: getattr(frames, name) for name in found}
    assert set(found.values()) == TYPES


def test_limits() -> None:
    """Every limit has the value of its constant, and every constant of the protocol is there."""
    found = set()
    for what, value, constant in table("limit", "value", "constant"):
        (path,) = names(constant)
        holder, _, name = f"sandbox_kernel.{path}".rpartition(".")
        number, _, unit = value.partition(" ")
        expected = float(number.replace(",", "")) * UNITS[unit]
        assert getattr(importlib.import_module(holder), name) == expected, what
        found.add(path)
    for module in (frames, codec, session, mux, connection, lines, fdlink):
        short = module.__name__.removeprefix("sandbox_kernel.")
        source = inspect.getsource(module)
        defined = {
            name
            for line in re.findall(r"^([A-Z][A-Z_, ]+) = ", source, re.M)
            for name in line.split(", ")
            if isinstance(getattr(module, name), int | float)
        }
        missing = defined - NOT_LIMITS - {*PRIORITIES}
        assert {f"{short}.{name}" for name in missing} <= found


def test_priorities() -> None:
    """Numbers and names, and which channel has which."""
    rows = table("number", "name", "used for")
    named = {row[1]: int(row[0]) for row in rows if row[1]}
    assert named == {n: getattr(mux, n) for n in PRIORITIES}
    assert [int(row[0]) for row in rows if not row[1]] == [ways_out.PRIORITY]
    channels = {
        target.removeprefix("kernel:"): int(number)
        for number, _, used in rows
        for target in names(used)
        if target.startswith("kernel:")
    }
    assert channels == PRIORITY


def test_handshake_fields() -> None:
    """Each with its type."""
    rows = table("frame", "field", "type", "is")
    for frame, kind in (
        ("HELLO", handshake.Hello),
        ("WELCOME", handshake.Welcome),
        ("REFUSE", handshake.Refuse),
    ):
        documented = {names(row[1])[0]: row[2] for row in rows if row[0] == frame}
        assert documented == {name: hint.__name__ for name, hint in kind.__annotations__.items()}


def test_refusals() -> None:
    """Every code has its reason."""
    codes = {code for _, answer in table("HELLO", "answer") for code in names(answer)}
    assert codes == set(handshake.REFUSALS)


def test_targets() -> None:
    """The kernel's channels, and the others."""
    found = {target for row in table("target", "is") for target in names(row[0])}
    assert found == {"control", "recorded:N", "workspace", *(f"kernel:{c}" for c in CHANNELS)}


def test_targets_of_a_box() -> None:
    """Those of process 1 of a BoxLite box."""
    found = {names(row[0])[0].partition(":")[0] for row in table("stream to process 1", "is")}
    assert found == {box.REQUEST, box.STDIO, box.STDERR}


def test_the_preamble_and_the_codecs() -> None:
    """As they are written in the text."""
    assert repr(PREAMBLE.decode())[1:-1] in PAGE
    assert f"({len(PREAMBLE)} bytes" in PAGE
    assert "`CODEC` is " + " or ".join(f"`{name}`" for name in codec.CODECS) in PAGE


def test_re_key_requests() -> None:
    """All fields are named."""
    text = PAGE[PAGE.index("A re-key request has the fields") :].partition("all ASCII")[0]
    assert tuple(names(text)) == rekey.FIELDS


def calls() -> dict[str, list[str]]:
    return {names(row[0])[0]: row for row in table(*CALL_HEADER)}


CALL_HEADER = ("call", "arguments", "fields of the result", "does")


def test_control_calls_and_their_arguments() -> None:
    """Optional ones with a question mark."""
    assert set(calls()) == set(CALLS)
    for name, row in calls().items():
        parameters = inspect.signature(getattr(ControlCalls, name)).parameters
        expected = [
            f"`{parameter.name}`" + ("" if parameter.default is parameter.empty else "?")
            for parameter in parameters.values()
            if parameter.name != "self"
        ]
        assert row[1] == ", ".join(expected), name


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("info", {}),
        ("status", {}),
        ("signal", {"signum": 0}),
        ("usage", {}),
        ("lease", {"seconds": 60}),
        ("record", {"limit": 0}),
        ("kill", {}),
        ("shutdown", {}),
    ],
)
def test_results_of_control_calls(tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    """All fields are named. (``launch`` answers as ``status``, and ``logs`` with text.)"""
    agent = Agent(str(tmp_path), 60.0)
    agent.kernel.pid = os.getpid()  # for ``usage``; it does not run, so it is not signalled
    result = agent.targets.calls[name](**arguments)
    cell = calls()[name][2]
    if cell == "as `status`":
        cell = calls()["status"][2]
    assert list(result) == names(cell)
    agent.loop.close()
