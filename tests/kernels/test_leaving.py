"""Nothing is left behind, whatever happens on the way out."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_client import AsyncKernelManager

from sandbox_kernel.errors import SandboxTimeout
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.kernels import UNUSED_LEASE, sandboxed_kernel
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from tests.helpers.waiting import wait_until

from .conftest import KernelStarter
from .live import PATIENCE, jail_processes
from .other_process import forget_endpoints, other_process

MOVED = """
import os
os.environ["SANDBOX_KERNEL_DATA_DIR"] += "-other"
os.environ["SANDBOX_KERNEL_RUNTIME_DIR"] += "-other"
"""
DELETED = """
import os, shutil
shutil.rmtree(os.environ["SANDBOX_KERNEL_DATA_DIR"], ignore_errors=True)
"""


@pytest.mark.parametrize(
    "meanwhile", [MOVED, DELETED, DELETED + MOVED], ids=["moved", "deleted", "both"]
)
def test_a_process_ends_its_sandboxes_after_its_environment_has_changed(
    folder: Path, meanwhile: str
) -> None:
    """A program starts a kernel, as a test does in folders of its own, sets those variables to
    something else or deletes the folders, and ends without a shutdown. The sandbox remembers where
    its record is, and ends with the program all the same."""
    with other_process(meanwhile) as (process, _):
        assert process.wait(PATIENCE) == 0
    assert jail_processes(folder) == []
    assert Records().list("local") == []


def test_a_jail_ends_with_its_monitor(start_kernel: KernelStarter, folder: Path) -> None:
    """Somebody kills bubblewrap's outer process. The jail does not go on as an orphan of the
    host's: it ends, the kernel is known to be dead, and the record says so until it is removed."""
    live = start_kernel()
    [record] = Records().list("local")
    os.kill(record.data["bwrap"][0], signal.SIGKILL)
    wait_until(lambda: not jail_processes(folder), "the end of the jail")
    wait_until(lambda: not live.manager.is_alive(), "the kernel is known to be dead")
    handle = asyncio.run(LocalClient().get(live.sandbox))
    assert asyncio.run(handle.info()).status == "stopped"


UNUSED = """
import os, signal
from jupyter_client import KernelManager
KernelManager(kernel_name="sandbox").start_kernel()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_kernel_that_nobody_has_used(folder: Path) -> None:
    """A program is killed while it starts a kernel, or right after: `jupyter kernel` is, by a
    SIGTERM that comes before it has a handler for it. Nobody has run anything in that kernel, so
    the jail ends after some seconds instead of an hour, and the next start clears it away."""
    killed = subprocess.run([sys.executable, "-c", UNUSED], timeout=PATIENCE, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert jail_processes(folder)
    wait_until(lambda: not jail_processes(folder), "the end of the jail")
    asyncio.run(LocalClient().sweep())
    assert Records().list("local") == []
    forget_endpoints(folder)


TERMINATED = """
import os, signal, sys, threading
from jupyter_client import KernelManager
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.kernels import SandboxedKernel

def now():
    os.kill(os.getpid(), signal.SIGTERM)

usual_create, usual_launch = LocalClient._start, SandboxedKernel.launch

async def create(self, *args):
    made = await usual_create(self, *args)
    if sys.argv[1] == "making": now()
    return made

async def launch(self, *args, **kwargs):
    if sys.argv[1] == "launching": now()
    return await usual_launch(self, *args, **kwargs)

LocalClient._start, SandboxedKernel.launch = create, launch
manager = KernelManager(kernel_name="sandbox")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)
now()
threading.Event().wait()
"""


@pytest.mark.parametrize("when", ["making", "launching", "used"])
def test_a_process_that_is_told_to_end_takes_its_kernels_along(folder: Path, when: str) -> None:
    """A program that does nothing about SIGTERM gets one: while its sandbox is being made, while
    its kernel starts, as `jupyter kernel` does that is stopped at once, or later. A local kernel
    would end by itself then; of a sandbox nothing is left, neither processes nor folders."""
    ended = subprocess.run(
        [sys.executable, "-c", TERMINATED, when], timeout=PATIENCE, check=False, capture_output=True
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert jail_processes(folder) == []
    assert Records().list("local") == []
    assert not list((folder / "data" / "sandboxes").iterdir())


IMPATIENT = """
import os, signal
from jupyter_client import KernelManager
from sandbox_kernel.kernels import SandboxedKernel

usual = SandboxedKernel.leave

async def leave(self):
    os.kill(os.getpid(), signal.SIGINT)
    await usual(self)

SandboxedKernel.leave = leave
KernelManager(kernel_name="sandbox").start_kernel()
signal.raise_signal(signal.SIGINT)
"""


def test_a_second_interrupt_leaves_nothing_either(folder: Path) -> None:
    """Somebody ends a program with Ctrl-C, and presses it again while its sandboxes are ended."""
    ended = subprocess.run(
        [sys.executable, "-c", IMPATIENT], timeout=PATIENCE, check=False, capture_output=True
    )
    assert b"atexit" not in ended.stderr
    assert jail_processes(folder) == []
    assert Records().list("local") == []


def test_a_used_kernel_gets_its_lease_in_the_end(
    start_kernel: KernelStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jail does not answer in time when a kernel is used for the first time. It is asked again,
    so that work in it outlives a crash of its server; then nobody asks any more."""
    asked: list[float] = []
    usual = LocalHandle.set_lease

    async def late_once(handle: LocalHandle, seconds: float) -> bool:
        asked.append(seconds)
        if len(asked) == 2:
            raise SandboxTimeout("no answer")
        return await usual(handle, seconds)

    monkeypatch.setattr(LocalHandle, "set_lease", late_once)
    monkeypatch.setattr(sandboxed_kernel, "_LEASE_INTERVAL", 0.1)
    live = start_kernel()
    wait_until(lambda: len(asked) > 1, "the first request")
    wait_until(lambda: len(asked) > 2, "the second attempt")
    live.client.execute_interactive("1", timeout=PATIENCE)
    lease = live.kernel.handle.spec.lease_seconds
    assert asked == [UNUSED_LEASE, lease, lease]


class Raises:
    """An observer that cannot do its part."""

    async def launching(self, *_: object) -> None: ...

    async def launched(self, provisioner: SandboxProvisioner) -> None:
        raise OSError("no space left for what is to be kept")

    async def ended(self, *_: object) -> None: ...


def test_an_observer_that_raises_leaves_no_sandbox(
    start_kernel: KernelStarter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's extension cannot write down a kernel that has just started, so the start
    fails. Its sandbox does not stay."""
    monkeypatch.setattr("sandbox_kernel.jupyter.provisioner.observers", [Raises()])
    with pytest.raises(OSError, match="no space left"):
        start_kernel()
    assert jail_processes(folder) == []
    assert Records().list("local") == []


def test_a_cancelled_shutdown_leaves_no_sandbox(folder: Path) -> None:
    """A server that gets two requests to stop cancels its first shutdown while a kernel ends. The
    sandbox ends all the same."""

    async def cancel_it() -> None:
        manager = AsyncKernelManager(kernel_name="sandbox")
        await manager.start_kernel()
        ending = asyncio.ensure_future(manager.cleanup_resources())
        await asyncio.sleep(0)
        while manager.has_kernel:  # until the provisioner has begun with it
            await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait([ending])
        assert ending.cancelled()

    asyncio.run(cancel_it())
    wait_until(lambda: not jail_processes(folder), "the end of the sandbox")
    wait_until(lambda: not Records().list("local"), "the end of its record")
