"""Which cell an event belongs to: told by the guest, who may say anything, or nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sandbox_kernel.audit.reading import audits, read
from sandbox_kernel.jupyter.cell_listener import hear
from sandbox_kernel.jupyter.envelopes import open_envelope
from sandbox_kernel.kernels.cells import LATE, Cells
from sandbox_kernel.paths import data_dir


class Rig:
    """Cells with a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.written: list[dict[str, Any]] = []
        self.cells = Cells(self.written.append, clock=lambda: self.now)
        self.cells.heard = True

    def event(self, seconds: float = 0.0, **facts: Any) -> None:
        self.cells({"kind": "egress", "seconds": seconds, **facts})

    def counts(self) -> list[int | None]:
        return [event.get("cell", {}).get("execution_count") for event in self.written]


async def test_the_cell_that_ran_when_it_began() -> None:
    """A download that ends during another cell belongs to the one that began it."""
    rig = Rig()
    rig.cells.began("a")
    rig.cells.began("a", 1)
    rig.event()
    rig.cells.flush()
    rig.now += 10
    rig.cells.ended("a")
    rig.now += 1
    rig.cells.began("b", 2)
    rig.now += 5
    rig.event(seconds=10)
    rig.event(seconds=3)
    assert rig.counts() == [1, 1, 2]
    assert rig.written[0]["cell"] == {"told_by": "guest", "execution_count": 1}


async def test_the_word_of_a_cell_may_come_late() -> None:
    """The event waits for it: a cell that had ended, and one that had begun, before the host heard
    of it."""
    rig = Rig()
    rig.cells.began("a", 1)
    rig.now += 10
    rig.event()
    assert rig.written == []
    rig.now += LATE / 2
    rig.cells.ended("a", ago=LATE)
    rig.cells.began("b", 2, ago=LATE * 3 / 4)
    rig.now += LATE
    await asyncio.sleep(2 * LATE)
    assert rig.counts() == [2]


async def test_between_cells_it_is_no_cells_and_without_a_listener_nobody_waits() -> None:
    rig = Rig()
    rig.cells.began("a", 1)
    rig.cells.ended("a")
    rig.now += 10
    rig.event(n=1)
    rig.now += LATE
    await asyncio.sleep(2 * LATE)
    assert rig.counts() == [None]
    rig.cells.heard = False
    rig.event(n=2)
    assert [event["n"] for event in rig.written] == [1, 2]


async def test_a_change_of_rules_is_no_cells() -> None:
    """The host has made it, whatever runs in the sandbox meanwhile."""
    rig = Rig()
    rig.cells.began("a", 1)
    rig.event(kind="policy")
    rig.event(kind="secret")
    rig.cells.flush()
    assert [(event["kind"], "cell" in event) for event in rig.written] == [
        ("policy", False),
        ("secret", True),
    ]


async def test_nothing_is_lost_when_the_kernel_ends() -> None:
    rig = Rig()
    rig.event(n=1)
    rig.cells.flush()
    assert rig.written == [{"kind": "egress", "seconds": 0.0, "n": 1}]


async def test_a_guest_that_says_too_much_is_bounded() -> None:
    """Cells, ids and waiting events have limits; numbers that are none are left out."""
    rig = Rig()
    for number in range(5000):
        rig.event(n=number)
        rig.cells.name(f"id-{number}" * 1000, "c" * 10_000)
    assert len(rig.written) > 4000
    for number in range(5000):
        rig.cells.began(f"cell-{number}" * 1000, 1)
    assert len(rig.cells._cells) <= 64
    assert len(rig.cells._ids) <= 256
    assert sum(map(len, rig.cells._cells)) < 64 * 300
    other = Rig()
    for odd in ("1", -1, 2**70, True, None, [1], {"a": 1}, 1.5):
        other.cells.began("x", odd)
    other.event()
    other.cells.flush()
    assert other.counts() == [None]


@pytest.mark.parametrize(
    ("parent", "kind", "content"),
    [
        ({"msg_type": "comm_msg", "msg_id": "a"}, "status", {"execution_state": "busy"}),
        ({}, "execute_input", {"execution_count": 3}),
        ({"msg_type": "execute_request", "msg_id": ["a"]}, "execute_input", {}),
        ({"msg_type": "execute_request"}, "status", {"execution_state": ["busy"]}),
        ({"msg_type": "execute_request", "msg_id": "a"}, "stream", {"text": "x"}),
        ({"msg_type": "execute_request", "msg_id": "a"}, "execute_input", []),
    ],
)
async def test_odd_messages(parent: Any, kind: str, content: Any) -> None:
    rig = Rig()
    header = {"msg_id": "m", "msg_type": kind}
    parts = [json.dumps(part).encode() for part in (header, parent, {}, content)]
    envelope = open_envelope([b"kernel.x", b"<IDS|MSG>", b"sig", *parts])
    assert envelope is not None
    hear(rig.cells, envelope)
    rig.event()
    rig.cells.flush()
    assert rig.counts() == [None]


ASK = "import urllib.request as r\ntry: r.urlopen('http://{}/')\nexcept OSError: pass"


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["nbclient", "papermill"])
def test_with_real_notebooks(tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first thing that a notebook does is attributed, and so are the next ones."""
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_WARM_SPARES", "false")
    monkeypatch.setenv("SANDBOX_KERNEL_EGRESS", "data.example")
    hosts = [f"host-{number}.example" for number in range(1, 6)]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(ASK.format(host)) for host in hosts],
        metadata={"kernelspec": {"name": "sandbox", "display_name": "s", "language": "python"}},
    )
    if tool == "papermill":
        papermill = pytest.importorskip("papermill")
        nbformat.write(notebook, tmp_path / "in.ipynb")
        paths = [str(tmp_path / name) for name in ("in.ipynb", "out.ipynb")]
        papermill.execute_notebook(*paths, progress_bar=False)
    else:
        from nbclient import NotebookClient

        NotebookClient(notebook, kernel_name="sandbox", timeout=60).execute()
    [path] = audits(data_dir() / "audit")
    found = {e["host"]: e["cell"] for e in read(path) if e["kind"] == "egress"}
    assert found == {
        host: {"told_by": "guest", "execution_count": number}
        for number, host in enumerate(hosts, 1)
    }


@pytest.mark.slow
def test_kernels_without_egress_have_no_listener(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor is the module imported."""
    code = (
        "import sys\n"
        "from jupyter_client.manager import start_new_kernel\n"
        "manager, client = start_new_kernel(kernel_name='sandbox')\n"
        "client.stop_channels(); manager.shutdown_kernel()\n"
        "wanted = ('.cell_listener', '.cells', '.shipping', '.gateway.gateway')\n"
        "print([m for m in sys.modules if m.endswith(wanted)])\n"
    )
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_WARM_SPARES", "false")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "[]\n", ran.stderr
