"""The README's three ways in, and its program, run as they are written."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from sandbox_kernel.sandboxes.local import bubblewrap
from tests.agents.notebooks import printed, valid_notebook
from tests.helpers.own_folders import own_folders
from tests.kernels.live import jail_processes

README = (Path(__file__).parents[1] / "README.md").read_text()
WAYS = README.partition("## Three ways in")[2].partition("## How it works")[0]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORT = 10


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which the commands are given; no jail is left."""
    if problem := bubblewrap.why_not():
        pytest.skip(problem)
    with own_folders() as made:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("SANDBOX_KERNEL_WARM_SPARES", "0")
        yield tmp_path
        assert jail_processes(made) == []


def commands(first_word: str) -> list[str]:
    """The lines of the block that begins with this command."""
    for _, text in FENCE.findall(WAYS):
        lines = [line.removeprefix("$ ").partition(" #")[0] for line in text.splitlines()]
        if lines[0].startswith(first_word):
            return lines
    raise AssertionError(first_word)


def give(line: str) -> str:
    """A command, as a shell of this environment runs it; it must end well."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        line,
        shell=True,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, f"{line}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def test_the_ways_in_are_short() -> None:
    blocks = FENCE.findall(WAYS)
    assert len(blocks) == 3
    assert all(len(text.splitlines()) < SHORT for _, text in blocks)


def test_a_kernel_for_jupyterlab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that it installs sees what lies beside the notebook. (tests/browser chooses
    kernels in JupyterLab itself.)"""
    install, lab = commands("sandbox-kernel install")
    assert lab.split() == ["jupyter", "lab", "analysis.ipynb"]
    give(f"{install} --prefix {folder}/prefix")
    monkeypatch.setenv("JUPYTER_PATH", f"{folder}/prefix/share/jupyter")
    (folder / "data.csv").write_text("6,7")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell("print(open('data.csv').read())")]
    nbformat.write(notebook, folder / "analysis.ipynb")
    give("jupyter execute --inplace --kernel_name=sandbox-data analysis.ipynb")
    assert printed(valid_notebook(folder / "analysis.ipynb").cells[0]) == "6,7\n"


@pytest.mark.slow
def test_pipelines(folder: Path) -> None:
    """Each command runs the notebook, with its parameter if it names one."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    parameters = nbformat.v4.new_code_cell("year = 1999", metadata={"tags": ["parameters"]})
    notebook.cells = [parameters, nbformat.v4.new_code_cell("print('the year is', year)")]
    nbformat.write(notebook, folder / "report.ipynb")
    for line in commands("sandbox-kernel run"):
        give(line if "done.ipynb" in line else f"{line} --output done.ipynb")
        last = valid_notebook(folder / "done.ipynb").cells[-1]
        assert printed(last) == f"the year is {2026 if '-p year' in line else 1999}\n"
        (folder / "done.ipynb").unlink()


@pytest.mark.parametrize("number", range(len(re.findall(r"^```python", README, re.MULTILINE))))
def test_programs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """They print what their comments say."""
    code = [text for language, text in FENCE.findall(README) if language == "python"][number]
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compiled = compile(code, f"README.md, program {number}", "exec", flags=flags)
    if "await" in code and "asyncio.run" not in code:
        outcome = eval(compiled, {})
        assert inspect.iscoroutine(outcome)
        asyncio.run(outcome)
    else:
        exec(code, {"__name__": "__main__"})
    out = capsys.readouterr().out
    assert out
    for comment in re.findall(r"^ *print\(.*#.*: (.*)$", code, re.MULTILINE):
        assert comment.strip() in out
