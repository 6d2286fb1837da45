"""Kernels with rules for egress, as users run them."""

from __future__ import annotations

import functools
import os
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import nbformat
import pytest
from nbclient import NotebookClient

from sandbox_kernel.audit.reading import read
from sandbox_kernel.paths import data_dir
from tests.helpers.package_index import PASSWORD, USER, index_with_login, wheel

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


def test_an_index_that_asks_for_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The login is in pip's settings on this machine, and is never in the sandbox."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    packages = {"thing": wheel("thing", needs=["helper"]), "helper": wheel("helper")}
    with index_with_login(packages) as served:
        login = f"{USER}:{quote(PASSWORD, safe='')}"
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{login}@localhost:{served.port}/simple")
        installed, used, sandbox = outputs(
            [
                "%pip install thing",
                "import thing, helper; print(thing.NAME, helper.NAME)",
                "import os, subprocess\n"
                "print(dict(os.environ), open('/proc/self/environ').read())\n"
                "print(subprocess.run(['pip', 'config', 'list'], capture_output=True).stdout)",
            ],
            monkeypatch,
            tmp_path,
            "@pip",
        )
    assert "Successfully installed" in installed
    assert used == "thing helper\n"
    assert f"localhost:{served.port}/simple" in sandbox
    for secret in (USER, PASSWORD, quote(PASSWORD, safe="")):
        assert secret not in sandbox
        assert secret not in installed
    assert served.refused == 0
    kept = [path for path in data_dir().rglob("*") if path.is_file()]
    assert [path for path in kept if PASSWORD.encode() in path.read_bytes()] == []


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


def test_without_a_server_the_log_says_what_is_denied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each host once, whatever the program makes of it."""
    ask = "import socket\ntry: socket.gethostbyname('one.test')\nexcept OSError: pass"
    with caplog.at_level("WARNING"):
        assert outputs([ask, ask], monkeypatch, tmp_path, "data.example") == ["", ""]
    [said] = [one.getMessage() for one in caplog.records if "egress denied" in one.getMessage()]
    assert said.startswith("egress denied: one.test (no rule can permit this name). To allow it: ")
    assert " +one.test` (for a port other than 80 and 443: +one.test:PORT); for new" in said
    assert said.endswith("new sandboxes: egress in SANDBOX_KERNEL_EGRESS."), said


def test_without_a_server_the_log_says_that_there_is_no_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        outputs(["import socket; socket.gethostbyname('one.test')"], monkeypatch, tmp_path, "")
    [said] = [one.getMessage() for one in caplog.records if "without a net" in one.getMessage()]
    assert "SANDBOX_KERNEL_EGRESS=HOST" in said


def test_a_notebook_that_the_environment_names_asks_for_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For papermill and its like, which do not say which notebook they run."""
    notebook = nbformat.v4.new_notebook(metadata={"sandbox_kernel": {"egress": ["two.example"]}})
    nbformat.write(notebook, tmp_path / "n.ipynb")
    monkeypatch.setenv("SANDBOX_KERNEL_WORKSPACE", str(tmp_path / "n.ipynb"))
    ask = (
        "import socket\n"
        "for host in ('one.example', 'two.example'):\n"
        "    try: print(socket.gethostbyname(host)[:4])\n"
        "    except OSError: print('no')\n"
    )
    said = outputs([ask], monkeypatch, tmp_path, "one.example two.example")
    assert said == ["no\n127.\n"]
