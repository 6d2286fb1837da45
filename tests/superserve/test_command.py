"""The command ``sandbox-kernel`` with sandboxes of Superserve; more is in ``tests/hosted``."""

from __future__ import annotations

import json
from pathlib import Path

from ..cli.running import Cli


def test_pausing_what_cannot_be_paused(cli: Cli) -> None:
    """Says so, and that there is no such sandbox."""
    ran = cli("pause", "nowhere")
    assert ran.returncode == 1
    assert "no sandbox 'nowhere'" in ran.stderr


def test_with_a_wrong_key(cli: Cli) -> None:
    """The service's refusal, and which variable holds the key; not the key itself."""
    ran = cli("doctor", "superserve", env={"SUPERSERVE_API_KEY": "ss_live_wrong"})
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
    ran = cli("install", "superserve", "--prefix", str(tmp_path / "no"), "--processes", "5")
    assert (ran.returncode, "processes=5" in ran.stderr) == (1, True)
    ran = cli("install", "local", "--prefix", str(tmp_path / "no"), "--pause-on-exit")
    assert (ran.returncode, "cannot pause" in ran.stderr) == (1, True)
    assert not list((tmp_path / "no").rglob("*"))
