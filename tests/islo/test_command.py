"""The command ``sandbox-kernel`` with hosted sandboxes, and what it says when something is
missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.islo import IsloClient
from sandbox_kernel.spec import SandboxSpec

from ..cli.running import Cli
from ..conformance.conftest import finish
from ..emulators.running import Running
from .sandboxes import account


@pytest.fixture
def cli(emulator: Running, tmp_path: Path) -> Cli:
    return Cli(tmp_path, dict(os.environ))


def listed(cli: Cli, **env: str) -> dict[str, dict[str, object]]:
    """What ``ps --all --json`` shows of Islo, by name."""
    ran = cli("ps", "--all", "--json", env=env)
    assert ran.returncode == 0, ran.stderr
    found = [sandbox for sandbox in json.loads(ran.stdout) if sandbox["backend"] == "islo"]
    return {sandbox["name"]: sandbox for sandbox in found}


def test_ps_pause_resume_rm(cli: Cli, client: IsloClient, emulator: Running) -> None:
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
    assert account(emulator)["sandboxes"] == account(emulator)["profiles"] == []


def test_ps_shows_those_of_other_machines(
    cli: Cli, client: IsloClient, emulator: Running, tmp_path: Path
) -> None:
    """Under the same label; ``rm --all`` leaves them alone, naming them does not."""
    finish(client.create(SandboxSpec(name="theirs")))
    here = {"SANDBOX_KERNEL_DATA_DIR": str(tmp_path / "another-machine")}
    assert listed(cli, **here)["theirs"]["elsewhere"] is True
    assert "elsewhere" in cli("ps", env=here).stdout
    assert cli("rm", "--all", "--force", env=here).returncode == 0
    assert len(account(emulator)["sandboxes"]) == 1
    assert listed(cli, SANDBOX_KERNEL_LABEL="another", **here) == {}
    assert cli("pause", "theirs", env=here).stdout == "theirs\n"
    assert cli("rm", "theirs", env=here).stdout == "theirs\n"
    assert account(emulator)["sandboxes"] == account(emulator)["profiles"] == []


# --- what is missing

_WITHOUT = "import sys; sys.modules['islo'] = None; sys.argv[0] = 'sandbox-kernel'\n"
_COMMAND = _WITHOUT + "from sandbox_kernel.cli import main; sys.exit(main())"
_KERNEL = """
from jupyter_client import KernelManager
KernelManager(kernel_name="sandbox").start_kernel()
"""


def run(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "SANDBOX_KERNEL_BACKEND": "islo", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_the_extra(emulator: Running, tmp_path: Path) -> None:
    """doctor, install and the start of a kernel each name the extra to install."""
    wanted = "pip install 'sandbox-kernel[islo]'"
    ran = run(_COMMAND, "doctor", "islo")
    assert (ran.returncode, wanted in ran.stdout) == (1, True)
    ran = run(_COMMAND, "install", "islo", "--prefix", str(tmp_path))
    assert (ran.returncode, wanted in ran.stderr) == (1, True)
    ran = run(_WITHOUT + _KERNEL)
    assert (ran.returncode, wanted in ran.stderr) == (1, True)


def test_without_the_key(emulator: Running, tmp_path: Path) -> None:
    """Each says which variable to set, and where the value comes from."""
    wanted = "set ISLO_API_KEY"
    code = "import sys; from sandbox_kernel.cli import main; sys.exit(main())"
    ran = run(code, "doctor", "islo", ISLO_API_KEY="")
    assert (ran.returncode, wanted in ran.stdout) == (1, True)
    ran = run(code, "install", "islo", "--prefix", str(tmp_path), ISLO_API_KEY="")
    assert (ran.returncode, wanted in ran.stderr) == (1, True)
    assert not list(tmp_path.rglob("kernel.json"))
    ran = run(_KERNEL, ISLO_API_KEY="")
    assert (ran.returncode, wanted in ran.stderr) == (1, True)
    ran = run(code, "ps", ISLO_API_KEY="")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_install(cli: Cli, tmp_path: Path) -> None:
    """The kernelspec holds the policy; what cannot be enforced is refused, and nothing written."""
    prefix, options = str(tmp_path / "prefix"), {"gateway_profile": "the-teams"}
    ran = cli(
        *("install", "islo", "--prefix", prefix, "--pause-on-exit", "--image", "python:3.12"),
        *("--idle-pause-seconds", "600", "--options", json.dumps(options)),
    )
    assert ran.returncode == 0, ran.stderr
    (spec,) = Path(prefix).rglob("kernel.json")
    config = json.loads(spec.read_text())["metadata"]["kernel_provisioner"]["config"]
    assert (config["backend"], config["options"]) == ("islo", options)
    assert config["pause_on_exit"] is True
    assert os.environ["ISLO_API_KEY"] not in spec.read_text()
    for refused, named in (
        (("--egress", "data.example:8443"), "egress[0].ports"),
        (("--options", '{"gateway": 1}'), "Did you mean 'gateway_profile'"),
        (("--disk-mib", "1000"), "disk_mib=1000"),
    ):
        ran = cli("install", "islo", "--prefix", str(tmp_path / "no"), *refused)
        assert (ran.returncode, named in ran.stderr) == (1, True), ran.stderr
    assert not list((tmp_path / "no").rglob("*"))
