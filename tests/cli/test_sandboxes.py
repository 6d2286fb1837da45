"""doctor, ps, rm and logs: what there is, and whether it works."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from tests.helpers.waiting import wait_until

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
    """The local backend works here: a kernel was started, whatever settings the environment has,
    and nothing of the trial is left behind."""
    ran = cli("doctor", "local", env={"SANDBOX_KERNEL_BACKEND": "islo"})
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.startswith("local: works\n  v ")
    assert "  v a kernel starts, and runs a cell\n" in ran.stdout
    assert cli.names() == [jail]


def test_doctor_finds_that_no_kernel_starts(cli: Cli, jail: str, tmp_path: Path) -> None:
    """Jails work, but kernels do not: a module is missing that only they need, as one was on a
    Python that is too old. The doctor must not say "works", and must say why not."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['sandbox_kernel.kernels'] = None\n"
    )
    ran = cli("doctor", "local", env={"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 1, ran.stdout
    assert "local: does not work here\n" in ran.stdout
    assert "  x no kernel can be started: ModuleNotFoundError" in ran.stdout
    assert "sandbox_kernel.kernels" in ran.stdout


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


def test_doctor_shows_where_the_time_of_a_start_goes(cli: Cli, jail: str) -> None:
    """Step by step, for a cold start and for a restart; nothing is left behind."""
    ran = cli("doctor", "--profile", "--json")
    assert ran.returncode == 0, ran.stderr
    timelines = json.loads(ran.stdout)["local"]
    last = ["the kernel is launched", "the kernel answers", "the first cell has run"]
    steps = {name: [mark["step"] for mark in marks] for name, marks in timelines.items()}
    assert steps == {
        "cold start": ["the sandbox is there", "its agent answers", *last],
        "restart": last,
    }
    assert all(mark["milliseconds"] > 0 for marks in timelines.values() for mark in marks)
    assert cli.names() == [jail]
    assert "\nlocal, restart: milliseconds until\n" in cli("doctor", "local", "--profile").stdout


def test_doctor_knows_its_patients(cli: Cli) -> None:
    """An unknown backend is an error that lists the known ones."""
    ran = cli("doctor", "nowhere")
    assert ran.returncode == 2
    assert "no sandbox backend 'nowhere'. Known: boxlite, islo, local" in ran.stderr
    assert "installed" not in ran.stderr  # nobody has looked whether they are


# --- ps ------------------------------------------------------------------------------------------


def test_ps_without_sandboxes(cli: Cli) -> None:
    """An empty list is a heading, or an empty JSON list."""
    heading = ["NAME", "BACKEND", "STATUS", "AGE", "KERNEL", "MEMORY", "NOTEBOOK", "LIMITS"]
    assert cli("ps").stdout.split() == heading
    assert json.loads(cli("ps", "--json").stdout) == []


def test_ps(cli: Cli, jail: str) -> None:
    """A running sandbox is a line with its limits; a stopped one is shown with --all only."""
    _, line = cli("ps").stdout.splitlines()
    assert line.split()[:3] == [jail, "local", "running"]
    assert re.search(r" no kernel +\d+/512 MiB +- ", line)
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
        "spare",
        "kernel_pid",
        "elsewhere",
        "unsaved",
        "denied",
        "notebook",
        "memory_used_mib",
        "processes",
        "cpu_seconds",
        "limits",
        "limits_by",
        "egress",
        "oom_kills",
        "last_kill",
    }
    assert (found["name"], found["kernel"], found["kernel_pid"]) == (jail, False, None)
    assert (found["limits"]["memory_mib"], found["limits"]["processes"]) == (512, 1024)
    assert found["limits_by"]["memory_mib"].startswith("512 MiB (")
    assert 0 < found["memory_used_mib"] < 512
    assert found["processes"] >= 1


def test_stats(cli: Cli, jail: str) -> None:
    """What a sandbox uses stands beside what it may, for people and for programs."""
    work = cli.start("exec", jail, "python3", "-c", "while True: pass")
    try:
        while (found := json.loads(cli("stats", "--json").stdout)[0])["processes"] < 2:
            pass
    finally:
        work.kill()
        work.wait()
    assert found["name"] == jail
    assert found["cpu_percent"] > 0
    assert 0 < found["memory_used_mib"] < found["memory_limit_mib"] == 512
    heading, line = cli("stats", jail[:2]).stdout.splitlines()
    assert heading.split() == ["NAME", "CPU", "MEMORY", "PROCESSES", "NOTEBOOK"]
    assert re.match(rf"{jail} +\d+ % +\d+/512 MiB +\d+/1024 +-", line)


def test_the_beginning_of_a_name_is_enough(cli: Cli, jail: str) -> None:
    """Nobody types kernel-1a2b3c4d: what begins only one name means it, and else one is told."""
    assert cli("exec", "ja", "echo", "here").stdout == "here\n"
    cli.create("jail-2")
    assert cli("exec", jail, "echo", "here").stdout == "here\n"
    ran = cli("exec", "jai", "echo", "here")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "'jai' may mean jail, jail-2. Give more of the name." in ran.stderr
    assert cli("rm", "jail-").returncode == 0
    assert cli.names() == [jail]
    assert "No sandbox has a kernel of the notebook" in cli("logs", "x.ipynb").stderr


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


def spawn_main(sandbox: str, *argv: str) -> None:
    """Start a command, with whose end the sandbox ends."""

    async def spawn() -> None:
        await (await LocalClient().get(sandbox)).spawn(argv, main=True)

    asyncio.run(spawn())


def test_logs_follow(cli: Cli, jail: str) -> None:
    """logs -f shows what is written while it waits, and ends with the sandbox."""
    following = cli.start("logs", "-f", jail, stderr=subprocess.PIPE)
    assert following.stdout is not None
    script = "echo line 1; until [ -e go ]; do sleep 0.05; done; echo line 2"
    try:
        spawn_main(jail, "sh", "-c", script)
        while following.stdout.readline() != b"line 1\n":
            assert following.poll() is None
        assert cli("exec", jail, "touch", "go").returncode == 0
        rest = following.stdout.read().decode()
        assert following.wait(60) == 0
    finally:
        following.kill()
        following.communicate()
    assert "line 1\n" not in rest
    assert rest.count("line 2\n") == 1


def test_logs_cannot_drive_the_terminal(cli: Cli, jail: str) -> None:
    """Escape sequences that code in the sandbox has written are shown, not obeyed."""
    spawn_main(jail, "printf", "\\033[2Jgone")
    # It ends with its main command, and then the log is complete.
    wait_until(lambda: not cli("ps", "--quiet").stdout, "the end of the sandbox")
    text = cli("logs", jail).stdout
    assert "[2Jgone" in text
    assert "\x1b" not in text
