"""The command ``sandbox-kernel`` with hosted sandboxes, and what it says when something is
missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.superserve import SuperserveClient
from sandbox_kernel.spec import SandboxSpec

from ..cli.running import Cli
from ..conformance.conftest import finish
from ..emulators.running import Running
from .sandboxes import at_the_service


@pytest.fixture
def cli(emulator: Running, tmp_path: Path) -> Cli:
    return Cli(tmp_path, dict(os.environ))


def listed(cli: Cli, **env: str) -> dict[str, dict[str, object]]:
    """What ``ps --all --json`` shows of Superserve, by name."""
    ran = cli("ps", "--all", "--json", env=env)
    assert ran.returncode == 0, ran.stderr
    found = [sandbox for sandbox in json.loads(ran.stdout) if sandbox["backend"] == "superserve"]
    return {sandbox["name"]: sandbox for sandbox in found}


def test_ps_pause_resume_rm(cli: Cli, client: SuperserveClient, emulator: Running) -> None:
    """A hosted sandbox is listed, paused, resumed, used and removed as any other."""
    finish(client.create(SandboxSpec(name="far-away")))
    assert listed(cli)["far-away"]["status"] == "running"
    assert cli("pause", "far-away").stdout == "far-away\n"
    assert listed(cli)["far-away"]["status"] == "paused"
    ran = cli("exec", "far-away", "--", "true")
    assert (ran.returncode, "sandbox-kernel resume far-away" in ran.stderr) == (1, True)
    assert cli("resume", "far-away").stdout == "far-away\n"
    assert cli("exec", "far-away", "--", "echo", "there").stdout == "there\n"
    assert cli("rm", "far-away").stdout == "far-away\n"
    assert listed(cli) == {}
    assert at_the_service(emulator) == []


def test_ps_shows_those_of_other_machines(
    cli: Cli, client: SuperserveClient, emulator: Running, tmp_path: Path
) -> None:
    """Under the same label; ``rm --all`` leaves them alone, naming them does not."""
    finish(client.create(SandboxSpec(name="theirs")))
    here = {"SANDBOX_KERNEL_DATA_DIR": str(tmp_path / "another-machine")}
    assert listed(cli, **here)["theirs"]["elsewhere"] is True
    assert "elsewhere" in cli("ps", env=here).stdout
    assert cli("rm", "--all", "--force", env=here).returncode == 0
    assert len(at_the_service(emulator)) == 1
    assert listed(cli, SANDBOX_KERNEL_LABEL="another", **here) == {}
    assert cli("pause", "theirs", env=here).stdout == "theirs\n"
    assert cli("rm", "theirs", env=here).stdout == "theirs\n"
    assert at_the_service(emulator) == []


def test_pausing_what_cannot_be_paused(cli: Cli) -> None:
    """Says so, and that there is no such sandbox."""
    ran = cli("pause", "nowhere")
    assert ran.returncode == 1
    assert "no sandbox 'nowhere'" in ran.stderr


# --- what is missing

_WITHOUT = "import sys; sys.modules['superserve'] = None; sys.argv[0] = 'sandbox-kernel'\n"
_COMMAND = _WITHOUT + "from sandbox_kernel.cli import main; sys.exit(main())"
_KERNEL = """
from jupyter_client import KernelManager
KernelManager(kernel_name="sandbox").start_kernel()
"""


def run(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "SANDBOX_KERNEL_BACKEND": "superserve", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_the_extra(emulator: Running, tmp_path: Path) -> None:
    """doctor, install and the start of a kernel each name the extra to install."""
    wanted = "pip install 'sandbox-kernel[superserve]'"
    ran = run(_COMMAND, "doctor", "superserve")
    assert (ran.returncode, wanted in ran.stdout) == (1, True)
    ran = run(_COMMAND, "install", "superserve", "--prefix", str(tmp_path))
    assert (ran.returncode, wanted in ran.stderr) == (1, True)
    ran = run(_WITHOUT + _KERNEL)
    assert (ran.returncode, wanted in ran.stderr) == (1, True)


def test_without_the_key(emulator: Running, tmp_path: Path) -> None:
    """Each says which variable to set, and where the value comes from."""
    wanted = "export SUPERSERVE_API_KEY="
    code = "import sys; from sandbox_kernel.cli import main; sys.exit(main())"
    ran = run(code, "doctor", "superserve", SUPERSERVE_API_KEY="")
    assert (ran.returncode, wanted in ran.stdout) == (1, True)
    ran = run(code, "install", "superserve", "--prefix", str(tmp_path), SUPERSERVE_API_KEY="")
    assert (ran.returncode, wanted in ran.stderr) == (1, True)
    assert not list(tmp_path.rglob("kernel.json"))
    ran = run(_KERNEL, SUPERSERVE_API_KEY="")
    assert (ran.returncode, wanted in ran.stderr) == (1, True)
    ran = run(code, "ps", SUPERSERVE_API_KEY="")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_with_a_wrong_key(emulator: Running) -> None:
    """The service's refusal, and which variable holds the key; not the key itself."""
    code = "import sys; from sandbox_kernel.cli import main; sys.exit(main())"
    ran = run(code, "doctor", "superserve", SUPERSERVE_API_KEY="ss_live_wrong")
    assert ran.returncode == 1
    assert "refuses the API key in SUPERSERVE_API_KEY" in ran.stdout
    assert "ss_live_wrong" not in ran.stdout + ran.stderr


def test_install(cli: Cli, tmp_path: Path) -> None:
    """The kernelspec holds the policy; what cannot be enforced is refused, and nothing written."""
    prefix = str(tmp_path / "prefix")
    ran = cli(
        *("install", "superserve", "--prefix", prefix, "--pause-on-exit"),
        *("--idle-pause-seconds", "600", "--image", "superserve/python-3.11"),
    )
    assert ran.returncode == 0, ran.stderr
    (spec,) = Path(prefix).rglob("kernel.json")
    config = json.loads(spec.read_text())["metadata"]["kernel_provisioner"]["config"]
    assert config["backend"] == "superserve"
    assert config["pause_on_exit"] is True
    assert config["idle_pause_seconds"] == 600
    assert "ss_live" not in spec.read_text()
    ran = cli("install", "superserve", "--prefix", str(tmp_path / "no"), "--egress", "data.example")
    assert (ran.returncode, "egress[0].host" in ran.stderr) == (1, True)
    ran = cli("install", "local", "--prefix", str(tmp_path / "no"), "--pause-on-exit")
    assert (ran.returncode, "cannot pause" in ran.stderr) == (1, True)
    assert not list((tmp_path / "no").rglob("*"))
