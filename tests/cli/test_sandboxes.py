"""doctor, ps, rm and logs: what there is, and whether it works."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient

from .running import PROGRAM, Cli


@pytest.fixture
def no_sdk(cli: Cli, tmp_path: Path) -> str:
    """A backend that is installed, but whose SDK is not."""
    metadata = tmp_path / "site" / "other-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    entry = "[sandbox_kernel.backends]\nother = package_that_is_not_there:Client\n"
    (metadata / "entry_points.txt").write_text(entry)
    cli.env["PYTHONPATH"] = str(tmp_path / "site")
    return "other"


# --- doctor --------------------------------------------------------------------------------------


def test_doctor(cli: Cli, jail: str) -> None:
    """The local backend works here, and leaves nothing of the trial behind."""
    ran = cli("doctor", "local")
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.startswith("local: works\n  v ")
    assert cli.names() == [jail]


@pytest.mark.slow
def test_doctor_names_the_missing_extra(cli: Cli, no_sdk: str, jail: str) -> None:
    """A missing SDK fails only whoever asks for that backend, and the fix is printed."""
    ran = cli("doctor", no_sdk)
    assert ran.returncode == 1
    assert "other: does not work here\n  x its SDK cannot be imported" in ran.stdout
    assert "\n      pip install 'sandbox-kernel[other]'" in ran.stdout
    everything = cli("doctor")
    assert everything.returncode == 0
    assert "local: works" in everything.stdout
    assert "other: does not work here" in everything.stdout


def test_doctor_json(cli: Cli, no_sdk: str, jail: str) -> None:
    """--json has the documented keys."""
    ran = cli("doctor", "local", no_sdk, "--json")
    assert ran.returncode == 1
    local, other = json.loads(ran.stdout)
    assert (local["backend"], local["ok"]) == ("local", True)
    assert {key for check in local["checks"] for key in check} == {"ok", "what", "fix"}
    assert (other["ok"], other["checks"][0]["ok"]) == (False, False)


def test_doctor_knows_its_patients(cli: Cli) -> None:
    """An unknown backend is an error that lists the known ones."""
    ran = cli("doctor", "nowhere")
    assert ran.returncode == 1
    assert "no sandbox backend 'nowhere'; installed are: boxlite, islo, local" in ran.stderr


# --- ps ------------------------------------------------------------------------------------------


def test_ps_without_sandboxes(cli: Cli) -> None:
    """An empty list is a heading, or an empty JSON list."""
    assert cli("ps").stdout.split() == ["NAME", "BACKEND", "STATUS", "AGE", "KERNEL", "LIMITS"]
    assert json.loads(cli("ps", "--json").stdout) == []


def test_ps(cli: Cli, jail: str) -> None:
    """A running sandbox is a line with its limits; a stopped one is shown with --all only."""
    _, line = cli("ps").stdout.splitlines()
    assert line.split()[:3] == [jail, "local", "running"]
    assert "memory 512 MiB" in line
    cli.stop(jail)
    assert cli("ps", "--quiet").stdout == ""
    assert cli("ps", "--quiet", "--all").stdout == f"{jail}\n"
    assert "stopped" in cli("ps", "-a").stdout


def test_ps_json(cli: Cli, jail: str) -> None:
    """--json has the documented keys."""
    (found,) = json.loads(cli("ps", "--json").stdout)
    assert set(found) == {
        "name",
        "backend",
        "id",
        "status",
        "created",
        "kernel",
        "kernel_pid",
        "elsewhere",
        "limits",
        "oom_kills",
        "last_kill",
    }
    assert (found["name"], found["kernel"], found["kernel_pid"]) == (jail, False, None)


def test_an_unreadable_record_is_a_note(cli: Cli, jail: str) -> None:
    """What cannot be read is noted on stderr; the rest is listed."""
    (cli.records / "broken.json").write_text("{")
    ran = cli("ps")
    assert ran.returncode == 0
    assert jail in ran.stdout
    assert "broken.json" in ran.stderr


def test_a_broken_backend_is_a_note(cli: Cli, no_sdk: str, jail: str) -> None:
    """A backend without its SDK is silent, unless sandboxes of it are on record."""
    assert cli("ps").stderr == ""
    records = cli.records.parent / no_sdk
    records.mkdir()
    (records / "one.json").write_text("{}")
    ran = cli("ps")
    assert jail in ran.stdout
    assert "pip install 'sandbox-kernel[other]'" in ran.stderr


# --- rm ------------------------------------------------------------------------------------------


def test_rm(cli: Cli, jail: str) -> None:
    """A named sandbox is removed although it runs, and its name printed."""
    ran = cli("rm", jail)
    assert (ran.returncode, ran.stdout) == (0, f"{jail}\n")
    assert cli.names() == []


def test_rm_twice_is_no_error(cli: Cli, jail: str) -> None:
    """What is not there counts as removed, and is told."""
    ran = cli("rm", jail, "nowhere")
    assert (ran.returncode, ran.stdout) == (0, f"{jail}\n")
    assert "no sandbox 'nowhere'" in ran.stderr


def test_rm_goes_on_after_an_error(cli: Cli, jail: str) -> None:
    """One sandbox that cannot be removed does not keep the others."""
    (cli.records / "broken.json").write_text("{")
    ran = cli("rm", "broken", jail)
    assert (ran.returncode, ran.stdout) == (1, f"{jail}\n")
    assert "broken.json" in ran.stderr


def mark_as_kernel(name: str) -> None:
    records = Records()
    record = records.load("local", name)
    record.kernel = {"token": "x"}
    records.save(record)


def test_rm_all_spares_running_kernels(cli: Cli, jail: str) -> None:
    """--all leaves running kernels alone; --force does not."""
    cli.create("kernel")
    mark_as_kernel("kernel")
    ran = cli("rm", "--all")
    assert (ran.returncode, ran.stdout) == (0, f"{jail}\n")
    assert "kernel has a running kernel and stays" in ran.stderr
    assert cli("rm", "--all", "--force").stdout == "kernel\n"
    assert cli.names() == []


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", ["jail"]), (b"y\n", []), (b"\4", ["jail"])])
def test_rm_all_asks_on_a_terminal(cli: Cli, jail: str, answer: bytes, left: list[str]) -> None:
    """On a terminal --all shows what it would remove and asks."""
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    ran = subprocess.run(
        [*PROGRAM, "rm", "--all"], stdin=theirs, env=cli.env, capture_output=True, timeout=60
    )
    os.close(ours)
    os.close(theirs)
    assert f"  {jail}\nGo on? [y/N]".encode() in ran.stdout
    assert ran.returncode == (1 if left else 0)
    assert cli.names() == left


# --- logs ----------------------------------------------------------------------------------------


def test_logs(cli: Cli, jail: str) -> None:
    """The log of a sandbox can be read after its end, whole or in part."""
    cli.stop(jail)
    text = cli("logs", jail).stdout
    assert "it was stopped" in text
    assert cli("logs", "-n", "1", jail).stdout == text.splitlines(keepends=True)[-1]


def test_logs_cannot_drive_the_terminal(cli: Cli, jail: str) -> None:
    """Escape sequences that code in the sandbox has written are shown, not obeyed."""

    async def write() -> None:
        handle = await LocalClient().get(jail)
        await handle.spawn(["printf", "\\033[2Jgone"], main=True)

    asyncio.run(write())
    while cli("ps", "--quiet").stdout:
        pass  # it ends with its main command, and then the log is complete
    text = cli("logs", jail).stdout
    assert "[2Jgone" in text
    assert "\x1b" not in text
