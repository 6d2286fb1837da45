"""Reading audits: merged, followed across rotations, and what the command shows."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.audit.event_log import AuditLog
from sandbox_kernel.audit.reading import Follower, audits, merged
from sandbox_kernel.cli import main
from sandbox_kernel.cli.commands.audit import shown_event
from sandbox_kernel.gateway.audit import egress_event
from sandbox_kernel.untrusted_text import printable

START = datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc)


def event(second: int, **facts: Any) -> dict[str, Any]:
    time = (START + timedelta(seconds=second)).isoformat(timespec="milliseconds")
    return {"time": time, "kind": "exec", **facts}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path))
    (tmp_path / "audit").mkdir(mode=0o700)
    return tmp_path / "audit"


def test_audits_are_merged_by_time(folder: Path) -> None:
    for name, seconds in (("local-a", (0, 2, 4)), ("local-b", (1, 3)), ("islo-c", ())):
        for second in seconds:
            AuditLog(folder / f"{name}.jsonl")(event(second, n=second))
    found = [e["n"] for e in merged(audits(folder))]
    assert found == [0, 1, 2, 3, 4]
    assert [e["n"] for e in merged(audits(folder), since=START + timedelta(seconds=3))] == [3, 4]
    assert audits(folder / "none") == []


def test_thousands_of_audits_need_few_open_files(folder: Path) -> None:
    """Also large ones; and what is rotated while it is read is read to its end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(300):
        AuditLog(folder / f"local-{number}.jsonl")(event(number, n=number))
    write = AuditLog(folder / "local-big.jsonl", max_bytes=60_000)
    for number in range(400):
        write(event(1000 + number, n=number, text="x" * 500))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
    try:
        events = merged(audits(folder))
        found = [next(events)["n"] for _ in range(310)]
        for number in range(400, 450):
            write(event(1000 + number, n=number, text="x" * 500))
        found += [e["n"] for e in events]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found[:700] == [*range(300), *range(400)]


def test_new_events_are_seen_across_rotations_and_in_new_files(folder: Path) -> None:
    """Nothing is lost and nothing comes twice, also if a file is rotated several times between two
    looks, and while a line is being written."""
    path = folder / "local-a.jsonl"
    write = AuditLog(path, max_bytes=250, kept=9)
    write(event(0, n=-1))
    follower = Follower(folder, lambda path: True)
    assert follower.new() == []
    seen, written = [], 0
    for burst in (1, 1, 8, 2, 5, 1, 1, 12):
        for _ in range(burst):
            write(event(written, n=written))
            written += 1
        seen += [e["n"] for e in follower.new()]
    assert seen == list(range(written))
    assert (folder / "local-a.jsonl.3").exists(), "it was rotated"
    AuditLog(folder / "local-b.jsonl")(event(99, n="other"))
    with open(folder / "local-b.jsonl", "a") as torn:
        torn.write('{"kind": "ex')
        torn.flush()
        assert [e["n"] for e in follower.new()] == ["other"]
        torn.write('ec", "n": "whole"}\n')
    assert [e["n"] for e in follower.new()] == ["whole"]
    only = Follower(folder, [path].__contains__)
    AuditLog(folder / "local-b.jsonl")(event(99, n="other"))
    assert only.new() == []


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    capsys.readouterr()
    assert main(["audit", *arguments]) == code
    return capsys.readouterr().out.splitlines()


def test_what_the_command_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Aligned and escaped lines; sandboxes by name, beginning or notebook."""
    by = {"user": "ada", "pid": 7, "program": "jupyter-lab"}
    first = AuditLog(folder / "local-kernel-1.jsonl")
    second = AuditLog(folder / "islo-other.jsonl")
    first(event(0, sandbox="kernel-1", argv=["ls", "-l"], by=by, notebook="/home/ada/work.ipynb"))
    cell = {"told_by": "guest", "execution_count": 3, "id": "c"}
    denied = egress_event("deny", sandbox="kernel-1", host="a.example", port=443, reason="no rule")
    first({**denied, "time": event(1)["time"], "cell": cell})
    second({**event(2), "kind": "odd\x1b[31m\n", "sandbox": "other", "x\x07": "\x1b]0;t\x07\u202e"})
    lines = shown(capsys)
    assert len(lines) == 3
    assert lines[0].endswith(
        '  kernel-1  exec              argv=["ls", "-l"]  work.ipynb  by ada (jupyter-lab, pid 7)'
    )
    assert lines[1].endswith(
        "  kernel-1  deny              a.example:443  no rule  [3] (says the guest)"
    )
    assert all(character.isprintable() for line in lines for character in line)
    assert lines[2].index("other") == lines[0].index("kernel-1")
    assert shown(capsys, "kern") == lines[:2]
    assert shown(capsys, "/home/ada/work.ipynb") == lines[:2]
    assert shown(capsys, "--denied") == [lines[1]]
    assert shown(capsys, "--since", "2026-01-31T12:00:02+00:00") == [lines[2]]
    assert [json.loads(line)["kind"] for line in shown(capsys, "--json")][:2] == ["exec", "egress"]
    assert shown(capsys, "missing", code=1) == []
    assert shown(capsys, "missing.ipynb", code=1) == []
    assert main(["audit", "--since", "soon"]) == 2
    assert shown(capsys, "--since", "9" * 5000 + "d") == lines, "since ever"
    AuditLog(folder / "local-kernel-2.jsonl")(event(3))
    assert main(["audit", "kernel"]) == 2, "two begin so"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
_KEYS = ("time", "kind", "sandbox", "action", "host", "port", "cell", "notebook", "by", "argv", "x")


@given(st.dictionaries(st.sampled_from(_KEYS), _JSON), st.sampled_from(["egress", "exec", None]))
def test_any_event_is_one_safe_line(event: dict[str, Any], kind: str | None) -> None:
    """Another program may have written to the file."""
    line = shown_event({**event, "kind": kind} if kind else event, 12)
    assert printable(line) == line
    assert not {"\n", "\t"} & set(line)
    assert len(line) < 4000


def test_follow_prints_new_events_until_it_is_interrupted(folder: Path) -> None:
    write = AuditLog(folder / "local-a.jsonl")
    write(event(0, n=0))
    command = [sys.executable, "-m", "sandbox_kernel", "audit", "a", "--follow", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["n"] == 0
        write(event(1, n=1))
        AuditLog(folder / "local-b.jsonl")(event(2, n="another"))
        write(event(3, n=3))
        assert [json.loads(process.stdout.readline())["n"] for _ in range(2)] == [1, 3]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stdout.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
