"""The folders of local sockets."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from sandbox_kernel.jupyter.connections import endpoint_folder


def test_sockets_of_dead_processes_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder goes when it is old and nobody listens in it; one that is in use stays."""
    with tempfile.TemporaryDirectory(prefix="sk-") as runtime:
        monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", runtime)
        folders = {name: Path(runtime, f"c-{name}") for name in ("dead", "live", "young")}
        sockets = []
        for name, folder in folders.items():
            folder.mkdir()
            sockets.append(socket.socket(socket.AF_UNIX))
            sockets[-1].bind(str(folder / "c-1"))
            if name == "live":
                sockets[-1].listen()
            if name != "young":
                os.utime(folder, (0, 0))
        made = endpoint_folder()
        for one in sockets:
            one.close()
        assert {name for name, folder in folders.items() if folder.exists()} == {"live", "young"}
        assert not Path(made).exists()
