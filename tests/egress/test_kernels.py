"""Kernels with rules for egress, as users run them."""

from __future__ import annotations

import functools
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from sandbox_kernel.audit.reading import read
from sandbox_kernel.paths import data_dir

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_WARM_SPARES", "false")


def outputs(
    cells: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path, egress: str
) -> list[str]:
    """Run a notebook in the sandbox kernel; the text that each cell shows."""
    monkeypatch.setenv("SANDBOX_KERNEL_EGRESS", egress)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, kernel_name="sandbox", timeout=180, allow_errors=True)
    client.resources = {"metadata": {"path": str(folder)}}
    client.execute()
    return [
        "".join(one.get("text", "") or "\n".join(one.get("traceback", ())) for one in cell.outputs)
        for cell in notebook.cells
    ]


def test_a_kernel_without_rules_is_as_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [refused] = outputs(
        ["import urllib.request; urllib.request.urlopen('https://elsewhere.example/')"],
        monkeypatch,
        tmp_path,
        "",
    )
    assert "name resolution" in refused or "Name or service not known" in refused
    [log] = (data_dir() / "audit").glob("*.jsonl")
    assert "egress" not in [event["kind"] for event in read(log)]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """An index on this machine, with a package that is nowhere else."""
    package = tmp_path / "index" / "only-here"
    package.mkdir(parents=True)
    with zipfile.ZipFile(package / "only_here-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("only_here.py", "where = 'here'\n")
        wheel.writestr("only_here-1.dist-info/METADATA", "Name: only-here\nVersion: 1\n")
        wheel.writestr("only_here-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("only_here-1.dist-info/RECORD", "")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(package.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


def test_the_hosts_index_may_be_on_the_host_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: str
) -> None:
    """A mirror, for example. Files that pip finds on the host without an index are left out."""
    monkeypatch.setenv("PIP_INDEX_URL", index)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file://{tmp_path}/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    numeric = index.replace("localhost", "127.0.0.1")
    installed, used, other = outputs(
        [
            "%pip install only-here",
            "import only_here; only_here.where",
            f"import urllib.request; urllib.request.urlopen({numeric!r})",
        ],
        monkeypatch,
        tmp_path,
        "@pip",
    )
    assert "Successfully installed only-here-1" in installed
    assert "Error" not in used
    assert "Connection refused" in other, "the sandbox's own loopback is not the host's"
