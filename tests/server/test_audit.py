"""The audit of a notebook's kernel in a Jupyter Server: which cell has asked for what, and who has
started the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.audit.reading import audits, read
from sandbox_kernel.paths import data_dir
from tests.helpers.waiting import wait_until

from .conftest import StartServer
from .running import open_notebook

ASK = "import urllib.request as r\ntry: r.urlopen('http://{}/')\nexcept OSError: pass"


def events() -> list[dict[str, Any]]:
    return [event for path in audits(data_dir() / "audit") for event in read(path)]


def denied(host: str) -> dict[str, Any]:
    wait_until(lambda: any(event.get("host") == host for event in events()), host)
    return next(event for event in events() if event.get("host") == host)


def test_a_request_is_that_of_its_cell(
    make_server: StartServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the notebook, the cell's id and its number; what a thread does between cells is no
    cell's; and after a restart it is the same."""
    monkeypatch.setenv("SANDBOX_KERNEL_EGRESS", "data.example")
    server = make_server()
    server.start()
    server.notebook("work.ipynb", ("1",))
    session, tab = open_notebook(server, "work.ipynb")
    tab.until_done(tab.begin("1", "cell-a"))
    tab.until_done(tab.begin(ASK.format("one.example"), "cell-b"))
    notebook = str(folder / "root" / "work.ipynb")
    one = denied("one.example")
    assert one["notebook"] == notebook
    assert one["cell"] == {"told_by": "guest", "execution_count": 2, "id": "cell-b"}
    tab.until_done(tab.begin(ASK.format("two.example")))
    assert denied("two.example")["cell"] == {"told_by": "guest", "execution_count": 3}
    later = (
        "import threading, time\n"
        "def ask():\n    time.sleep(1)\n    "
        + ASK.format("late.example").replace("\n", "\n    ")
        + "\nthreading.Thread(target=ask).start()"
    )
    tab.until_done(tab.begin(later, "cell-c"))
    assert "cell" not in denied("late.example")
    server.request("POST", f"/api/kernels/{tab.kernel_id}/restart")
    tab.until_done(tab.begin(ASK.format("again.example"), "cell-d"))
    again = denied("again.example")
    assert again["cell"] == {"told_by": "guest", "execution_count": 1, "id": "cell-d"}
    server.request("DELETE", f"/api/sessions/{session}")
    wait_until(lambda: events()[-1]["kind"] == "removed", "the end of the sandbox")
    of_kernel = [event for event in events() if event["kind"] != "egress"]
    kinds = [event["kind"] for event in of_kernel]
    assert kinds[:2] == ["created", "kernel-started"]
    assert "kernel-restarted" in kinds
    assert of_kernel[1]["notebook"] == notebook
    assert {event["by"]["program"] for event in of_kernel} == {"jupyter_server"}
