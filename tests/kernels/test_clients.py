"""The programs that people use kernels with: notebooks, pipelines, a console, a server."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sandbox_kernel.records import Records
from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until

from .conftest import KernelStarter, StartKernel, install_kernelspec
from .live import PATIENCE, Live, plain

WHERE = "import os; print(os.getcwd())"


def notebook(folder: Path, *cells: str, kernel: str = "sandbox") -> Path:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    book.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
    path = folder / "book.ipynb"
    nbformat.write(book, path)
    return path


def printed(path: Path) -> list[str]:
    """What each cell of an executed notebook printed."""
    cells = nbformat.read(path, as_version=4).cells
    return ["".join(o.get("text", "") for o in c.outputs) for c in cells if c.cell_type == "code"]


def jupyter(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jupyter", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=2 * PATIENCE, check=True, **options
    )


def test_nbclient(folder: Path) -> None:
    """A notebook is executed in a sandbox, which is gone afterwards."""
    nbclient = pytest.importorskip("nbclient")
    path = notebook(folder, WHERE, "print(6 * 7)")
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=PATIENCE).execute()
    assert [c.outputs[0].text for c in book.cells] == ["/workspace\n", "42\n"]


def test_nbclient_when_a_cell_fails(folder: Path) -> None:
    """The error comes through, and the sandbox is gone all the same."""
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.read(notebook(folder, "1 / 0"), as_version=4)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        nbclient.NotebookClient(book, timeout=PATIENCE).execute()


def test_nbclient_when_the_kernel_dies(folder: Path) -> None:
    """A dead kernel ends the notebook with an error."""
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.read(notebook(folder, "import os; os._exit(1)"), as_version=4)
    with pytest.raises(nbclient.exceptions.DeadKernelError):
        nbclient.NotebookClient(book, timeout=PATIENCE).execute()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_papermill(folder: Path) -> None:
    """Parameters go in, an executed notebook comes out."""
    papermill = pytest.importorskip("papermill")
    path = notebook(folder, "n = 1", "print(n * 2)")
    book = nbformat.read(path, as_version=4)
    book.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(book, path)
    out = folder / "out.ipynb"
    papermill.execute_notebook(str(path), str(out), parameters={"n": 21}, progress_bar=False)
    assert printed(out)[-1] == "42\n"


def test_jupyter_execute(folder: Path) -> None:
    """The command line of nbclient."""
    path = notebook(folder, WHERE)
    jupyter("execute", str(path), "--inplace")
    assert printed(path) == ["/workspace\n"]


def test_jupyter_nbconvert(folder: Path) -> None:
    """nbconvert executes, too."""
    path = notebook(folder, WHERE)
    jupyter("nbconvert", "--to", "notebook", "--execute", "--inplace", str(path))
    assert printed(path) == ["/workspace\n"]


def test_default_provisioner_for_the_plain_python_kernel(folder: Path) -> None:
    """JUPYTER_DEFAULT_PROVISIONER_NAME puts kernels into sandboxes that know nothing of them."""
    path = notebook(folder, WHERE, kernel="python3")
    env = {**os.environ, "JUPYTER_DEFAULT_PROVISIONER_NAME": "sandbox"}
    jupyter("execute", str(path), "--inplace", env=env)
    assert printed(path) == ["/workspace\n"]


def test_default_provisioner_for_another_language(folder: Path) -> None:
    """A kernel for Bash, sandboxed as it is."""
    pytest.importorskip("bash_kernel")
    jupyter("kernelspec", "list")
    place = folder / "share" / "kernels" / "bash"
    place.mkdir(parents=True)
    argv = [sys.executable, "-m", "bash_kernel", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Bash", "language": "bash", "env": {"PS1": "$"}}
    (place / "kernel.json").write_text(json.dumps(spec))
    path = notebook(folder, "pwd; echo $((6 * 7))", kernel="bash")
    env = {**os.environ, "JUPYTER_DEFAULT_PROVISIONER_NAME": "sandbox"}
    jupyter("execute", str(path), "--inplace", env=env)
    assert printed(path)[0].split() == ["/workspace", "42"]


def test_console(folder: Path) -> None:
    """`jupyter console`, typed into through a terminal."""
    pytest.importorskip("jupyter_console")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyter", "console", "--kernel=sandbox", "--simple-prompt"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(slave)
    try:
        screen = ""

        def until(pattern: str) -> None:
            nonlocal screen
            deadline = time.monotonic() + PATIENCE
            while not re.search(pattern, plain(screen)):
                assert time.monotonic() < deadline, screen
                if select.select([master], [], [], 1.0)[0]:
                    with contextlib.suppress(OSError):
                        screen += os.read(master, 65536).decode(errors="replace")

        until(r"In \[1\]")
        os.write(master, b"import os; os.getcwd(), 6 * 7\n")
        until(r"'/workspace', 42")
        until(r"In \[2\]")
        os.write(master, b"exit\n")
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


# --- the server


class Server:
    """A Jupyter server of our own, spoken to over HTTP and websockets."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token

    def call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://{self._url}{path}",
            method=method,
            headers={"Authorization": f"token {self._token}"},
            data=None if body is None else json.dumps(body).encode(),
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def socket(self, kernel: str) -> Any:
        websocket = pytest.importorskip("websocket")
        return websocket.create_connection(
            f"ws://{self._url}/api/kernels/{kernel}/channels?token={self._token}",
            timeout=PATIENCE,
            suppress_origin=True,
        )


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    pytest.importorskip("jupyter_server")
    port = free_port()
    options = {
        "ip": "127.0.0.1",
        "port": port,
        "port_retries": 0,
        "open_browser": False,
        "root_dir": str(folder),
        "allow_root": True,
    }
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyter", "server", "--IdentityProvider.token=secret"),
            "--SandboxServer.on_shutdown=delete",
            *(f"--ServerApp.{name}={value}" for name, value in options.items()),
        ],
        stdout=log,
        stderr=log,
    )
    found = Server(f"127.0.0.1:{port}", "secret")

    def answers() -> bool:
        assert process.poll() is None, (folder / "server.log").read_text()
        with contextlib.suppress(OSError):
            return bool(found.call("GET", "/api/status"))
        return False

    try:
        wait_until(answers, "the server answers")
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
        log.close()


def execute(channel: Any, code: str, *, until: str = "idle") -> str:
    """Run a cell over a server's websocket; what it printed (up to the text ``until``)."""
    header = {
        "msg_id": os.urandom(8).hex(),
        "msg_type": "execute_request",
        "username": "",
        "session": "s",
        "version": "5.3",
    }
    content = {
        "code": code,
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": False,
    }
    message = {
        "header": header,
        "parent_header": {},
        "metadata": {},
        "content": content,
        "channel": "shell",
        "buffers": [],
    }
    channel.send(json.dumps(message))
    text = ""
    while True:
        got = json.loads(channel.recv())
        if got["parent_header"].get("msg_id") != header["msg_id"]:
            continue
        if got["msg_type"] == "stream":
            text += got["content"]["text"]
        if got["msg_type"] == "error":
            text += got["content"]["ename"]
        if until in text or got["content"].get("execution_state") == until:
            return text


def test_server(server: Server) -> None:
    """What JupyterLab does: start, execute, interrupt, restart, delete."""
    specs = server.call("GET", "/api/kernelspecs")["kernelspecs"]
    assert specs["sandbox"]["spec"]["display_name"] == "Python 3 (sandbox)"
    kernel = server.call("POST", "/api/kernels", {"name": "sandbox"})["id"]
    channel = server.socket(kernel)
    try:
        assert execute(channel, WHERE) == "/workspace\n"
        execute(channel, "x = 1; print('begun')\nwhile True: pass", until="begun")
        server.call("POST", f"/api/kernels/{kernel}/interrupt")
        while json.loads(channel.recv())["content"].get("execution_state") != "idle":
            pass
        assert execute(channel, "print('x is', x)") == "x is 1\n"
        (record,) = Records().list("local")
        server.call("POST", f"/api/kernels/{kernel}/restart")
        assert execute(channel, "print('x' in globals())") == "False\n"
        assert [r.name for r in Records().list("local")] == [record.name]
    finally:
        channel.close()
    server.call("DELETE", f"/api/kernels/{kernel}")
    wait_until(lambda: Records().list("local") == [], "the sandbox is gone")


def test_server_that_is_stopped_takes_its_kernels_along(server: Server) -> None:
    """If its user wants it so (on_shutdown); see tests/server for what it does by default. The
    fixture stops the server; the check for leftovers does the rest."""
    server.call("POST", "/api/kernels", {"name": "sandbox"})
    assert len(Records().list("local")) == 1


# --- installing packages


def make_wheel(folder: Path, name: str, version: str = "1.0") -> Path:
    """A wheel with one module, whose ``VERSION`` is its version."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(file, text)
    return path


def make_backend(folder: Path) -> Path:
    """A build backend without dependencies, for an editable install of the module ``editable``."""
    path = folder / "make_editable.py"
    path.write_text(
        """
import os, zipfile
NAME = "editable-1.0-py3-none-any.whl"
FILES = {
    "editable.pth": os.getcwd() + chr(10),
    "editable-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: editable\\nVersion: 1.0\\n",
    "editable-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nGenerator: t\\n"
    "Root-Is-Purelib: true\\nTag: py3-none-any\\n",
}
def build_editable(folder, config_settings=None, metadata_directory=None):
    record = "".join(f + ",,\\n" for f in [*FILES, "editable-1.0.dist-info/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, NAME), "w") as wheel:
        for name, text in {**FILES, "editable-1.0.dist-info/RECORD": record}.items():
            wheel.writestr(name, text)
    return NAME
build_wheel = build_editable
"""
    )
    return path


def test_pip_install_in_the_sandbox(start_kernel: StartKernel, tmp_path: Path) -> None:
    """%pip works at once and after a restart, and touches nothing on the host."""
    wheel = make_wheel(tmp_path, "tinypackage")
    live: Live = start_kernel(readable=[str(tmp_path)])
    live.ok(f"%pip install --no-index {wheel}")
    assert live.ok("import tinypackage; tinypackage.VERSION").value == "'1.0'"
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("import tinypackage; tinypackage.VERSION").value == "'1.0'"
    found = subprocess.run([sys.executable, "-c", "import tinypackage"], capture_output=True)
    assert found.returncode != 0


def test_pip_without_a_network(start_kernel: StartKernel, tmp_path: Path) -> None:
    """%pip and !pip for something that is not there: pip does not try again and again, and the last
    thing said is that this sandbox has no network, and what to do. !pip is the sandbox's own, so
    what it installs, also as an editable folder, is there; no word of the network then."""
    wheel = make_wheel(tmp_path, "tinypackage")
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(make_backend(tmp_path), project / "backend.py")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (project / "editable.py").write_text("VERSION = '3'\n")
    live: Live = start_kernel(readable=[str(tmp_path)])
    for magic in ("%pip", "!pip", "!python -m pip"):
        said = live.run(f"{magic} install surely-not-there").text()
        assert "etrying" not in said
        assert "No matching distribution" in said
        notice = said[said.index("NOTE: this sandbox has no network") :]
        assert f"{sys.executable} -m pip install" in notice
    for install in (str(wheel), f"-e {project}"):
        said = live.ok(f"!pip install --no-build-isolation {install}").text()
        assert "Successfully installed" in said
        assert "NOTE" not in said
    assert "/home/sandbox/" in live.ok("!pip --version; which pip3").text()
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("import editable, tinypackage; editable.VERSION").value == "'3'"


@pytest.mark.slow
def test_pip_install_on_the_host(start_kernel: KernelStarter, folder: Path, tmp_path: Path) -> None:
    """What is installed on the host is there for the kernel after a restart, at the latest."""
    place = tmp_path / "env"
    venv.create(place, with_pip=True, symlinks=True)
    python = str(place / "bin" / "python")
    # The new environment borrows ipykernel from this one.
    packages = subprocess.run(
        [
            sys.executable,
            "-c",
            "import ipykernel, os; print(os.path.dirname(ipykernel.__path__[0]))",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (site,) = place.glob("lib/python3*/site-packages")
    (site / "borrowed.pth").write_text(packages + "\n")
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    name = install_kernelspec(folder, "own-env", argv)
    live = start_kernel(kernel_name=name, readable=[packages])
    assert live.run("import tinypackage").reply["ename"] == "ModuleNotFoundError"
    wheel = make_wheel(tmp_path, "tinypackage")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-index", str(wheel)], check=True)
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("import tinypackage; tinypackage.VERSION").value == "'1.0'"
