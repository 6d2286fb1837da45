"""The command ``sandbox-kernel`` with sandboxes of Islo; more is in ``tests/hosted``."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..cli.running import Cli


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
        (("--processes", "5"), "processes=5"),
        (("--options", '{"gateway": 1}'), "Did you mean 'gateway_profile'"),
        (("--disk-mib", "1000"), "disk_mib=1000"),
    ):
        ran = cli("install", "islo", "--prefix", str(tmp_path / "no"), *refused)
        assert (ran.returncode in (1, 2), named in ran.stderr) == (True, True), ran.stderr
    assert not list((tmp_path / "no").rglob("*"))
