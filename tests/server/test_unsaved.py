"""A last save that fails must not cost the only copy of somebody's files: the sandbox is kept."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import websocket
from moto.server import ThreadedMotoServer

from sandbox_kernel.errors import WorkspaceError
from sandbox_kernel.jupyter import kernel_workspace
from sandbox_kernel.jupyter.server.save_hooks import SAVE_EVENTS
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.workspace import Store, blobs, export, packs
from tests.emulators.running import Running
from tests.helpers.small_disk import needs_root, small_disk
from tests.helpers.waiting import wait_until
from tests.kernels.live import PATIENCE, jail_processes, provisioner_of, run_cell
from tests.workspace.faultyproxy import FaultyProxy

from .conftest import statuses
from .running import TOKEN, JupyterServer, Tab
from .saving_kernels import break_store, kernel, mend_store, run_kernel

CLI = Path(sys.executable).with_name("sandbox-kernel")


@pytest.fixture(autouse=True)
def named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels save to the workspace ``work``, in a store of the test's own; its folder."""
    monkeypatch.setenv("SANDBOX_KERNEL_WORKSPACE", "work")
    monkeypatch.setenv("SANDBOX_KERNEL_STORE", str(folder / "store"))
    return folder / "store"


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLI, *arguments], capture_output=True, text=True, timeout=PATIENCE)


def test_a_failed_last_save_keeps_the_sandbox(
    named: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store cannot be written when a kernel is shut down. The shutdown succeeds, nothing of the
    kernel runs on, and its sandbox stays: the log says what to do, ``ps`` says unsaved, ``rm``
    wants --force, and a new kernel does not start with the older files. When the store can be
    written again, ``workspace save`` saves the files and removes the sandbox."""
    run_kernel("open('old', 'w').write('1')")
    with kernel("open('new', 'w').write('2')") as manager:
        break_store(named)
        manager.shutdown_kernel()
        assert not manager.has_kernel
    assert "sandbox-kernel workspace save work" in caplog.text
    (record,) = Records().list("local")
    wait_until(lambda: not jail_processes(folder), "the end of what ran")
    assert "unsaved" in cli("ps").stdout
    (shown,) = json.loads(cli("ps", "--json").stdout)
    assert shown["name"] == record.name
    assert str(named) in shown["unsaved"]
    refused = cli("rm", record.name)
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    assert cli("rm", "--all").stdout == ""
    with pytest.raises(WorkspaceError, match=f"older than those in sandbox '{record.name}'"):
        run_kernel("")
    failed = cli("workspace", "save", "work")
    assert failed.returncode == 1
    assert str(named) in failed.stderr
    mend_store(named)
    saved = cli("workspace", "save", record.name)
    assert (saved.returncode, saved.stdout) == (0, "work\n"), saved.stderr
    assert not Records().list("local")
    assert run_kernel("import os; print(sorted(os.listdir()))") == "['new', 'old']\n"
    assert cli("workspace", "save").stderr.strip().endswith("Nothing is unsaved.")


def test_the_next_start_saves_first(named: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who simply opens the notebook again goes on with what could not be saved then, and it is
    saved before the first cell runs. The log names what is on another host. ``rm --force``
    gives it up instead."""
    with kernel("open('f', 'w').write('kept')") as manager:
        break_store(named)
        manager.shutdown_kernel()
    mend_store(named)
    assert run_kernel("print(open('f').read()); open('f', 'w').write('more')") == "kept\n"
    assert len(Store.open().saves("work")) == 2
    with kernel("open('f', 'w').write('lost')") as manager:
        break_store(named)
        manager.shutdown_kernel()
    mend_store(named)
    (record,) = Records().list("local")
    here, record.place = record.place, {"host": "far away"}
    Records().save(record)
    assert run_kernel("print(open('f').read())") == "more\n"
    assert "They are on another host" in caplog.text
    record.place = here
    Records().save(record)
    assert cli("rm", "--force", record.name).returncode == 0
    assert run_kernel("print(open('f').read())") == "more\n"


@needs_root
def test_the_disk_of_everything_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store, sandboxes and records are on one disk, as they are by default, and somebody fills it.
    The kernel is shut down: its sandbox is kept, nothing of it runs on, and ``ps`` says why. With
    room again, the next kernel has the files."""
    monkeypatch.delenv("SANDBOX_KERNEL_STORE")
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(folder / "disk" / "data"))
    with small_disk(folder / "disk", "64m") as disk:
        try:
            with kernel("open('f', 'w').write('kept')") as manager:
                disk.fill()
                manager.shutdown_kernel()
            (shown,) = json.loads(cli("ps", "--json").stdout)
            assert shown["status"] == "stopped"
            assert "No space left" in shown["unsaved"]
            disk.free()
            assert run_kernel("print(open('f').read())") == "kept\n"
            assert not Records().list("local")
        finally:
            for record in Records().list("local"):
                asyncio.run(LocalClient().remove(record.name))


@pytest.mark.parametrize("own_disk", [False, True])
def test_files_of_a_sandbox_that_was_killed(
    own_disk: bool, named: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox is killed from outside with files in it that no save has. Its kernel cannot be
    asked for them any more; but they are on this machine's disk, in a folder or in a file system of
    their own, and are saved from there; later, if the store cannot be written just then."""
    if own_disk:
        monkeypatch.setenv("SANDBOX_KERNEL_DISK_MIB", "64")
    with kernel("open('f', 'w').write('kept')") as manager:
        (record,) = Records().list("local")
        if own_disk and not record.data.get("own_disk"):
            manager.shutdown_kernel()
            pytest.skip("no file system can be made for a sandbox here")
        os.kill(record.data["init"][0], signal.SIGKILL)
        wait_until(lambda: provisioner_of(manager).death, "the end of the sandbox")
        manager.shutdown_kernel()
    assert not Records().list("local")
    export(Store.open(), "work", folder / "out")
    assert (folder / "out" / "f").read_text() == "kept"
    with kernel("open('f', 'w').write('later')") as manager:
        break_store(named)
        manager.shutdown_kernel()
    (record,) = Records().list("local")
    wait_until(lambda: not jail_processes(folder), "the end of what ran")
    mend_store(named)
    assert run_kernel("print(open('f').read())") == "later\n"


@pytest.mark.slow
def test_a_server_tells_its_clients(named: Path, server: JupyterServer) -> None:
    """A kernel is shut down in the browser while the store cannot be written: the request succeeds,
    an event says what was not saved and what to do, and a new session is refused with the reason,
    until the store is mended."""
    server.notebook("n.ipynb")
    kernel_id = server.session("n.ipynb")["kernel"]["id"]
    tab = Tab(server, kernel_id)
    tab.run("open('f', 'w').write('kept')")
    tab.close()
    events = websocket.create_connection(
        f"ws://127.0.0.1:{server.port}/api/events/subscribe",
        header=[f"Authorization: token {TOKEN}"],
        timeout=PATIENCE,
    )
    break_store(named)
    server.request("DELETE", f"/api/kernels/{kernel_id}")
    event: dict[str, str] = {}
    while event.get("schema_id") != SAVE_EVENTS:
        event = json.loads(events.recv())
    events.close()
    assert event["status"] == "failed"
    assert "sandbox-kernel workspace save work" in event["message"]
    body = {"kernel": {"name": "sandbox"}, "name": "", "path": "n.ipynb", "type": "notebook"}
    _, refusal = server.refused("POST", "/api/sessions", body)
    assert "older than those in sandbox" in " ".join(refusal.split())
    mend_store(named)
    tab = Tab(server, server.session("n.ipynb")["kernel"]["id"])
    assert tab.run("print(open('f').read())") == "kept\n"
    tab.close()


@pytest.mark.slow
def test_a_hosted_sandbox_waits_paused(named: Path, service: Running) -> None:
    """A sandbox elsewhere whose files could not be saved is paused, which costs little; it is
    resumed to be saved, and then removed."""
    with kernel("open('f', 'w').write('kept')") as manager:
        break_store(named)
        manager.shutdown_kernel()
    assert statuses(service) == ["paused"]
    assert cli("workspace", "save", "work").returncode == 1
    assert statuses(service) == ["paused"]
    mend_store(named)
    assert cli("workspace", "save", "work").stdout == "work\n"
    assert statuses(service) == []
    assert [save.files for save in Store.open().saves("work")] == [1]


STOP_HELPER = """
import os, signal
def parent(pid): return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
ours = [int(pid) for pid in os.listdir('/proc') if pid.isdigit() and parent(pid) == os.getppid()]
(helper,) = [pid for pid in ours if b'ipykernel' not in open(f'/proc/{pid}/cmdline', 'rb').read()]
os.kill(helper, signal.SIGSTOP)
open('f', 'w').write('kept')
"""


def test_a_silent_sandbox_does_not_hold_up_a_shutdown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code in the sandbox stops the process there that saves files. The shutdown does not wait for
    it for long, and ends all that runs; the files are there at the next start."""
    monkeypatch.setattr(kernel_workspace, "SILENCE", 3.0)
    with kernel("open('f', 'w').write('first')") as manager:
        asyncio.run(provisioner_of(manager).save())  # from then on there is such a process
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE)
        ran = run_cell(client, STOP_HELPER)
        assert ran.reply["status"] == "ok", ran.reply
        client.stop_channels()
        manager.shutdown_kernel()
    wait_until(lambda: not jail_processes(folder), "the end of what ran")
    assert run_kernel("print(open('f').read())") == "kept\n"


EXITS = """
import sys
from jupyter_client import KernelManager
from tests.emulators.running import Running
from tests.kernels.live import run_cell
from tests.server.saving_kernels import break_store
from pathlib import Path
manager = KernelManager(kernel_name="sandbox")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=90)
print(run_cell(client, sys.argv[1]).text(), end="")
if len(sys.argv) > 2:
    break_store(Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_process_that_exits_without_a_shutdown(named: Path, folder: Path) -> None:
    """A script forgets to shut its kernel down: the files are saved when it exits. If they cannot
    be, the sandbox is kept, as after a shutdown, and nothing runs on."""

    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", EXITS, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)

    script("open('f', 'w').write('saved at exit')")
    assert not Records().list("local")
    ended = script("print(open('f').read()); open('f', 'w').write('kept')", str(named))
    assert ended.stdout == "saved at exit\n", ended.stderr
    assert "sandbox-kernel workspace save work" in ended.stderr
    wait_until(lambda: not jail_processes(folder), "the end of what ran")
    mend_store(named)
    assert run_kernel("print(open('f').read())") == "kept\n"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A store on S3, behind a proxy."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    proxy = FaultyProxy(server.get_host_and_port()[1], seed=7, stall=PATIENCE)
    settings = {"endpoint_url": proxy.url, "key": "testing", "secret": "testing"}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = f"bucket-{secrets.token_hex(4)}"
    fsspec.filesystem("s3").mkdir(bucket)
    monkeypatch.setenv("SANDBOX_KERNEL_STORE", f"s3://{bucket}/store")
    yield proxy
    proxy.close()
    server.stop()


@pytest.mark.slow
def test_the_limit_of_a_last_save(s3: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that answers slowly is waited for as long as the save goes on, also if that is longer
    than the limit; a store that does not answer at all only for the limit, and what was not saved
    then is kept."""
    monkeypatch.setattr(kernel_workspace, "LAST_SAVE_TIMEOUT", 4.0)
    monkeypatch.setattr(packs, "PACK_SIZE", 2**16)
    with kernel("import os; open('f', 'wb').write(os.urandom(8 * 2**20))") as manager:
        s3.delay = 1.0  # for each of eight packs and more
        manager.shutdown_kernel()
        s3.delay = 0.0
    (save,) = Store.open().saves("work")
    assert save.bytes == 8 * 2**20
    assert not Records().list("local")
    with kernel("open('f', 'wb').write(b'kept')") as manager:
        s3.rate, s3.kinds = 1.0, ("stall",)
        shutdown = threading.Thread(target=manager.shutdown_kernel, daemon=True)
        shutdown.start()
        shutdown.join(PATIENCE / 2)  # each call would be waited for longer than that
        assert not shutdown.is_alive()
        s3.rate = 0.0
    assert len(Records().list("local")) == 1
    assert run_kernel("print(open('f').read())") == "kept\n"


DIES = """
import os, sys
from sandbox_kernel.jupyter import kernel_workspace
from tests.server.saving_kernels import kernel
async def killed(*arguments, **options):
    os.kill(os.getpid(), 9)
kernel_workspace.last_save = killed
with kernel(sys.argv[1]) as manager:
    manager.shutdown_kernel()
"""


def test_a_process_that_is_killed_while_it_saves(folder: Path) -> None:
    """A server is killed when it has ended a kernel and saves its files. ``ps`` says that they are
    not saved, and the next kernel begins with them."""
    command = [sys.executable, "-c", DIES, "open('f', 'w').write('kept')"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert "unsaved" in cli("ps").stdout
    assert run_kernel("print(open('f').read())") == "kept\n"
    assert not Records().list("local")


LEFT = """
import os, signal, sys
from tests.server.saving_kernels import kernel
with kernel(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def leave(code: str, lease: str = "3600") -> None:
    """A process starts a kernel, which runs some code, and is killed."""
    ended = subprocess.run(
        [sys.executable, "-c", LEFT, code],
        env={**os.environ, "SANDBOX_KERNEL_LEASE_SECONDS": lease},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.parametrize("how", ["lease", "killed"])
def test_a_sandbox_that_ends_after_its_process(how: str, folder: Path) -> None:
    """A server is killed, and nobody goes on with its kernel until the lease is over, or the
    machine is restarted. What the kernel wrote since its last save is on the disk: ``ps`` says
    that it is not saved, starts of other kernels do not clear it away, and the next kernel of the
    same notebook begins with it."""
    leave("open('f', 'w').write('kept')", "2" if how == "lease" else "3600")
    (record,) = Records().list("local")
    if how == "killed":
        os.kill(record.data["init"][0], signal.SIGKILL)
    wait_until(lambda: not jail_processes(folder), "the end of the sandbox")
    assert "unsaved" in cli("ps").stdout
    asyncio.run(LocalClient().sweep())
    assert run_kernel("print(open('f').read())") == "kept\n"
    assert not Records().list("local")


def test_files_that_others_have_gone_on_from(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel is left by its process. Another one goes on from the same save, and saves; only
    then the first one's sandbox ends. Its files do not become the newest save by themselves, and
    are not thrown away either."""
    leave("open('f', 'w').write('left')")
    (record,) = Records().list("local")
    run_kernel("open('f', 'w').write('newer')")
    os.kill(record.data["init"][0], signal.SIGKILL)
    wait_until(lambda: not jail_processes(folder), "the end of the sandbox")
    assert run_kernel("print(open('f').read())") == "newer\n"
    assert f"sandbox-kernel workspace save {record.name}" in caplog.text
    assert cli("workspace", "save", record.name).returncode == 0
    assert run_kernel("print(open('f').read())") == "left\n"
    assert not Records().list("local")


def test_opened_again_during_the_last_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is shut down, its last save takes a while, and the notebook is opened again
    meanwhile: the new kernel waits for the files, instead of beginning without them."""
    save, saving, go_on = kernel_workspace.last_save, threading.Event(), threading.Event()

    async def slow(*arguments: Any, **options: Any) -> str:
        saving.set()
        await asyncio.to_thread(go_on.wait, PATIENCE)
        return await save(*arguments, **options)

    monkeypatch.setattr(kernel_workspace, "last_save", slow)
    with kernel("open('f', 'w').write('kept')") as manager:
        shutdown = threading.Thread(target=manager.shutdown_kernel)
        shutdown.start()
        assert saving.wait(PATIENCE)
        threading.Timer(2.0, go_on.set).start()
        assert run_kernel("print(open('f').read())") == "kept\n"
        shutdown.join(PATIENCE)
    assert not Records().list("local")


@pytest.mark.parametrize("killed", [False, True])
def test_a_store_that_does_not_answer(killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call to the store comes back. A shutdown waits for the limit, and not for the store, also
    if the sandbox was killed before and its files are read from the disk; they are kept."""
    monkeypatch.setattr(kernel_workspace, "LAST_SAVE_TIMEOUT", 3.0)
    answers = threading.Event()
    with kernel("open('f', 'w').write('kept')") as manager, pytest.MonkeyPatch.context() as patch:
        for call in ("get", "put", "names", "folders"):
            usual = getattr(blobs.LocalBlobs, call)

            def stalled(*arguments: Any, usual: Any = usual, **options: Any) -> Any:
                answers.wait()
                return usual(*arguments, **options)

            patch.setattr(blobs.LocalBlobs, call, stalled)
        if killed:
            (record,) = Records().list("local")
            os.kill(record.data["init"][0], signal.SIGKILL)
            wait_until(lambda: provisioner_of(manager).death, "the end of the sandbox")
        shutdown = threading.Thread(target=manager.shutdown_kernel, daemon=True)
        shutdown.start()
        shutdown.join(PATIENCE / 2)
        assert not shutdown.is_alive()
    answers.set()
    assert len(Records().list("local")) == 1
    assert run_kernel("print(open('f').read())") == "kept\n"
