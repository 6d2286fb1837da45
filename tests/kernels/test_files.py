"""Notebooks with data, modules and folders beside them, in each mode of ``files``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sandbox_kernel.errors import SpecError
from sandbox_kernel.jupyter.kernel_workspace import open_store

from .conftest import StartKernel
from .live import PATIENCE, Live

MODES = ("copy", "mount-ro", "mount")
READ = """
import csv, os
import helpers
from package.inner import answer
rows = list(csv.reader(open("data.csv")))
print(os.getcwd(), rows, helpers.double(answer), open("sub/deep.txt").read())
"""
READS = "/workspace [['a', 'b'], ['1', '2']] 84 deep\n"
SECRETS = (
    *(".env", "sub/.git/config", "server.pem", "sub/id_rsa", "private/notes.txt"),
    *("OTHER.PEM", "Credentials.json"),
)
PEEK = f"""
def peek(path):
    try:
        return open(path).read()
    except OSError:
        return ""
print([peek(path) for path in {SECRETS!r}])
"""


@pytest.fixture
def project(folder: Path) -> Path:
    """A folder with a notebook, with all that it needs, and with what is nobody's business."""
    top = folder / "project"
    for place in ("sub/.git", "package", "private"):
        (top / place).mkdir(parents=True)
    (top / "data.csv").write_text("a,b\n1,2\n")
    (top / "helpers.py").write_text("def double(x):\n    return 2 * x\n")
    (top / "package" / "inner.py").write_text("answer = 42\n")
    (top / "sub" / "deep.txt").write_text("deep")
    for name in SECRETS:
        (top / name).write_text("SECRET")
    (top / ".sandboxignore").write_text("private/\n")
    return top


def notebook(project: Path, *cells: str) -> Path:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    book.metadata["kernelspec"] = {"name": "sandbox", "display_name": "s", "language": "python"}
    path = project / "book.ipynb"
    nbformat.write(book, path)
    return path


def in_folder(start_kernel: StartKernel, project: Path, **settings: Any) -> Live:
    """A kernel that a client has started for this folder."""
    from jupyter_client import KernelManager
    from traitlets.config import Config

    manager = KernelManager(kernel_name="sandbox", config=Config({"SandboxProvisioner": settings}))
    manager.start_kernel(cwd=str(project))
    live = Live(manager, manager.client())
    start_kernel.started.append(live)  # type: ignore[attr-defined]
    live.client.start_channels()
    live.client.wait_for_ready(timeout=PATIENCE)
    return live


@pytest.mark.parametrize("mode", MODES)
def test_nbclient(project: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Relative paths and imports work as with a plain kernel, and nothing hidden is there."""
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", mode)
    book = nbformat.read(notebook(project, READ, PEEK), as_version=4)
    resources = {"metadata": {"path": str(project)}}
    nbclient.NotebookClient(book, timeout=PATIENCE, resources=resources).execute()
    assert [cell.outputs[0].text for cell in book.cells] == [READS, f"{[''] * len(SECRETS)}\n"]
    assert sorted(path.name for path in project.iterdir() if path.name.startswith(".")) == [
        ".env",
        ".sandboxignore",
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
def test_papermill(project: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The folder that papermill is told to run in."""
    papermill = pytest.importorskip("papermill")
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", mode)
    write = "" if mode == "mount-ro" else "print(1, file=open('result.txt', 'w'))"
    path = notebook(project, READ, write)
    out = project.parent / "out.ipynb"
    papermill.execute_notebook(str(path), str(out), cwd=str(project), progress_bar=False)
    assert nbformat.read(out, as_version=4).cells[0].outputs[0].text == READS
    assert (project / "result.txt").exists() == (mode != "mount-ro")


@pytest.mark.parametrize("mode", MODES)
def test_jupyter_execute(project: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The notebook's own folder, wherever the command is run."""
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", mode)
    path = notebook(project, READ)
    command = [sys.executable, "-m", "jupyter", "execute", str(path), "--inplace"]
    subprocess.run(command, timeout=2 * PATIENCE, check=True, cwd="/", capture_output=True)
    assert nbformat.read(path, as_version=4).cells[0].outputs[0].text == READS


def test_a_mount_is_live(start_kernel: StartKernel, project: Path) -> None:
    """Both sides see at once what the other one writes; the files are the user's own. No workspace
    is saved, and a restart goes on in the same folder."""
    live = in_folder(start_kernel, project, files="mount")
    live.ok("print('from inside', file=open('sub/result.txt', 'w'))")
    assert (project / "sub" / "result.txt").read_text() == "from inside\n"
    assert (project / "sub" / "result.txt").stat().st_uid == project.stat().st_uid
    (project / "later.txt").write_text("from outside")
    assert live.ok("print(open('later.txt').read())").text() == "from outside\n"
    assert live.provisioner.saved_workspace is None
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("print(open('later.txt').read())").text() == "from outside\n"


def test_a_read_only_mount_is_one(start_kernel: StartKernel, project: Path) -> None:
    live = in_folder(start_kernel, project, files="mount-ro")
    assert live.run("open('data.csv', 'a')").reply["ename"] == "OSError"
    assert live.run("open('new', 'w')").reply["ename"] == "OSError"
    (project / "later.txt").write_text("from outside")
    assert live.ok("print(open('later.txt').read())").text() == "from outside\n"


def test_a_copy_brings_results_back(start_kernel: StartKernel, project: Path) -> None:
    """When the kernel is shut down. What the host has changed meanwhile stays, and the workspace
    with the other version is named; otherwise nothing is left of it."""
    live = in_folder(start_kernel, project, files="copy")
    live.ok("print('inside', file=open('result.txt', 'w'))")
    live.ok("open('data.csv', 'w').write('inside')")
    live.ok("import os; os.remove('helpers.py'); open('.hidden', 'w').write('x')")
    (project / "data.csv").write_text("outside")
    live.manager.shutdown_kernel()
    assert (project / "result.txt").read_text() == "inside\n"
    assert (project / "data.csv").read_text() == "outside"
    assert (project / "helpers.py").exists()
    assert not (project / ".hidden").exists()
    [left] = open_store().blobs.folders("workspaces")
    assert not open_store().retired(left)


def test_what_a_copy_leaves_out_is_said(
    start_kernel: StartKernel, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, and at the end, when nothing else has it."""
    os.mkfifo(project / "pipe")
    with caplog.at_level("WARNING"):
        live = in_folder(start_kernel, project, files="copy")
        live.ok("import os; os.mkdir('shut'); open('shut/x', 'w').close(); os.chmod('shut', 0)")
        live.manager.shutdown_kernel()
    said = [record.getMessage() for record in caplog.records]
    [start] = [line for line in said if "not brought into the sandbox" in line]
    assert "pipe: a named pipe" in start
    [end] = [line for line in said if "files were not saved" in line]
    assert end.endswith(": 1 files were not saved: shut: Permission denied")


def test_copies_of_one_folder_at_the_same_time(start_kernel: StartKernel, project: Path) -> None:
    """A kernel does not undo what another one has brought back since it was started."""
    first, second = (in_folder(start_kernel, project, files="copy") for _ in range(2))
    first.ok("open('data.csv', 'w').write('first')")
    second.ok("open('second.txt', 'w').write('second')")
    first.manager.shutdown_kernel()
    second.manager.shutdown_kernel()
    assert (project / "data.csv").read_text() == "first"
    assert (project / "second.txt").read_text() == "second"
    third = in_folder(start_kernel, project, files="copy")
    assert third.ok("print(open('data.csv').read(), open('second.txt').read())").text() == (
        "first second\n"
    )
    names = open_store().blobs.folders("workspaces")
    assert sum(bool(open_store().retired(name)) for name in names) == 2


def test_mounts_share_no_spares(start_kernel: StartKernel, project: Path) -> None:
    """A kernel for another folder sees that folder."""
    other = project.parent / "other"
    other.mkdir()
    (other / "only.txt").touch()
    settings = {"files": "mount-ro", "pool_size": 1}
    first = in_folder(start_kernel, project, **settings)
    second = in_folder(start_kernel, other, **settings)
    assert "data.csv" in first.ok("import os; print(os.listdir())").text()
    assert second.ok("import os; print(os.listdir())").text() == "['only.txt']\n"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"files": "mount", "upload": "folder"}, "Leave upload out"),
        ({"files": "copy", "upload": "folder", "mirror": True}, "Leave upload and mirror out"),
        ({"files": "mount-ro", "workspace": "mine"}, "Leave workspace out"),
        ({"files": "mount", "persist": True}, "Leave persist out"),
        ({"files": "copy", "persist": False}, "persist=false must be left out"),
        ({"files": "mount", "disk_mib": 100}, "disk_mib cannot be held"),
        ({"files": "everything"}, "is 'none' or 'copy' or 'mount-ro' or 'mount'"),
    ],
)
def test_what_does_not_go_together(
    start_kernel: StartKernel, project: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        in_folder(start_kernel, project, **settings)


@pytest.mark.parametrize("mode", MODES)
def test_folders_that_are_never_shown(
    start_kernel: StartKernel, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Also if a link leads there; nothing of them is copied either."""
    (folder / "home" / ".aws" / "cli").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "link").symlink_to(folder / "home" / ".aws")
    for place in ("/", "/etc/ssl", folder / "home", folder / "home/.aws/cli", folder / "link"):
        with pytest.raises(SpecError, match="cannot be shown"):
            in_folder(start_kernel, Path(place), files=mode)


def test_a_copy_has_nothing_hidden_in_folders_with_strange_names(
    start_kernel: StartKernel, project: Path
) -> None:
    for name in ("a\nb/.env", "a\nb/my.key", "a\nb/private/notes"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("SECRET")
    (project / "a\nb" / "seen").touch()
    live = in_folder(start_kernel, project, files="copy")
    code = "from pathlib import Path; print([p.name for p in Path('a\\nb').rglob('*')])"
    assert live.ok(code).text() == "['seen']\n"


SCRIPT = """
import nbclient, nbformat
cell = nbformat.v4.new_code_cell("open('data.csv')")
book = nbformat.v4.new_notebook(cells=[cell])
try:
    nbclient.NotebookClient(book, kernel_name="sandbox").execute()
except nbclient.exceptions.CellExecutionError as error:
    print("mount-ro" in str(error))
"""


def test_a_missing_file_is_explained(project: Path) -> None:
    """On stderr of a script that uses nbclient; the kernel's own message stays as it is."""
    pytest.importorskip("nbclient")
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=True,
    )
    assert ran.stdout == "False\n"
    assert "'data.csv' lies beside the notebook" in ran.stderr
    assert "SANDBOX_KERNEL_FILES=mount-ro" in ran.stderr


def test_no_process_imports_what_a_sandbox_writes(
    start_kernel: StartKernel, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m jupyterlab` imports from the folder that it is started in."""
    monkeypatch.syspath_prepend(str(project / "sub"))
    with pytest.raises(SpecError, match="imports modules from"):
        in_folder(start_kernel, project, files="mount")
    live = in_folder(start_kernel, project, files="mount-ro")
    assert live.ok("open('data.csv')")
