"""Kernels in the sandboxes of a backend, through each of Jupyter's kinds of client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

from sandbox_kernel.errors import SandboxTimeout
from sandbox_kernel.guest.spares import LEAST_MEMORY
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.tunnel import background
from sandbox_kernel.tunnel.background import submit
from tests.helpers.coroutines import finish
from tests.helpers.waiting import LIMIT, wait_until
from tests.kernels.live import provisioner_of

from .conftest import SCALE, Backend
from .kernels import START_AND_DIE, attached, execute, kernel, sandboxed

LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def chosen(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of the kernelspec ``sandbox`` run in this backend, and leave no sandbox behind."""
    for name, value in backend.environment().items():
        monkeypatch.setenv(name, value)
    before = set(finish(backend.client.list()))
    yield
    assert set(finish(backend.client.list())) <= before


def test_kernel_manager() -> None:
    """The synchronous manager: a cell runs in the sandbox, and not as a process of the host."""
    with kernel() as (manager, client):
        reply, printed = execute(client, "import os; print(os.getcwd()); 1/0")
        assert printed.strip() == sandboxed(manager).handle.workdir
        assert reply["ename"] == "ZeroDivisionError"
        assert manager.is_alive()


async def test_async_kernel_manager() -> None:
    """The asynchronous manager, as Jupyter Server uses it."""
    async with _async_kernel() as (manager, client):
        reply = await client.execute_interactive("a = 6 * 7", timeout=LIMIT)
        assert reply["content"]["status"] == "ok"
        await manager.restart_kernel(now=True)
        await client.wait_for_ready(timeout=LIMIT)
        reply = await client.execute_interactive("a", timeout=LIMIT, output_hook=lambda _: None)
        assert reply["content"]["ename"] == "NameError"
        assert await manager.is_alive()


@contextlib.asynccontextmanager
async def _async_kernel() -> AsyncIterator[tuple[AsyncKernelManager, Any]]:
    manager = AsyncKernelManager(kernel_name="sandbox")
    await manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        await client.wait_for_ready(timeout=LIMIT)
        yield manager, client
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


def test_nbclient() -> None:
    """A notebook runs headless, and its outputs are in it."""
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("x = [1, 2]\nprint('from the sandbox')"),
            nbformat.v4.new_code_cell("open('note', 'w').write('kept')\nx + [3]"),
        ]
    )
    client = NotebookClient(notebook, kernel_name="sandbox", timeout=LIMIT, startup_timeout=LIMIT)
    client.execute()
    assert notebook.cells[0].outputs[0].text == "from the sandbox\n"
    assert notebook.cells[1].outputs[0].data["text/plain"] == "[1, 2, 3]"


_USES_FILES = """
import os, helpers
print(open("data.csv").read(), helpers.word, os.path.isfile(".env"), os.path.isfile("my.key"))
try:
    with open("result.txt", "w") as file:
        file.write("back")
except OSError:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With data, a module and secrets."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "data.csv").write_text("1,2")
    (folder / "helpers.py").write_text("word = 'module'")
    for secret in (".env", "my.key"):
        (folder / secret).write_text("secret")
    return folder


@pytest.mark.parametrize(
    "mode", ["mount-ro", "mount", pytest.param("copy", marks=pytest.mark.slow)]
)
def test_files_beside_the_notebook(
    backend: Backend, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Data and modules are there, secrets are not, and results come back but from a read-only
    mount. A backend that cannot show a folder gives a copy, and says so."""
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", mode)
    with kernel(cwd=str(folder)) as (manager, client):
        assert execute(client, _USES_FILES)[1] == "1,2 module False False\n"
        told = "".join(provisioner_of(manager).notices)
        fallback = mode != "copy" and not backend.client.capabilities.folder
        assert (f"files={mode} gives each new sandbox a copy" in told) == fallback, told
    assert (folder / "result.txt").exists() == (mode != "mount-ro")
    assert (folder / ".env").read_text() == "secret"


def _run_with_nbclient(path: Path, out: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=LIMIT, startup_timeout=LIMIT, resources=where).execute()
    nbformat.write(notebook, out)


def _run_with_papermill(path: Path, out: Path) -> None:
    import papermill

    options = {"cwd": str(path.parent), "progress_bar": False, "start_timeout": int(LIMIT)}
    papermill.execute_notebook(str(path), str(out), **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("run", [_run_with_nbclient, _run_with_papermill])
def test_a_notebook_that_needs_the_files_beside_it(
    backend: Backend,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Path, Path], None],
) -> None:
    """It runs unchanged, as with a plain kernel, and its folder is as before."""
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", "mount-ro")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(_USES_FILES)])
    notebook.metadata["kernelspec"] = {"name": "sandbox", "display_name": "", "language": "python"}
    path, out = folder / "book.ipynb", tmp_path / "out.ipynb"
    nbformat.write(notebook, path)
    before = sorted(entry.name for entry in folder.iterdir())
    run(path, out)
    [output] = nbformat.read(out, as_version=4).cells[0].outputs
    assert output.text == "1,2 module False False\n"
    assert sorted(entry.name for entry in folder.iterdir()) == before


def test_interrupt() -> None:
    """A cell that would run for ever is interrupted, and the kernel is as before."""
    with kernel() as (manager, client):
        execute(client, "kept = 'here'")
        # One piece of output, and so one interrupt; print would write its line in two.
        code = "import sys, time; sys.stdout.write('started')\nwhile True: time.sleep(0.01)"
        reply, _ = execute(client, code, lambda _: manager.interrupt_kernel())
        assert reply["ename"] == "KeyboardInterrupt"
        assert execute(client, "print(kept)")[1] == "here\n"


def test_restart_keeps_the_sandbox() -> None:
    """Variables are gone, files are there: only the kernel's process is new."""
    with kernel() as (manager, client):
        before = sandboxed(manager).handle.id
        execute(client, "x = 1; open('note', 'w').write('kept')")
        manager.restart_kernel()
        client.wait_for_ready(timeout=LIMIT)
        reply, printed = execute(client, "print(open('note').read()); x")
        assert (reply["ename"], printed) == ("NameError", "kept\n")
        assert sandboxed(manager).handle.id == before


STOP_THE_AGENT = """
import os, signal
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\\0")
        if b"agent" in words and pid not in (1, os.getpid()):
            os.kill(pid, signal.SIGSTOP)
    except OSError:
        pass  # it has just ended
"""


def test_a_kernel_whose_agent_is_stopped_leaves_its_files() -> None:
    """A cell stops the agent, through which the host would end the kernel. A restart ends the
    kernel all the same, without the agent, and finds the sandbox and its files as they were."""
    with kernel() as (manager, client):
        execute(client, "open('kept.txt', 'w').write('kept')")
        sandbox = sandboxed(manager).handle.id
        client.execute(STOP_THE_AGENT)
        with contextlib.suppress(SandboxTimeout):
            for _ in range(50):  # a jail's first process lets it go on
                finish(sandboxed(manager).tunnel.control.call("status", timeout=SCALE))
                time.sleep(0.1)
        manager.restart_kernel(now=True)
        client.wait_for_ready(timeout=LIMIT)
        reply, printed = execute(client, "print(open('kept.txt').read())")
        assert (reply["status"], printed) == ("ok", "kept\n")
        assert sandboxed(manager).handle.id == sandbox


def test_shutdown_removes_the_sandbox(backend: Backend) -> None:
    """An orderly shutdown leaves nothing, too."""
    with kernel() as (manager, _):
        name = provisioner_of(manager).sandbox_name
        assert name in finish(backend.client.list())
        manager.shutdown_kernel()
        assert name not in finish(backend.client.list())


@pytest.mark.faults
@pytest.mark.usefixtures("over_the_wire")
def test_output_survives_cuts() -> None:
    """The stream to the sandbox breaks again and again: all output comes, once and in order."""
    lines, cuts = 20_000 // SCALE, 5
    with kernel() as (manager, client):
        tunnel = sandboxed(manager).tunnel
        made = 0

        def cut(printed: list[str]) -> None:
            nonlocal made
            if made < cuts and sum(map(len, printed)) > made * 15_000 // SCALE:
                made += 1
                background.background_loop().call_soon_threadsafe(tunnel.cut)

        # Flushed now and then, so that it comes as many messages.
        code = f"for i in range({lines}): print(i, flush=i % 200 == 0)"
        reply, printed = execute(client, code, cut)
        assert reply["status"] == "ok"
        assert printed.split() == [str(n) for n in range(lines)]
        assert made == cuts
        # A cut of a link that was just being made does not count as one.
        assert 1 <= tunnel.reconnects <= cuts


def test_a_kernel_that_dies_is_noticed() -> None:
    """With its signal, in words; the manager can start another one in the same sandbox."""
    with kernel() as (manager, client):
        client.execute("import os; os.kill(os.getpid(), 9)")
        wait_until(lambda: not manager.is_alive())
        assert "SIGKILL" in str(provisioner_of(manager).death)
        manager.restart_kernel(now=True)
        client.wait_for_ready(timeout=LIMIT)
        assert execute(client, "print('again')")[1] == "again\n"


def test_a_sandbox_that_dies_is_noticed(backend: Backend) -> None:
    """The kernel of a sandbox that was killed is dead, with the reason, and is not waited for."""
    with kernel() as (manager, _):
        handle = sandboxed(manager).handle
        if backend.row.crash is not None:
            backend.row.crash(finish(handle.info()))
        else:
            finish(handle.kill())
        wait_until(lambda: not manager.is_alive())
        assert handle.name in str(provisioner_of(manager).death)
        assert "killed" in str(provisioner_of(manager).death)


def test_a_sandbox_that_stopped_is_started_again(backend: Backend) -> None:
    """Restarting its kernel brings it back, with its files, where the backend can."""
    if not backend.capabilities.restart:
        pytest.skip("this backend cannot start a sandbox again")
    with kernel() as (manager, client):
        handle = sandboxed(manager).handle
        execute(client, "open('note', 'w').write('kept'); import os; os.sync()")
        finish(handle.stop())
        wait_until(lambda: not manager.is_alive())
        manager.restart_kernel(now=True)
        client.wait_for_ready(timeout=LIMIT)
        assert execute(client, "print(open('note').read())")[1] == "kept\n"
        assert sandboxed(manager).handle.id == handle.id


def test_reattach_from_another_process(backend: Backend) -> None:
    """The process that started the kernel is killed; another one goes on with its variables, and
    with the same connection file."""
    if not backend.capabilities.reattach:
        pytest.skip("this backend cannot reattach")
    command = [sys.executable, "-c", START_AND_DIE, "x = 41", str(LIMIT)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    name, connection = json.loads(ran.stdout)
    with attached(backend.client, name, connection) as (found, client):
        assert execute(client, "print(x + 1)")[1] == "42\n"
        assert found.exit_code is None


async def test_who_attaches_takes_over(backend: Backend) -> None:
    """Two at once do not fight over a kernel: the newer has it, the older is told so."""
    async with _async_kernel() as (manager, _):
        first = sandboxed(manager)
        second = await SandboxedKernel.attach(backend.client, first.handle.name, LOG)
        try:
            await asyncio.wait_for(first.wait(), LIMIT)
            assert "superseded" in first.death
            assert second.exit_code is None
            assert (await second.tunnel.control.call("status"))["running"]
        finally:
            # The older process leaves alone what is no longer its own.
            await second.remove()


def test_a_restart_takes_the_spare() -> None:
    """A kernel that has already started becomes the next one, and answers and prints as one. Only a
    small sandbox has none: its memory belongs to its kernel."""
    with kernel() as (manager, client):
        total = execute(client, "print(open('/proc/meminfo').readline().split()[1])")[1]

        def spare() -> Any:
            return submit(sandboxed(manager).tunnel.control.call("status")).result(LIMIT)["spare"]

        has_spares = int(total) * 1024 >= LEAST_MEMORY
        pid = wait_until(spare, "a spare") if has_spares else spare()
        manager.restart_kernel(now=True)
        printed = execute(client, "import os; print(os.getpid())")[1]
        assert (printed == f"{pid}\n") is has_spares
