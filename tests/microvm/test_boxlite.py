"""Kernels in real BoxLite microVMs: what a user sees, and that nothing is left of them.

One kernel is shared by most tests, in the order of this file: a VM takes long to start in the rig.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import BlockingKernelClient, KernelManager

pytest.importorskip("boxlite")

from sandbox_kernel.errors import SandboxGone, Unsupported
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.boxlite import BoxliteClient
from sandbox_kernel.sandboxes.boxlite.backend import home
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background
from tests.conformance.backends import row
from tests.conformance.conftest import Backend
from tests.conformance.kernels import START_AND_DIE, attached, execute, kernel, sandboxed
from tests.helpers.coroutines import finish
from tests.helpers.waiting import LIMIT, wait_until
from tests.kernels.live import provisioner_of

LOG = logging.getLogger(__name__)
MB = 1_000_000
BIG = int(os.environ.get("SANDBOX_KERNEL_TEST_OUTPUT_MB", "2")) * MB

Running = tuple[KernelManager, BlockingKernelClient]


def machines() -> list[str]:
    """The command lines of all processes on this host that run a box: jailers and VMs."""
    found = []
    boxes = os.fsencode(home() / "boxes")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            program = os.path.basename(words[0])
            if program in (b"bwrap", b"boxlite-shim") and boxes in b" ".join(words):
                found.append(f"{pid} {program.decode()}")
    return found


@pytest.fixture(scope="module")
def backend(pytestconfig: pytest.Config) -> Iterator[Backend]:
    """BoxLite, with records of this run's own; --backend-spec names the image of the rig."""
    folder = tempfile.mkdtemp(prefix="sk-")
    found = row("boxlite")
    spec = {**found.spec, **(pytestconfig.getoption("--backend-spec", None) or {})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_KERNEL_DATA_DIR", os.path.join(folder, "data"))
        patch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", os.path.join(folder, "run"))
        prefix = f"rig-{secrets.token_hex(3)}"
        yield Backend(BoxliteClient(), dataclasses.replace(found, spec=spec), prefix)
        with contextlib.suppress(AssertionError):
            os.kill(broker_pid(), signal.SIGTERM)  # who comes next has a broker of its own
            wait_until(lambda: not _has_broker())
    shutil.rmtree(folder)


@pytest.fixture(scope="module", autouse=True)
def none_left(backend: Backend) -> Iterator[None]:
    """Afterwards there is no VM and no box's folder that was not there before."""
    before = len(machines()), _boxes()
    yield
    assert (len(machines()), _boxes()) == before, machines()


def _boxes() -> set[str]:
    folder = home() / "boxes"
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _has_broker() -> bool:
    try:
        return bool(broker_pid())
    except AssertionError:
        return False


@pytest.fixture(scope="module")
def running(backend: Backend, none_left: None) -> Iterator[Running]:
    """The kernel that the tests share, through our provisioner."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in backend.environment(env=_env(backend)).items():
            patch.setenv(name, value)
        with kernel() as found:
            yield found


def _env(backend: Backend) -> dict[str, str]:
    return {**backend.row.spec.get("env", {}), "FROM_SPEC": "for all"}


# --- the kernel


def test_the_kernel_runs_in_a_vm_of_its_own(running: Running) -> None:
    """With a Linux that is not the host's; the log shows its version."""
    _, printed = execute(running[1], "import os; print(os.uname().release, os.getcwd())")
    release, folder = printed.split()
    print(f"\nguest kernel: Linux {release} (host: {os.uname().release})")
    assert release != os.uname().release
    assert folder == "/workspace"
    assert len(machines()) >= 1


def test_rich_output(running: Running) -> None:
    """Display data arrives with its types."""
    seen: list[dict[str, Any]] = []

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "display_data":
            seen.append(message["content"]["data"])

    code = "from IPython.display import HTML, display; display(HTML('<b>bold</b>'))"
    running[1].execute_interactive(code, output_hook=output, timeout=LIMIT)
    assert [data["text/html"] for data in seen] == ["<b>bold</b>"]


def test_big_output_is_exact(running: Running) -> None:
    """Megabytes of text that is nowhere the same, compared by its digest."""
    code = (
        "import hashlib, random, sys\n"
        "base = ''.join(map(chr, random.Random(7).choices(range(33, 127), k=1000)))\n"
        f"text = ''.join(f'{{i}} {{base[i % 900:][:90]}}\\n' for i in range({BIG // 95}))\n"
        "sys.stdout.write(text); sys.stdout.flush()\n"
        "digest = hashlib.sha256(text.encode()).hexdigest()"
    )
    _, printed = execute(running[1], code)
    _, digest = execute(running[1], "print(digest)")
    assert hashlib.sha256(printed.encode()).hexdigest() == digest.strip()
    assert len(printed) >= BIG * 0.9


def test_input(running: Running) -> None:
    """A cell asks, the client answers."""
    client = running[1]
    client.execute_interactive(
        "answer = input('who? ')",
        allow_stdin=True,
        stdin_hook=lambda _: client.input("a guest"),
        timeout=LIMIT,
    )
    assert execute(client, "print(answer)")[1] == "a guest\n"


def test_interrupt(running: Running) -> None:
    """A cell that would run for ever is interrupted, and the kernel is as before."""
    manager, client = running
    execute(client, "kept = 'here'")
    # One piece of output, and so one interrupt; print would write its line in two.
    code = "import sys, time; sys.stdout.write('started')\nwhile True: time.sleep(0.01)"
    reply, _ = execute(client, code, lambda _: manager.interrupt_kernel())
    assert reply["ename"] == "KeyboardInterrupt"
    assert execute(client, "print(kept)")[1] == "here\n"


def test_a_stream_that_is_cut(running: Running) -> None:
    """The exec stream breaks in the middle of output: all of it comes, once and in order."""
    tunnel = sandboxed(running[0]).tunnel
    before = tunnel.reconnects
    cuts: list[object] = []

    def cut(_: list[str]) -> None:
        if len(cuts) < 2:
            cuts.append(background.background_loop().call_soon_threadsafe(tunnel.cut))

    code = "for i in range(2000): print(i, flush=i % 100 == 0)"
    _, printed = execute(running[1], code, cut)
    assert printed.split() == [str(n) for n in range(2000)]
    assert tunnel.reconnects > before


def test_the_broker_dies(running: Running) -> None:
    """Boxes do not depend on it: the tunnel comes back through another one."""
    execute(running[1], "kept = 'still here'")
    before = sandboxed(running[0]).tunnel.reconnects
    os.kill(broker_pid(), signal.SIGKILL)
    assert execute(running[1], "print(kept)")[1] == "still here\n"
    assert sandboxed(running[0]).tunnel.reconnects > before


def broker_pid() -> int:
    """The process that owns BOXLITE_HOME."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"sandboxes.boxlite.sdk_client:DirectClient" in line:
                return int(pid)
    raise AssertionError("there is no broker")


# --- the reviewers' findings about an earlier BoxLite backend


def test_env_reaches_every_command(running: Running) -> None:
    """The spec's variables are in the kernel, and in commands next to it."""
    assert execute(running[1], "print(os.environ['FROM_SPEC'])")[1] == "for all\n"
    handle = sandboxed(running[0]).handle
    result = finish(handle.exec("/bin/sh", ["-c", "echo $FROM_SPEC $OWN"], env={"OWN": "too"}))
    assert result.stdout == "for all too\n"


def test_an_archive_outside_of_the_workspace(running: Running, tmp_path: Path) -> None:
    """Files go to and come from any folder of the box, /tmp among them."""
    handle = sandboxed(running[0]).handle
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(range(256)))
    for target in ("/tmp/unpacked", "/srv/unpacked"):
        finish(handle.upload(str(tmp_path), target))
        result = finish(handle.exec("sha256sum", [f"{target}/inner/file"]))
        assert result.stdout.split()[0] == hashlib.sha256(bytes(range(256))).hexdigest()

    async def back() -> bytes:
        read = b""
        async with await handle.open_stream(["tar", "-C", "/tmp", "-c", "unpacked"]) as stream:
            while piece := await stream.read():
                read += piece
        return read

    assert bytes(range(256)) in finish(back())


def test_two_processes_at_once(running: Running, backend: Backend) -> None:
    """Another process lists, uses and finds the same box while this one's kernel goes on."""
    name = sandboxed(running[0]).handle.name
    code = (
        "import asyncio, sys\n"
        "from sandbox_kernel.sandboxes.backends import load_backend\n"
        "async def main(name):\n"
        "    client = load_backend('boxlite')\n"
        "    handle = await client.get(name)\n"
        "    print(handle.id, name in await client.list(), flush=True)\n"
        "    print((await handle.exec('echo', ['from', 'another'])).stdout, end='', flush=True)\n"
        "    sys.stdin.readline()\n"
        "asyncio.run(main(sys.argv[1]))\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    with other:
        assert other.stdout.readline() == f"{sandboxed(running[0]).handle.id} True\n"
        assert other.stdout.readline() == "from another\n"
        assert execute(running[1], "print('this one')")[1] == "this one\n"
        other.communicate("\n", timeout=LIMIT)


# --- ends


def test_kernel_death_and_restart(running: Running) -> None:
    """The kernel dies by a signal: it is said; a new one runs in the same box."""
    manager, client = running
    execute(client, "open('note', 'w').write('kept')")
    before = sandboxed(manager).handle.id
    client.execute("os.kill(os.getpid(), 9)")
    wait_until(lambda: not manager.is_alive())
    assert "SIGKILL" in str(provisioner_of(manager).death)
    manager.restart_kernel(now=True)
    client.wait_for_ready(timeout=LIMIT)
    reply, printed = execute(client, "print(open('note').read()); kept")
    assert (reply["ename"], printed) == ("NameError", "kept\n")
    assert sandboxed(manager).handle.id == before


def test_a_snapshot_of_a_running_box_is_refused(running: Running) -> None:
    """It would not be of one point in time."""
    with pytest.raises(Unsupported, match="Stop the sandbox first"):
        finish(sandboxed(running[0]).handle.snapshot("live"))


def test_a_stopped_box(running: Running, backend: Backend) -> None:
    """It has no process left, takes no command and is not started by one; a snapshot of it makes a
    second box with its files; started again, it has them, too, and a kernel."""
    manager, client = running
    handle = sandboxed(manager).handle
    execute(client, "open('note', 'w').write('kept')")
    finish(handle.stop())
    assert finish(handle.info()).detail["pids"] == []
    assert machines() == []
    with pytest.raises(SandboxGone, match="stopped"):
        finish(handle.exec("true"))
    assert machines() == []
    finish(handle.snapshot("kept"))
    try:
        assert [found.name for found in finish(backend.client.snapshots())] == ["kept"]
        fields = {"name": f"{backend.prefix}-restored", "start_timeout": LIMIT}
        copy = finish(backend.client.restore("kept", SandboxSpec.from_mapping(fields)))
        try:
            assert finish(copy.exec("cat", ["note"])).stdout == "kept"
            assert finish(copy.shell("echo $FROM_SPEC")).stdout == "for all\n"
            assert copy.id != handle.id
        finally:
            finish(backend.client.remove(copy.name))
    finally:
        finish(backend.client.remove_snapshot("kept"))
    wait_until(lambda: not manager.is_alive())
    manager.restart_kernel(now=True)
    client.wait_for_ready(timeout=LIMIT)
    assert execute(client, "print(open('note').read())")[1] == "kept\n"
    assert sandboxed(manager).handle.id == handle.id


def test_a_host_process_that_is_killed(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one re-attaches by name: same box, no second one, variables there; then it removes
    the box, and no process of it is left."""
    for name, value in backend.environment().items():
        monkeypatch.setenv(name, value)
    before = len(machines())
    command = [sys.executable, "-c", START_AND_DIE, "x = 41", str(LIMIT)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    name, connection = json.loads(ran.stdout)
    boxes = _boxes()
    with attached(backend.client, name, connection) as (found, client):
        assert execute(client, "print(x + 1)")[1] == "42\n"
        assert _boxes() == boxes
        assert len(machines()) > before
    assert len(machines()) == before
    with pytest.raises(SandboxGone):
        finish(found.handle.exec("true"))


@pytest.mark.slow
def test_a_creation_that_was_cut_short(backend: Backend) -> None:
    """The broker is killed while it makes a box: the next creation finds and removes what is left
    of it, and the name can be used again."""

    async def test() -> None:
        spec = backend.spec()
        creating = asyncio.ensure_future(backend.client.create(spec))
        while not Records().list("boxlite") or not machines():
            assert not creating.done()
            await asyncio.sleep(0.05)
        os.kill(broker_pid(), signal.SIGKILL)
        await asyncio.wait({creating})
        assert creating.exception() is not None
        async with backend.sandbox(name=f"{backend.prefix}-next"):
            assert spec.name not in await backend.names()
            assert len(_boxes()) == boxes + 1

    boxes = len(_boxes())
    finish(test(), 3 * LIMIT)
