"""Kernels with rules for egress, as users run them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from sandbox_kernel.gateway.audit import read
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


def test_pip_install_with_nothing_but_the_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed, used, refused = outputs(
        [
            "%pip install --no-deps cowsay",
            "import cowsay; cowsay.cow('moo')",
            "import urllib.request; urllib.request.urlopen('https://elsewhere.example/')",
        ],
        monkeypatch,
        tmp_path,
        "@pip",
    )
    assert "Successfully installed cowsay" in installed
    assert "moo" in used
    line = (
        "egress denied: elsewhere.example:443 (no rule allows it; allow it with "
        'egress=["elsewhere.example"])'
    )
    assert line in refused
    [log] = (data_dir() / "audit").glob("*.jsonl")
    events = [event for event in read(log) if event["kind"] == "egress"]
    assert {event["action"] for event in events} == {"allow", "deny"}
    assert [event["host"] for event in events if event["action"] == "deny"] == ["elsewhere.example"]
    assert all(event["received"] > 0 for event in events if event["action"] == "allow")


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


def test_without_a_server_the_log_says_what_is_denied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each host once, whatever the program makes of it."""
    ask = "import socket\ntry: socket.gethostbyname('one.test')\nexcept OSError: pass"
    with caplog.at_level("WARNING"):
        assert outputs([ask, ask], monkeypatch, tmp_path, "data.example") == ["", ""]
    [said] = [one.getMessage() for one in caplog.records if "egress denied" in one.getMessage()]
    assert said.startswith("egress denied: one.test (no rule can permit this name). To allow it: ")
    assert said.endswith(" +one.test`; for new sandboxes: egress in SANDBOX_KERNEL_EGRESS."), said


def test_without_a_server_the_log_says_that_there_is_no_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        outputs(["import socket; socket.gethostbyname('one.test')"], monkeypatch, tmp_path, "")
    [said] = [one.getMessage() for one in caplog.records if "without a net" in one.getMessage()]
    assert "SANDBOX_KERNEL_EGRESS=HOST" in said
