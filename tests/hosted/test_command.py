"""The command ``sandbox-kernel`` with hosted sandboxes, and what it says when something is
missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.spec import SandboxSpec
from tests.helpers.coroutines import finish

from ..cli.running import Cli
from ..emulators.running import Running
from .services import Hosted


def listed(hosted: Hosted, cli: Cli, **env: str) -> dict[str, dict[str, object]]:
    """What ``ps --all --json`` shows of the backend, by name."""
    ran = cli("ps", "--all", "--json", env=env)
    assert ran.returncode == 0, ran.stderr
    found = [sandbox for sandbox in json.loads(ran.stdout) if sandbox["backend"] == hosted.name]
    return {sandbox["name"]: sandbox for sandbox in found}


def test_ps_pause_resume_rm(
    hosted: Hosted, cli: Cli, client: SandboxClient, emulator: Running
) -> None:
    """A hosted sandbox is listed, paused, resumed, used and removed as any other."""
    finish(client.create(SandboxSpec(name="far-away")))
    assert listed(hosted, cli)["far-away"]["status"] == "running"
    assert cli("pause", "far-away").stdout == "far-away\n"
    assert listed(hosted, cli)["far-away"]["status"] == "paused"
    ran = cli("exec", "far-away", "--", "true")
    assert (ran.returncode, "sandbox-kernel resume far-away" in ran.stderr) == (1, True)
    assert cli("resume", "far-away").stdout == "far-away\n"
    assert cli("exec", "far-away", "--", "echo", "there").stdout == "there\n"
    assert cli("rm", "far-away").stdout == "far-away\n"
    assert listed(hosted, cli) == {}
    assert hosted.all(emulator) == []


def test_ps_shows_those_of_other_machines(
    hosted: Hosted, cli: Cli, client: SandboxClient, emulator: Running, tmp_path: Path
) -> None:
    """Under the same label; ``rm --all`` leaves them alone, naming them does not."""
    finish(client.create(SandboxSpec(name="theirs")))
    here = {"SANDBOX_KERNEL_DATA_DIR": str(tmp_path / "another-machine")}
    assert listed(hosted, cli, **here)["theirs"]["elsewhere"] is True
    assert "elsewhere" in cli("ps", env=here).stdout
    assert cli("rm", "--all", "--force", env=here).returncode == 0
    assert len(hosted.sandboxes(emulator)) == 1
    assert listed(hosted, cli, SANDBOX_KERNEL_LABEL="another", **here) == {}
    assert cli("pause", "theirs", env=here).stdout == "theirs\n"
    assert cli("rm", "theirs", env=here).stdout == "theirs\n"
    assert hosted.all(emulator) == []


# --- what is missing

_WITHOUT = "import sys; sys.modules[{!r}] = None; sys.argv[0] = 'sandbox-kernel'\n"
_COMMAND = "import sys; from sandbox_kernel.cli import main; sys.exit(main())"
_KERNEL = """
from jupyter_client import KernelManager
KernelManager(kernel_name="sandbox").start_kernel()
"""


def run(hosted: Hosted, code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "SANDBOX_KERNEL_BACKEND": hosted.name, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_the_extra(hosted: Hosted, emulator: Running, tmp_path: Path) -> None:
    """doctor, install and the start of a kernel each name the extra to install."""
    wanted = f"pip install 'sandbox-kernel[{hosted.name}]'"
    without = _WITHOUT.format(hosted.name)
    ran = run(hosted, without + _COMMAND, "doctor", hosted.name)
    assert (ran.returncode, wanted in ran.stdout) == (1, True)
    ran = run(hosted, without + _COMMAND, "install", hosted.name, "--prefix", str(tmp_path))
    assert (ran.returncode, wanted in ran.stderr) == (1, True)
    ran = run(hosted, without + _KERNEL)
    assert (ran.returncode, wanted in ran.stderr) == (1, True)


def test_without_the_key(hosted: Hosted, emulator: Running, tmp_path: Path) -> None:
    """Each says which variable to set, and where the value comes from."""
    wanted, no_key = hosted.without_key, {hosted.key: ""}
    ran = run(hosted, _COMMAND, "doctor", hosted.name, **no_key)
    assert (ran.returncode, wanted in ran.stdout) == (1, True)
    ran = run(hosted, _COMMAND, "install", hosted.name, "--prefix", str(tmp_path), **no_key)
    assert (ran.returncode, wanted in ran.stderr) == (1, True)
    assert not list(tmp_path.rglob("kernel.json"))
    ran = run(hosted, _KERNEL, **no_key)
    assert (ran.returncode, wanted in ran.stderr) == (1, True)
    ran = run(hosted, _COMMAND, "ps", **no_key)
    assert (ran.returncode, ran.stderr) == (0, "")
