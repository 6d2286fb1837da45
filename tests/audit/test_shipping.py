"""Events for a program of the operator's: bounded, restarted, ended, and never waited for."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.audit.shipping import Shipper
from tests.helpers.waiting import wait_until


def program(folder: Path, code: str) -> str:
    """A command line. The program finds its folder in ``sys.argv[1]``."""
    script = folder / "program.py"
    script.write_text(code)
    return shlex.join([sys.executable, str(script), str(folder)])


COPY = """
import os, sys
with open(sys.argv[1] + "/got", "ab", buffering=0) as got:
    for line in sys.stdin.buffer:
        got.write(line)
    got.write(b'"end"\\n')
"""


def got(folder: Path) -> list[Any]:
    path = folder / "got"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_event_is_a_line_and_the_program_ends_with_us(tmp_path: Path) -> None:
    shipper = Shipper(program(tmp_path, COPY))
    events: list[dict[str, Any]] = [{"kind": "exec", "n": n, "text": "a\nb"} for n in range(50)]
    for event in events:
        shipper.put(event)
    shipper.close()
    assert got(tmp_path) == [*({**e, "text": "a\\nb"} for e in events), "end"]


def test_a_program_that_ends_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once = "import os, sys\nif not os.path.exists(sys.argv[1] + '/was'):\n"
    once += "    open(sys.argv[1] + '/was', 'w').close(); sys.exit(3)\n"
    with caplog.at_level(logging.WARNING):
        shipper = Shipper(program(tmp_path, once + COPY), first_pause=0.01)
        number = 0

        def arrives() -> bool:
            nonlocal number
            number += 1
            shipper.put({"n": number})
            return bool(got(tmp_path))

        wait_until(arrives)
        shipper.close()
    assert got(tmp_path)[-2:] == [{"n": number}, "end"]
    assert "is started again" in caplog.text


def test_what_finds_no_room_is_counted(tmp_path: Path) -> None:
    """While the program does not take anything."""
    code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '/go'): time.sleep(0.01)\n"
    shipper = Shipper(program(tmp_path, code + COPY), most_waiting=20)
    for number in range(500):
        shipper.put({"n": number, "text": "x" * 1000})
    (tmp_path / "go").touch()
    wait_until(lambda: any(event.get("kind") == "dropped" for event in got(tmp_path)))
    shipper.close()
    *events, end = got(tmp_path)
    taken = [event for event in events if "n" in event]
    dropped = sum(event["count"] for event in events if event.get("kind") == "dropped")
    assert end == "end"
    assert len(taken) + dropped == 500
    assert dropped > 0


def test_a_program_that_reads_nothing_does_not_keep_us(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = "import os, sys, time\nopen(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))\n"
    shipper = Shipper(program(tmp_path, code + "time.sleep(600)\n"))
    for number in range(900):
        shipper.put({"n": number, "text": "x" * 1000})
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    with caplog.at_level(logging.WARNING):
        shipper.close()
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text()}")
    assert "did not take the last" in caplog.text


def test_a_program_that_is_not_there_costs_nothing_but_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        shipper = Shipper("/no/such/program --token s3cret")
        shipper.put({"n": 1})
        wait_until(lambda: "cannot be started" in caplog.text)
        shipper.close()
    assert "s3cret" not in caplog.text


def test_the_setting(tmp_path: Path) -> None:
    """A whole command with it: what it does to a sandbox arrives, in order."""
    env = {
        **os.environ,
        "SANDBOX_KERNEL_DATA_DIR": str(tmp_path / "data"),
        "SANDBOX_KERNEL_AUDIT_COMMAND": program(tmp_path, COPY),
    }
    command = [sys.executable, "-m", "sandbox_kernel", "run", "--name", "box", "--", "echo", "hi"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "hi\n"), ran.stderr
    *events, end = got(tmp_path)
    assert [event["kind"] for event in events] == ["created", "exec", "removed"]
    assert events[0]["by"]["program"] == "sandbox-kernel run"
    assert "audit_command" not in events[0]["spec"]
    assert end == "end"
