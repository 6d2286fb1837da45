"""`sandbox-kernel run NOTEBOOK`: its command line, exit codes, and what it says and writes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sandbox_kernel.cli.parser import parse
from sandbox_kernel.sandboxes.local import bubblewrap
from tests.agents.notebooks import printed, valid_notebook, write_notebook

from .running import Cli, at_terminal

LIMIT = ("--memory-mib", "384")


@pytest.fixture(autouse=True)
def _jails() -> None:
    if problem := bubblewrap.why_not():
        pytest.skip(problem)


@pytest.mark.parametrize(
    ("line", "notebooks", "command"),
    [
        ("run a.ipynb", ["a.ipynb"], []),
        ("run a.ipynb b.ipynb --jobs 2 --output out/", ["a.ipynb", "b.ipynb"], []),
        ("run --memory-mib 512 a.ipynb --timeout 3", ["a.ipynb"], []),
        ("run -p x -5 a.ipynb -p y b.ipynb", ["a.ipynb"], []),
        ("run --output=o.ipynb in.txt", ["in.txt"], []),
        ("run -- a.ipynb -p x 1", [], ["a.ipynb", "-p", "x", "1"]),
        ("run python a.ipynb -p x", [], ["python", "a.ipynb", "-p", "x"]),
        ("run --cwd a.ipynb cat b.ipynb", [], ["cat", "b.ipynb"]),
        ("exec name a.ipynb", [], ["a.ipynb"]),
    ],
)
def test_what_is_a_notebook(line: str, notebooks: list[str], command: list[str]) -> None:
    """The first word that is no option decides, or an option that only notebooks have; what is
    behind -- is a command."""
    given = parse(line.split())
    assert (given.notebooks, given.command) == (notebooks, command)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run a.ipynb --tty", "--tty and --cwd are for commands"),
        ("run -o out.ipynb", "say which notebook"),
        ("run a.ipynb -- ls", "a notebook takes nothing behind --"),
        ("run a.ipynb b.ipynb", "--output FOLDER"),
        ("run a.ipynb b/a.ipynb -o out", "Two notebooks are called 'a.ipynb'"),
        ("run a.ipynb -o b.html", "neither a notebook (.ipynb) nor a folder"),
        ("run -o out.ipynb a.txt", "'a.txt' is no notebook"),
        ("run a.ipynb -p x 1 2", "'2' is no notebook"),
        ("run a.ipynb --outptu b.ipynb", "did you mean --output?"),
        ("run a.ipynb -y [1]", "-y has to be names with values"),
        ("run a.ipynb -f none.yaml", "'none.yaml' cannot be read"),
        ("run a.ipynb --jobs 0", "at least 1"),
        ("run none.ipynb", "cannot be read: No such file"),
    ],
)
def test_wrong_usage(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    """Each is exit code 2, says what is wrong, and makes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    ran = cli(*line.split())
    assert (ran.returncode, ran.stdout) == (2, "")
    assert words in ran.stderr
    assert list(tmp_path.glob("*.ipynb")) == []


def test_a_notebook_that_passes(cli: Cli, tmp_path: Path) -> None:
    """The output is beside it and named on stdout; lines on stderr tell where it is."""
    path = write_notebook(tmp_path / "in.ipynb", "a = 1", "print(a, b)", tags=[["parameters"]])
    ran = cli("run", str(path), "-p", "a", "2", "-y", "b: [x]", *LIMIT)
    assert (ran.returncode, ran.stdout) == (0, f"{tmp_path}/in.run.ipynb\n")
    assert "in.ipynb: cell 2 of 3\n" in ran.stderr
    assert "in.ipynb passed: 3 cells in " in ran.stderr
    assert printed(valid_notebook(tmp_path / "in.run.ipynb").cells[-1]) == "2 ['x']\n"
    assert cli.names() == []


@pytest.mark.parametrize(
    ("code", "cell", "options", "words"),
    [
        (3, "def f(x):\n    return 1 / x\nf(0)", [], "failed: ZeroDivisionError"),
        (3, "input()", [], "asks for input"),
        (4, "print('out', flush=True)\nwhile True: pass", ["--timeout", "5"], "within 5 s"),
        pytest.param(
            *(4, "while True: pass", ["--deadline", "30"], "the time for all was over"),
            marks=pytest.mark.slow,
        ),
        (5, "import os; os._exit(7)", [], "cell 2 of 2, ended with its kernel: exit code 7"),
        (1, "3", ["--image", "python:3.12"], "image"),
        (2, "3", ["--backend", "locl"], "Did you mean 'local'?"),
    ],
)
def test_exit_codes(
    cli: Cli, tmp_path: Path, code: int, cell: str, options: list[str], words: str
) -> None:
    """Each way to end has its own, a sentence that helps, and a notebook as far as it ran."""
    path = write_notebook(tmp_path / "in.ipynb", "print('before')", cell)
    ran = cli("run", str(path), "--output", str(tmp_path / "out.ipynb"), *LIMIT, *options)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert words in ran.stderr
    assert "jupyter_client" not in ran.stderr, "the traceback of a log"
    if code >= 3:
        assert f"As far as it ran, it is in {tmp_path}/out.ipynb." in ran.stderr
        assert printed(valid_notebook(tmp_path / "out.ipynb").cells[0]) == "before\n"
    assert cli.names() == []


def test_the_failed_cell_is_last(cli: Cli, tmp_path: Path) -> None:
    """Its source, and its traceback without colours: what a log is read for."""
    path = write_notebook(tmp_path / "in.ipynb", "1", "def f(x):\n    return 1 / x\nf(0)")
    lines = cli("run", str(path), *LIMIT).stderr.splitlines()
    at = lines.index("--- in.ipynb, cell 2")
    assert lines[at + 1 : at + 5] == ["def f(x):", "    return 1 / x", "f(0)", "---"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "\x1b" not in "".join(lines)


def test_steps_as_json(cli: Cli, tmp_path: Path) -> None:
    """One object in each line of stdout; the last has the outcome."""
    path = write_notebook(tmp_path / "in.ipynb", "1", "1 / 0")
    ran = cli("run", "--json", str(path), *LIMIT)
    steps: list[dict[str, Any]] = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [step["event"] for step in steps] == [
        *("started", "cell", "cell_done", "cell", "cell_done", "ended")
    ]
    assert [step["at"] for step in steps] == sorted(step["at"] for step in steps)
    assert (steps[4]["cell"], steps[4]["status"]) == (2, "error")
    ended = steps[-1]
    assert (ended["outcome"], ended["exit_code"], ran.returncode) == ("cell failed", 3, 3)
    assert (ended["done"], ended["cells"]) == (1, 2)
    assert ended["failed_cells"][0]["error"] == "ZeroDivisionError: division by zero"


def test_several_into_a_folder(cli: Cli, tmp_path: Path) -> None:
    """The folder is made; the first that did not pass, in the order given, decides the code."""
    sources = {"a": "print(1)", "b": "import os; os._exit(1)", "c": "1 / 0"}
    paths = [str(write_notebook(tmp_path / f"{n}.ipynb", s)) for n, s in sources.items()]
    ran = cli("run", *paths, "--jobs", "3", "--output", str(tmp_path / "done"), *LIMIT)
    assert (ran.returncode, ran.stdout) == (5, f"{tmp_path}/done/a.ipynb\n")
    assert sorted(os.listdir(tmp_path / "done")) == ["a.ipynb", "b.ipynb", "c.ipynb"]
    assert "b.ipynb, cell 1 of 1" in ran.stderr
    assert "c.ipynb, cell 1 of 1, failed" in ran.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal(cli: Cli, tmp_path: Path, signum: int) -> None:
    """What has run is written, the sandbox is gone, and the exit code names the signal."""
    path = write_notebook(tmp_path / "in.ipynb", "print('before')", "import time; time.sleep(600)")
    output = tmp_path / "out.ipynb"
    running = cli.start("run", "--json", str(path), "-o", str(output), *LIMIT)
    assert running.stdout is not None
    assert any(
        '"event": "cell", "notebook"' in line and '"cell": 2' in line
        for line in map(bytes.decode, running.stdout)
    )
    running.send_signal(signum)
    last = running.communicate(timeout=60)[0].splitlines()[-1]
    assert running.returncode == 128 + signum
    assert json.loads(last)["outcome"] == "interrupted"
    assert printed(valid_notebook(output).cells[0]) == "before\n"
    assert cli.names() == []


def test_a_bar_at_a_terminal(cli: Cli, tmp_path: Path) -> None:
    """Cells and time, in one line that goes away; then the output's name."""
    path = write_notebook(tmp_path / "in.ipynb", "1", "import time; time.sleep(2)", "3")
    with at_terminal(cli, "run", str(path), *LIMIT) as terminal:
        terminal.expect(r"\d:\d\d  \[\.{20}\] in\.ipynb 0/3")
        terminal.expect(r"\d:\d\d  \[######\.{14}\] in\.ipynb 1/3")
        terminal.expect(r"in\.ipynb passed: 3 cells in \d+\.\d s")
        terminal.expect(r"in\.run\.ipynb\r\n")
        assert terminal.process.wait(60) == 0


def test_options_win_over_the_environment(cli: Cli, tmp_path: Path) -> None:
    """As with commands; and --workspace is a saved workspace, which the next run has."""
    source = "import os\nprint(os.environ.get('A'), os.listdir())\nopen('kept', 'w').close()"
    path = write_notebook(tmp_path / "in.ipynb", source)
    words = ("run", str(path), "--env", "A=1", "--workspace", "nightly", *LIMIT)
    for expected in ("1 []\n", "1 ['kept']\n"):
        ran = cli(*words, env={"SANDBOX_KERNEL_ENV": "A=2", "SANDBOX_KERNEL_WORKSPACE": "other"})
        assert (ran.returncode, ran.stderr.count("volume")) == (0, 0), ran.stderr
        assert printed(valid_notebook(tmp_path / "in.run.ipynb").cells[0]) == expected
    assert "nightly" in cli("workspace", "list").stdout


def test_text_of_a_notebook_cannot_control_a_terminal(cli: Cli, tmp_path: Path) -> None:
    """Neither names nor errors."""
    path = tmp_path / "a\x1b]0;title\x07.ipynb"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("raise ValueError('\\x1b[2J\\u202e')")]
    )
    nbformat.write(notebook, path)
    ran = cli("run", str(path), *LIMIT)
    assert ran.returncode == 3
    assert not {"\x1b", "\x07", "\u202e"} & set(ran.stderr + ran.stdout)
