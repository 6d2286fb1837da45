"""papermill's engine `sandbox`: everything as with papermill's own, in a sandbox."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import papermill
import pytest
from papermill.exceptions import PapermillExecutionError

from sandbox_kernel.jupyter.kernelspec import write_kernelspec
from sandbox_kernel.sandboxes.local import bubblewrap
from tests.helpers.own_folders import own_folders
from tests.kernels.live import jail_processes

from .notebooks import printed, valid_notebook, write_notebook

WHERE = "import os\nprint(os.uname().nodename, rate, os.environ.get('MARK'))"


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    """A folder of the test's own; no jail is left in it."""
    if problem := bubblewrap.why_not():
        pytest.skip(problem)
    with own_folders() as made:
        yield made
        assert jail_processes(made) == []
        assert list((made / "data" / "records").rglob("*.json")) == []


def test_one_word_more(tmp_path: Path) -> None:
    """The command, with a notebook for python3: its parameters arrive, in a sandbox."""
    path = write_notebook(tmp_path / "in.ipynb", "rate = 1", WHERE, tags=[["parameters"]])
    words = ["--engine", "sandbox", str(path), str(tmp_path / "out.ipynb"), "-p", "rate", "0.5"]
    ran = subprocess.run(
        [sys.executable, "-m", "papermill", *words], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    notebook = valid_notebook(tmp_path / "out.ipynb")
    assert printed(notebook.cells[-1]).startswith("kernel-")
    assert printed(notebook.cells[-1]).endswith(" 0.5 None\n")
    assert notebook.metadata.papermill.parameters == {"rate": 0.5}


def test_settings_and_kernels_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that `install` made keeps its settings; those of the call are added."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    config = {"memory_mib": 512, "env": {"MARK": "ours"}}
    write_kernelspec(name="mine", config=config, prefix=str(tmp_path))
    path = write_notebook(tmp_path / "in.ipynb", "rate = 1", WHERE)
    done = papermill.execute_notebook(
        *(path, tmp_path / "out.ipynb"),
        engine_name="sandbox",
        kernel_name="mine",
        sandbox_settings={"name": "named"},
        progress_bar=False,
    )
    assert printed(done.cells[-1]) == "named 1 ours\n"


def test_an_error_is_papermills(tmp_path: Path) -> None:
    """With the notebook written as far as it ran."""
    path = write_notebook(tmp_path / "in.ipynb", "print('before')", "1 / 0", "3")
    with pytest.raises(PapermillExecutionError, match="division by zero"):
        papermill.execute_notebook(
            path, tmp_path / "out.ipynb", engine_name="sandbox", progress_bar=False
        )
    assert any(
        printed(c) == "before\n"
        for c in valid_notebook(tmp_path / "out.ipynb").cells
        if c.cell_type == "code"
    )
