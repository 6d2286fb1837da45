"""The disk that holds our data is full, for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.small_disk import needs_root, small_disk

from .conftest import StartServer
from .running import Tab


@pytest.mark.slow
@needs_root
def test_a_kernel_is_restarted_with_a_full_disk(
    make_server: StartServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else has filled the disk. A kernel that runs goes on, and can be interrupted and
    restarted: that nothing can be written down about it is said in the log, and no more."""
    with small_disk(folder / "disk", "32m") as disk:
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(disk.path / "data"))
        server = make_server("--SandboxServer.on_shutdown=delete")
        server.start()
        server.notebook("n.ipynb")
        session = server.session("n.ipynb")
        tab = Tab(server, session["kernel"]["id"])
        assert tab.run("print(1)") == "1\n"
        disk.fill()
        assert "2" in tab.run("print(2)")  # IPython complains of the disk in between
        server.request("POST", f"/api/kernels/{session['kernel']['id']}/restart")
        tab.close()
        tab.connect()
        assert "3" in tab.run("print(3)")
        assert "goes on, but the next server will not find it" in server.log
        disk.free()
        server.request("DELETE", f"/api/sessions/{session['id']}")
        server.end()
