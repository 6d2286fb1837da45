"""With a notebook its kernel's files are saved, and they are there when it is opened again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import websocket

from sandbox_kernel.jupyter.server.save_hooks import SAVE_EVENTS
from sandbox_kernel.workspace import Store, name_for_notebook
from tests.helpers.waiting import wait_until
from tests.kernels.live import PATIENCE

from .conftest import StartServer
from .running import TOKEN, JupyterServer, kill_the_sandbox, open_notebook

WRITE = """
import os, pathlib
pathlib.Path("data/deep").mkdir(parents=True)
pathlib.Path("data/deep/random").write_bytes(os.urandom(3_000_000))
pathlib.Path("run.sh").write_text("#!/bin/sh\\n")
os.chmod("run.sh", 0o750)
os.utime("run.sh", ns=(10**18, 1_234_567_890_123_456_789))
os.symlink("data/deep/random", "link")
"""
LOOK = """
import hashlib, json, os
found = {}
for folder, _, names in os.walk("."):
    for name in names:
        path = os.path.join(folder, name)
        status = os.lstat(path)
        data = os.readlink(path).encode() if os.path.islink(path) else open(path, "rb").read()
        found[path] = [oct(status.st_mode), status.st_mtime_ns, hashlib.sha256(data).hexdigest()]
print(json.dumps(found, sort_keys=True))
"""


def workspace_of(server: JupyterServer, path: str) -> str:
    return name_for_notebook(str(server.root / path))


def saves(server: JupyterServer, path: str) -> list[Any]:
    return list(Store.open().saves(workspace_of(server, path)))


def saved(server: JupyterServer, path: str, count: int = 1) -> None:
    """Wait until a notebook has so many saves of its workspace."""
    wait_until(lambda: len(saves(server, path)) >= count or None, f"save {count} of {path}")


@pytest.mark.slow
def test_files_come_back(server: JupyterServer) -> None:
    """Saved, the sandbox killed, opened again: byte for byte, with modes and times."""
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    tab.run(WRITE)
    before = json.loads(tab.run(LOOK))
    assert len(before) == 3
    assert before["./run.sh"][1] == 1_234_567_890_123_456_789
    server.notebook("n.ipynb", ("x = 1",))
    saved(server, "n.ipynb")
    tab.close()
    server.end(signal.SIGKILL)
    kill_the_sandbox()

    server.start()
    assert server.get("/api/kernels") == []
    _, tab = open_notebook(server, "n.ipynb")
    assert json.loads(tab.run(LOOK)) == before


@pytest.mark.slow
def test_a_save_that_fails(server: JupyterServer, folder: Path) -> None:
    """The notebook is saved all the same; the log says why the workspace was not. Later it is."""
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    tab.run("open('file', 'w').write('1')")
    store = folder / "data" / "store"
    store.rename(folder / "data" / "away")
    store.write_text("no folder")
    server.notebook("n.ipynb", ("saved = True",))
    assert "saved = True" in (server.root / "n.ipynb").read_text()
    name = workspace_of(server, "n.ipynb")
    wait_until(lambda: f"workspace {name} was not saved: " in server.log, "the error in the log")
    store.unlink()
    (folder / "data" / "away").rename(store)
    server.notebook("n.ipynb", ("saved = 2",))
    saved(server, "n.ipynb")


@pytest.mark.slow
def test_save_as(server: JupyterServer) -> None:
    """JupyterLab's "Save Notebook As" gives the session of the kernel that runs another path, and
    saves the new notebook: it has the files when it is opened again, and so has the old one, as
    they were."""
    server.notebook("a.ipynb", ("x = 1", "y = 2"))
    session, tab = open_notebook(server, "a.ipynb")
    tab.run("open('first', 'w').write('1')")
    server.notebook("a.ipynb", ("x = 1", "y = 2"))
    saved(server, "a.ipynb")
    server.request("PATCH", f"/api/sessions/{session}", {"path": "b.ipynb", "name": "b.ipynb"})
    tab.run("open('second', 'w').write('2')")
    server.notebook("b.ipynb", ("x = 1", "y = 2", "z = 3"))
    saved(server, "b.ipynb", 2)
    tab.close()
    server.request("DELETE", f"/api/sessions/{session}")
    for path, files in (("a.ipynb", "['first']"), ("b.ipynb", "['first', 'second']")):
        session, tab = open_notebook(server, path)
        assert tab.run("import os; print(sorted(os.listdir()))") == f"{files}\n"
        tab.close()
        server.request("DELETE", f"/api/sessions/{session}")


@pytest.mark.slow
def test_notebooks_that_move(server: JupyterServer) -> None:
    """A workspace follows a rename, also one of the folder, is copied with a copy, and is kept
    when the notebook is deleted; the kernel that runs goes on saving under the new name."""
    (server.root / "a").mkdir()
    server.notebook("a/n.ipynb")
    session, tab = open_notebook(server, "a/n.ipynb")
    tab.run("open('file', 'w').write('1')")
    server.notebook("a/n.ipynb")
    saved(server, "a/n.ipynb")

    server.request("PATCH", "/api/contents/a/n.ipynb", {"path": "a/m.ipynb"})
    server.request("PATCH", f"/api/sessions/{session}", {"path": "a/m.ipynb", "name": "m.ipynb"})
    saved(server, "a/m.ipynb")
    wait_until(lambda: not saves(server, "a/n.ipynb"), "the end of the old name")
    tab.run("open('file', 'w').write('22')")
    server.notebook("a/m.ipynb")
    saved(server, "a/m.ipynb", 2)

    server.request("POST", "/api/contents/a", {"copy_from": "a/m.ipynb"})
    copies = [p.name for p in (server.root / "a").glob("*Copy*.ipynb")]
    saved(server, f"a/{copies[0]}")
    server.request("PATCH", "/api/contents/a", {"path": "b"})
    saved(server, "b/m.ipynb", 2)
    saved(server, f"b/{copies[0]}")

    server.request("DELETE", f"/api/contents/b/{copies[0]}")
    name = workspace_of(server, f"b/{copies[0]}")
    wait_until(lambda: Store.open().retired(name), "the retirement of the workspace")
    assert saves(server, f"b/{copies[0]}")
    assert name not in Store.open().names()


@pytest.mark.slow
def test_a_workspace_belongs_to_its_notebook(server: JupyterServer) -> None:
    """A notebook is deleted in a shell, and its kernel shut down. A new one under its name has none
    of its files. Another one is renamed to that name, with saves going on meanwhile: they are all
    under the new name, and it is opened again with its own files."""
    server.notebook("taken.ipynb", ("theirs = 1",))
    session, tab = open_notebook(server, "taken.ipynb")
    tab.run("open('theirs', 'w').write('1')")
    tab.close()
    server.request("DELETE", f"/api/sessions/{session}")
    saved(server, "taken.ipynb")
    (server.root / "taken.ipynb").unlink()
    server.request("PUT", "/api/contents/taken.ipynb", {"type": "notebook"})
    session, tab = open_notebook(server, "taken.ipynb")
    look = "import os; print(sorted(os.listdir()))"
    said = " ".join(tab.run(look).split())  # it is broken into lines, wherever that may be
    assert said.endswith(" writes its files. []")
    tab.run("open('second', 'w').write('1')")
    tab.close()
    server.request("DELETE", f"/api/sessions/{session}")
    saved(server, "taken.ipynb")
    (server.root / "taken.ipynb").unlink()

    server.notebook("n.ipynb", ("ours = 1",))
    session, tab = open_notebook(server, "n.ipynb")
    tab.run("import os; open('ours', 'wb').write(os.urandom(30_000_000))")
    server.notebook("n.ipynb", ("ours = 2",))
    server.notebook("n.ipynb", ("ours = 3",))  # waits for the first, while the notebook moves
    server.request("PATCH", "/api/contents/n.ipynb", {"path": "taken.ipynb"})
    server.request("PATCH", f"/api/sessions/{session}", {"path": "taken.ipynb"})
    tab.run("open('ours', 'w').write('22')")
    server.notebook("taken.ipynb", ("ours = 4",))
    name = workspace_of(server, "taken.ipynb")
    wait_until(
        lambda: [s.bytes for s in saves(server, "taken.ipynb")][-1:] == [2] or None,
        "the last save, under the new name",
    )
    wait_until(lambda: server.log.count("is kept as") == 2, "both leftovers in the log")
    assert not saves(server, "n.ipynb")
    kept = [n for n in Store.open().names(retired=True) if n != name]
    assert len(kept) == 2
    tab.close()
    server.request("DELETE", f"/api/sessions/{session}")
    _, tab = open_notebook(server, "taken.ipynb")
    assert tab.run(look) == "['ours']\n"


@pytest.mark.slow
def test_first_opening_and_mirror(make_server: StartServer) -> None:
    """By policy the folder beside the notebook is there, and results are written back; at the next
    start what has changed beside the notebook is there, too, and conflicts are said in it."""
    server = make_server("--SandboxProvisioner.upload=folder", "--SandboxProvisioner.mirror=True")
    server.start()
    (server.root / "work").mkdir()
    (server.root / "work" / "data.csv").write_text("a,b\n1,2\n")
    server.notebook("work/n.ipynb")
    session, tab = open_notebook(server, "work/n.ipynb")
    assert tab.run("print(open('data.csv').read(), end='')") == "a,b\n1,2\n"
    tab.run("open('result.txt', 'w').write('done')")
    server.notebook("work/n.ipynb", ("x",))
    result = server.root / "work" / "result.txt"
    wait_until(result.exists, "the result on the host")
    assert result.read_text() == "done"
    # The notebook itself has changed on the host since it was uploaded, and is left alone.
    assert json.loads((server.root / "work" / "n.ipynb").read_text())["cells"][0]["source"] == ["x"]
    # A cell that deletes everything deletes nothing here.
    tab.run("import subprocess; subprocess.run('rm -rf ./*; echo > last', shell=True)")
    server.notebook("work/n.ipynb", ("y",))
    wait_until((server.root / "work" / "last").exists, "the next write-back")
    assert (server.root / "work" / "data.csv").read_text() == "a,b\n1,2\n"
    assert result.read_text() == "done"
    assert json.loads((server.root / "work" / "n.ipynb").read_text())["cells"][0]["source"] == ["y"]

    (server.root / "work" / "last").write_text("by the user")
    tab.run("open('last', 'w').write('by the sandbox')")
    tab.close()
    server.request("DELETE", f"/api/sessions/{session}")
    assert (server.root / "work" / "last").read_text() == "by the user"
    (server.root / "work" / "data.csv").write_text("new")
    (server.root / "work" / "more.csv").write_text("more")
    _, tab = open_notebook(server, "work/n.ipynb")
    assert tab.run("print(*(open(n + '.csv').read() for n in ('data', 'more')))").endswith(
        "new more\n"
    )
    assert tab.run("print(open('last').read())") == "by the sandbox\n"
    said = [m["content"]["text"] for m in tab.messages if m["content"].get("name") == "stderr"]
    assert len(said) == 1
    assert ": last. The kernel has the workspace's versions" in " ".join(said[0].split())


@pytest.mark.slow
def test_first_opening_by_globs(make_server: StartServer) -> None:
    """Only what the globs choose is uploaded."""
    server = make_server("--SandboxProvisioner.upload=*.csv,/conf/")
    server.start()
    for name in ("data.csv", "sub/more.csv", "conf/a.toml", "private.key", "sub/x.key"):
        (server.root / name).parent.mkdir(exist_ok=True)
        (server.root / name).write_text("1")
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    look = "import glob; print(sorted(glob.glob('**', recursive=True)))"
    assert tab.run(look) == "['conf', 'conf/a.toml', 'data.csv', 'sub', 'sub/more.csv']\n"


@pytest.mark.slow
def test_failed_saves_are_in_the_log(server: JupyterServer, folder: Path) -> None:
    """`workspace log` shows them, too, among those that were made."""
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    tab.run("open('file', 'w').write('1')")
    server.notebook("n.ipynb", ("x = 1",))
    saved(server, "n.ipynb")
    name = workspace_of(server, "n.ipynb")
    # A file that the scan reads as rules, and cannot make sense of.
    tab.run("open('.sandboxignore', 'w').write('a\\n' * 5000)")
    server.notebook("n.ipynb", ("x = 2",))
    wait_until(lambda: Store.open().failures(name), "the failure in the store")
    tab.run("import os; os.unlink('.sandboxignore'); open('file', 'w').write('2')")
    server.notebook("n.ipynb", ("x = 3",))
    saved(server, "n.ipynb", 2)
    command = [sys.executable, "-m", "sandbox_kernel", "workspace", "log"]
    # By its name, and by the path of the notebook.
    for spelled in (name, str(server.root / "n.ipynb")):
        ran = subprocess.run([*command, spelled, "--json"], capture_output=True, check=True)
        history = json.loads(ran.stdout)
        assert [one["kind"] for one in history] == ["persist", "failed", "persist"]
        assert ".sandboxignore has more than" in history[1]["message"]
    table = subprocess.run([*command, name], capture_output=True, check=True, text=True).stdout
    assert ".sandboxignore has more than" in table.splitlines()[2]


@pytest.mark.slow
def test_clients_are_told(server: JupyterServer) -> None:
    """Each outcome is a Jupyter event; saves that come while one runs become one more."""
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    tab.run("import os; open('big', 'wb').write(os.urandom(40_000_000))")
    events = websocket.create_connection(
        f"ws://127.0.0.1:{server.port}/api/events/subscribe",
        header=[f"Authorization: token {TOKEN}"],
        timeout=PATIENCE,
    )
    with ThreadPoolExecutor(8) as pool:  # one after the other, each might find no save that runs
        list(pool.map(lambda number: server.notebook("n.ipynb", (f"x = {number}",)), range(8)))
    outcomes: list[dict[str, Any]] = []
    asked = 0
    while asked < 8 or not outcomes or outcomes[-1]["status"] != "unchanged":
        event = json.loads(events.recv())
        if event["schema_id"] == SAVE_EVENTS:
            outcomes.append(event)
        elif event.get("action") == "save":
            asked += 1
    events.close()
    assert outcomes[0]["status"] == "saved"
    assert outcomes[0]["files"] == 1
    assert len(outcomes) < asked == 8
    assert len(saves(server, "n.ipynb")) == 1
