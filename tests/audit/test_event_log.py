"""The audit: what is written, what never is, and that it lets nobody down."""

from __future__ import annotations

import json
import logging
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.gateway.audit import AuditLog, egress_event, line_of, read


def test_events_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"
    log = AuditLog(path)
    log(egress_event("allow", sandbox="s", host="a.example", port=443, rule=1, sent=2, received=3))
    log(egress_event("deny", host="b.example", path="/x?token=secret", reason="no\nrule\x1b[31m"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, second = read(path)
    assert (first["kind"], first["sandbox"], first["rule"]) == ("egress", "s", 1)
    assert second["path"] == "/x"
    assert second["reason"] == "no\\nrule\\x1b[31m"
    assert "secret" not in path.read_text()
    assert list(read(path, denied=True)) == [second]
    now = datetime.now(timezone.utc)
    assert list(read(path, since=now + timedelta(hours=1))) == []
    assert len(list(read(path, since=now - timedelta(hours=1)))) == 2


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(line_of(egress_event("allow")) + b"[]\n" + b'{"time": "20')
    assert [event["action"] for event in read(path)] == ["allow"]
    assert list(read(tmp_path / "none")) == []


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    """Whoever tore it: a full disk under this process, or under another one that is gone."""
    path = tmp_path / "log"
    path.write_bytes(line_of({"n": 1}) + b'{"n": 2')
    AuditLog(path)({"n": 3})
    AuditLog(path)({"n": 4})
    assert [event["n"] for event in read(path)] == [1, 3, 4]


def test_full_files_are_rotated_and_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AuditLog(path, max_bytes=400, kept=2)
    for number in range(12):
        log({"number": number, "text": "x" * 100})
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["log", "log.1", "log.2"]
    assert all(file.stat().st_size <= 400 for file in tmp_path.iterdir())
    numbers = [event["number"] for event in read(path)]
    assert numbers == list(range(numbers[0], 12))
    assert 3 <= len(numbers) < 12


def test_a_failure_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "target"
    target.write_text("")
    (tmp_path / "link").symlink_to(target)
    with caplog.at_level(logging.WARNING):
        for event in ({"a": 1}, {"a": object()}):
            AuditLog(tmp_path / "link")(event)
    assert len(caplog.records) == 1
    assert target.read_text() == "", "links are not followed"


@given(st.dictionaries(st.text(max_size=9), st.text(max_size=3000) | st.integers(), max_size=9))
def test_any_event_is_one_bounded_line(event: dict[str, object]) -> None:
    line = line_of(event)
    assert line.count(b"\n") == 1
    assert len(line) <= 64 * 1024 + 1
    assert isinstance(json.loads(line), dict)
    assert all(32 <= byte < 127 for byte in line[:-1])
