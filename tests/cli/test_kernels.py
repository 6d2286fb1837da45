"""What the command says of sandboxes with kernels in them, and what a run that fails says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from sandbox_kernel.cli import main
from tests.helpers.small_disk import needs_root, small_disk
from tests.helpers.waiting import wait_until

from .running import Cli


@pytest.fixture
def notebook(cli: Cli, jail: str, tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A notebook with a kernel, as a server starts it."""
    path = tmp_path / "papers" / "demo.ipynb"
    path.parent.mkdir()
    env = {**os.environ, "JPY_SESSION_NAME": str(path)}
    manager, client = start_new_kernel(kernel_name="sandbox", env=env, cwd=str(path.parent))
    try:
        yield path, manager
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def found(cli: Cli) -> dict[str, Any]:
    listed = json.loads(cli("ps", "--all", "--json").stdout)
    (one,) = (sandbox for sandbox in listed if sandbox["name"] != "jail")
    return dict(one)


def test_a_notebook_stands_for_its_sandbox(cli: Cli, notebook: tuple[Path, Any]) -> None:
    """Whoever has a notebook open finds its sandbox by the notebook: ps shows it with the kernel's
    process and memory, and exec, cp and logs take its path. When the kernel has died, ps says that
    there is none."""
    path, manager = notebook
    seen = found(cli)
    assert (seen["notebook"], seen["kernel"]) == (str(path), True)
    assert seen["kernel_pid"] == manager.provisioner.pid
    assert seen["memory_used_mib"] > 10
    lines = cli("ps", env={"HOME": str(path.parents[1])}).stdout.splitlines()
    (line,) = (line for line in lines if line.startswith(seen["name"]))
    assert re.search(rf" {seen['kernel_pid']} +\d+/\d+ MiB +~/papers/demo.ipynb ", line)
    assert cli("exec", str(path), "echo", "here").stdout == "here\n"
    assert cli("cp", __file__, f"{path}:copied.py").returncode == 0
    assert cli("logs", str(path)).returncode == 0
    kill = f"import os; os.kill({seen['kernel_pid']}, {int(signal.SIGKILL)})"
    cli("exec", str(path), "python3", "-c", kill)
    wait_until(lambda: not found(cli)["kernel"], "the end of the kernel")
    assert "no kernel" in cli("ps").stdout


def test_a_run_that_was_killed_for_memory_says_so(cli: Cli, jail: str) -> None:
    """Exit code 137 alone tells nobody what happened, and what to do."""
    eat = "x = bytearray(10**9); x[::4096] = b'1' * len(x[::4096])"
    ran = cli("run", "--memory-mib", "256", "python3", "-c", eat)
    assert ran.returncode != 0
    if ran.returncode == 137:  # else an rlimit has refused it, and Python has said so itself
        assert "killed, out of memory" in ran.stderr
        assert "The limit is 256 MiB" in ran.stderr
        assert "--memory-mib" in ran.stderr
    else:
        assert "MemoryError" in ran.stderr


def test_the_example_of_run(cli: Cli, jail: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help's example is run as it stands there: a script of the user's, which the sandbox does
    not see, goes in by stdin."""
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    (line,) = (text for text in capsys.readouterr().out.splitlines() if "untrusted.py" in text)
    words, _, script = line.removeprefix("  sandbox-kernel ").partition(" < ")
    assert script == "untrusted.py"
    ran = cli(*words.split(), stdin="print(6 * 7)")
    assert (ran.returncode, ran.stdout) == (0, "42\n"), ran.stderr


def test_a_run_that_misses_a_file_of_the_user(
    cli: Cli, jail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run python script.py` and `run ./script.py` with a script that lies in the user's folder:
    what the sandbox says of it is followed by how to show it. As told there, it works."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("print(6 * 7)")
    for words in (["python3", "script.py"], ["./script.py"]):
        ran = cli("run", *words)
        assert ran.returncode != 0
        assert f"--readable {tmp_path}/script.py" in ran.stderr
    shown = f"{tmp_path}/script.py"
    ran = cli("run", "--readable", shown, "python3", shown)
    assert (ran.stdout, ran.stderr) == ("42\n", "")
    assert cli("run", "python3", "-c", "exit(3)").stderr == ""


@needs_root
def test_a_full_disk_is_told_when_a_kernel_starts(cli: Cli, jail: str, tmp_path: Path) -> None:
    """The disk that holds our data is full: the error of the start names the sandbox and what to
    do, not only errno 28."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        disk.fill()
        cli.env["SANDBOX_KERNEL_DATA_DIR"] = str(disk.path)
        start = (
            "from jupyter_client.manager import start_new_kernel; start_new_kernel(kernel_name="
            "'sandbox')"
        )
        ran = subprocess.run(
            [sys.executable, "-c", start], env=cli.env, capture_output=True, text=True, timeout=120
        )
        last = ran.stderr.strip().splitlines()[-1]
        assert re.search(r"SandboxError: Sandbox 'kernel-.*No space left on device", last), last
        assert f"Free some space on the disk that holds {disk.path}." in last
