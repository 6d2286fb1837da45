"""The package index that pip on this machine uses: the real one; in the rig, which has no network,
one of its own, on a neighbour that only the rig's host side reaches."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.waiting import LIMIT

PACKAGE = "cowsay"
_NAME, _OURS, _ITS = "packages.example", "10.77.0.1", "10.77.0.2"
_READY = "Serving HTTP"


@contextlib.contextmanager
def package_index(folder: Path, rig: str | None) -> Iterator[dict[str, str]]:
    """Until the block ends; the environment that a sandbox needs in addition to use it."""
    if rig is None:
        # What an image must have itself: the emulated machines of providers show the host's files.
        yield {"PIP_CERT": os.environ["PIP_CERT"]} if "PIP_CERT" in os.environ else {}
        return
    configuration = folder / "pip.conf"
    configuration.write_text(
        f"[global]\nindex-url = http://{_NAME}/simple/\ntrusted-host = {_NAME}\n"
    )
    with pytest.MonkeyPatch.context() as patch, _neighbour(Path(rig) / "index"):
        patch.setenv("PIP_CONFIG_FILE", str(configuration))
        yield {}


@contextlib.contextmanager
def _neighbour(files: Path) -> Iterator[None]:
    """A machine beside this one that serves these files, as a network namespace of its own. (An
    address of this machine's own would be refused by the gateway.)"""
    hosts = Path("/etc/hosts")
    before = hosts.read_text() if hosts.exists() else ""
    _ip("netns add packages")
    try:
        _ip("link add packages0 type veth peer name eth0 netns packages")
        _ip(f"addr add {_OURS}/24 dev packages0")
        _ip("link set packages0 up")
        _ip(f"-n packages addr add {_ITS}/24 dev eth0")
        _ip("-n packages link set eth0 up")
        hosts.write_text(f"{before}\n{_ITS} {_NAME}\n")
        serve = [sys.executable, "-u", "-m", "http.server", "--directory", str(files), "80"]
        command = ["ip", "netns", "exec", "packages", *serve]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                assert server.stdout.readline().startswith(_READY)
                yield
            finally:
                server.kill()
    finally:
        hosts.write_text(before)
        _ip("netns delete packages")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, timeout=LIMIT)
