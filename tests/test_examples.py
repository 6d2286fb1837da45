"""The examples and notebooks do what they say, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.local import bubblewrap
from tests.agents.notebooks import printed, valid_notebook
from tests.helpers.own_folders import own_folders
from tests.kernels.live import jail_processes

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    """A folder of the test's own; no jail is left in it."""
    if problem := bubblewrap.why_not():
        pytest.skip(problem)
    with own_folders() as made:
        yield made
        assert jail_processes(made) == []
        assert list((made / "data" / "records").rglob("*.json")) == []


def run(*words: str, cwd: Path) -> str:
    """What a program prints; it must end well."""
    ran = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=150, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_examples_are_short() -> None:
    """Each can be read at a glance."""
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


def test_an_agent(tmp_path: Path) -> None:
    """Its model makes a slip, reads the error, and mends it; the cells are a notebook."""
    text = run(str(EXAMPLES / "agent_loop.py"), cwd=tmp_path)
    assert "NameError: name 'medain' is not defined" in text
    assert text.endswith(
        "answer: Median and mean are (27.5, 68.75); one high income moves the mean.\n"
    )
    cells = valid_notebook(tmp_path / "agent.ipynb").cells
    assert [cell.execution_count for cell in cells] == [1, 2]
    assert cells[0].outputs[0].ename == "NameError"


def test_a_pipeline(tmp_path: Path) -> None:
    lines = run(str(EXAMPLES / "pipeline.py"), cwd=tmp_path).splitlines()
    assert lines[0].startswith("('kernel-")
    assert lines[1:] == ["500000500000", "['total.txt']"]
    assert len(valid_notebook(tmp_path / "pipeline.ipynb").cells) == 3


@pytest.mark.slow
def test_a_sweep(tmp_path: Path) -> None:
    """Each run has its parameter, and a notebook of its own."""
    lines = run(str(EXAMPLES / "sweep.py"), cwd=tmp_path).splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        *("rate 0.05: converges", "rate 0.5: converges", "rate 1.05: does not converge")
    ]
    assert len(list((tmp_path / "sweep").glob("descent-*.ipynb"))) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    """From the first cell to the last, and they are kept without outputs."""
    source = valid_notebook(path)
    assert not any(cell.get("outputs") for cell in source.cells)
    assert source.metadata.kernelspec.name == "sandbox"
    output = tmp_path / "out.ipynb"
    run("-m", "sandbox_kernel", "run", str(path), "-o", str(output), cwd=tmp_path)
    cells = {cell.id: cell for cell in valid_notebook(output).cells if cell.cell_type == "code"}
    texts = {name: printed(cell) for name, cell in cells.items()}
    if path.stem == "data-analysis":
        assert texts["result"].startswith("Port Nowhere 2025: 9.1 °C on average")
        assert "<svg" in cells["plot"].outputs[0].data["image/svg+xml"]
    elif path.stem == "untrusted-code":
        refused = [
            line
            for name in ("secrets", "system", "network")
            for line in texts[name].splitlines()
            if ": refused (" in line
        ]
        assert len(refused) == 11
        assert "variables with secrets: []" in texts["secrets"]
        assert "CapEff:\t0000000000000000" in texts["privileges"]
        assert "Resource temporarily unavailable\nthe kernel goes on" in texts["limits"]
    elif path.stem == "workspace-history":
        assert texts["earlier"] == "This is run 1.\n"
    else:
        assert "No connection:" in texts["network"]


@pytest.mark.slow
def test_a_history_goes_on(tmp_path: Path) -> None:
    """The second run of the notebook finds what the first one wrote, as it promises."""
    notebook = str(ROOT / "notebooks" / "workspace-history.ipynb")
    words = ("run", notebook, "--workspace", "nightly", "-o", "out.ipynb")
    for _ in range(2):
        run("-m", "sandbox_kernel", *words, cwd=tmp_path)
    first, second = (
        c for c in valid_notebook(tmp_path / "out.ipynb").cells if c.cell_type == "code"
    )
    assert printed(first).startswith("This is run 2.\n  run 1 wrote result-1.txt at ")
    assert printed(second).count("->") == 2
    log = run("-m", "sandbox_kernel", "workspace", "log", "nightly", cwd=tmp_path)
    assert len(log.splitlines()) >= 3
    assert os.listdir(tmp_path) == ["out.ipynb"]
