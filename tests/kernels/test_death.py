"""A kernel that dies is seen to be dead, and the log says why."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_kernel.errors import KernelLaunchFailed
from sandbox_kernel.sandboxes.local import disk_image
from sandbox_kernel.spec import LEAST_MEMORY_MIB
from sandbox_kernel.tunnel.background import submit
from tests.helpers.waiting import wait_until

from .conftest import KernelStarter, StartKernel, install_kernelspec
from .live import PATIENCE, Live


@pytest.fixture(autouse=True)
def _errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def end(live: Live) -> str:
    """Wait until the manager sees that the kernel has ended; the reason that is given."""
    wait_until(lambda: not live.manager.is_alive(), "the manager sees the kernel's end")
    return live.provisioner.death


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)"),
        ("import os; os.abort()", "killed by signal 6 (SIGABRT)"),
        ("import ctypes; ctypes.string_at(0)", "killed by signal 11 (SIGSEGV)"),
    ],
)
def test_the_cause_of_death(
    live: Live, caplog: pytest.LogCaptureFixture, code: str, cause: str
) -> None:
    """Exit codes and signals come through from inside the sandbox."""
    live.client.execute(code)
    assert end(live) == cause
    (error,) = errors(caplog)
    assert error.startswith(f"The kernel in sandbox {live.sandbox} died: {cause}.")


def test_exit_code_0_is_no_error(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that ends well may have been shut down by a client; the log has it all the same."""
    caplog.set_level(logging.INFO)
    live.client.execute("import os; os._exit(0)")
    assert end(live) == "exit code 0"
    assert errors(caplog) == []
    assert f"The kernel in sandbox {live.sandbox} died: exit code 0." in caplog.text


def test_what_the_kernel_printed_last_is_in_the_log(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """The last words of the process help to find the cause. What ipykernel prints at every start,
    that Ctrl-C will not work, is none of them."""
    live.client.execute(
        "import os, sys\n"
        "os.write(sys.stderr._original_stdstream_copy, b'last words\\n')\n"
        "os._exit(5)"
    )
    assert end(live) == "exit code 5"
    (error,) = errors(caplog)
    assert error == (
        f"The kernel in sandbox {live.sandbox} died: exit code 5. It printed last:\nlast words"
    )


def test_out_of_memory(start_kernel: StartKernel, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that takes more memory than its sandbox has is killed, and that is what is said."""
    live = start_kernel(memory_mib=256)
    live.client.execute("hoard = []\nwhile True: hoard.append(bytearray(2**20))")
    assert re.match(r"out of memory: .* used \d+ MiB of 256 MiB", end(live))
    (error,) = errors(caplog)
    assert error.startswith(f"The kernel in sandbox {live.sandbox} died: {live.provisioner.death}.")
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("1 + 1").value == "2"


def test_a_full_disk_does_not_end_a_kernel(start_kernel: StartKernel, folder: Path) -> None:
    """Where the sandbox has a file system of its own, a cell that fills it gets an error; the
    kernel goes on, with its state, and can make room."""
    problem = disk_image.why_not(folder, 2**25)
    if problem:
        pytest.skip(problem)
    live = start_kernel(disk_mib=32)
    code = "kept = 1\nwith open('big', 'wb') as f:\n    while True: f.write(bytes(2**20))"
    ran = live.run(code)
    assert ran.reply["ename"] == "OSError"
    assert "File too large" in ran.reply["evalue"] or "No space left" in ran.reply["evalue"]
    code = "for n in range(9):\n    with open(f'b{n}', 'wb') as f: f.write(bytes(2**23))"
    assert "No space left on device" in live.run(code).reply["evalue"]
    assert live.ok("import os; os.unlink('big'); open('small', 'w').write('x'), kept").value


@pytest.mark.parametrize("cgroup", [True, False])
def test_the_least_memory_that_is_allowed_is_enough(
    start_kernel: StartKernel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cgroup: bool,
) -> None:
    """What the check of a spec lets through does start a kernel, and start it again, whoever does
    the counting. (64 MiB were let through once, and died at every attempt.)"""
    caplog.set_level(logging.INFO)
    if not cgroup:
        monkeypatch.setenv("SANDBOX_KERNEL_NO_CGROUP", "1")
    live = start_kernel(memory_mib=LEAST_MEMORY_MIB)
    if not cgroup:  # and that is said
        assert f"Sandbox {live.sandbox}: no cgroup can be made here" in caplog.text
    for _ in range(2):
        assert live.ok("import json, os; sum(range(10**5))").value == "4999950000"
        live.manager.restart_kernel(now=True)
        live.client.wait_for_ready(timeout=PATIENCE)


@pytest.mark.parametrize("cgroup", [True, False])
def test_no_stale_cause(
    start_kernel: StartKernel, monkeypatch: pytest.MonkeyPatch, cgroup: bool
) -> None:
    """A kernel is killed for want of memory while it is being restarted; the one after it ends by
    a signal of its own. That one did not run out of memory, whoever did before it."""
    if not cgroup:
        monkeypatch.setenv("SANDBOX_KERNEL_NO_CGROUP", "1")
    live = start_kernel(memory_mib=256)
    live.kernel._expected = True  # as if it were being shut down: nobody asks why it ends
    live.client.execute("hoard = []\nwhile True: hoard.append(bytearray(2**20))")
    end(live)
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    live.client.execute("import os; os.kill(os.getpid(), 9)")
    assert end(live) == "killed by signal 9 (SIGKILL)"


def test_sandbox_killed_from_outside(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """A sandbox that ends takes its kernel with it."""
    submit(live.kernel.handle.kill()).result(PATIENCE)
    cause = end(live)
    assert cause.startswith(f"Sandbox '{live.sandbox}' has ended: it was killed.")
    assert errors(caplog) == [f"The kernel in sandbox {live.sandbox} is lost: {cause}"]


def test_orderly_shutdown_is_no_death(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that is asked to go is no news."""
    live.manager.shutdown_kernel()
    assert errors(caplog) == []


def test_dead_kernel_is_restarted_in_its_sandbox(live: Live) -> None:
    """The sandbox outlives its kernel, with the files."""
    live.ok("open('kept.txt', 'w').write('kept')")
    live.client.execute("import os; os._exit(1)")
    end(live)
    sandbox = live.sandbox
    live.manager.restart_kernel()
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.sandbox == sandbox
    assert live.ok("open('kept.txt').read()").value == "'kept'"


def test_graceful_restart_right_after_a_death(live: Live) -> None:
    """The request that the dead kernel could not read must not shut its successor down."""
    for _ in range(6):
        live.client.execute("import os; os._exit(1)")
        end(live)
        live.manager.restart_kernel()
        live.client.wait_for_ready(timeout=PATIENCE)
        assert live.ok("1 + 1").value == "2"
        assert live.manager.is_alive()


def test_command_that_does_not_exist(start_kernel: KernelStarter, folder: Path) -> None:
    """The error names the sandbox and the command, and is the one that clients know from a local
    kernel; nothing is left."""
    name = install_kernelspec(folder, "broken", ["/nowhere/kernel"])
    with pytest.raises(FileNotFoundError, match=r"In sandbox 'kernel-.*/nowhere/kernel") as failed:
        start_kernel.launch(kernel_name=name)
    assert isinstance(failed.value, KernelLaunchFailed)


def test_kernel_that_ends_at_once(
    start_kernel: KernelStarter, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A command that is no kernel: what it printed is in the log."""
    command = [sys.executable, "-c", "print('not a kernel'); raise SystemExit(7)"]
    name = install_kernelspec(folder, "broken", command)
    live = start_kernel.launch(kernel_name=name)
    assert end(live) == "exit code 7"
    (error,) = errors(caplog)
    assert error == (
        f"The kernel in sandbox {live.sandbox} died: exit code 7. It printed last:\nnot a kernel"
    )


def test_wait_for_ready_ends_when_the_kernel_dies(
    start_kernel: KernelStarter, folder: Path
) -> None:
    """A client that waits for a kernel that never comes learns that soon."""
    name = install_kernelspec(folder, "broken", [sys.executable, "-c", "raise SystemExit(7)"])
    live = start_kernel.launch(kernel_name=name)
    with pytest.raises(RuntimeError, match="died"):
        live.client.wait_for_ready(timeout=PATIENCE)


SCRIPT = """
import nbclient, nbformat
cell = nbformat.v4.new_code_cell("import os; os._exit(3)")
nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[cell]), kernel_name="sandbox").execute()
"""


@pytest.mark.usefixtures("folder")
def test_a_plain_script_is_told() -> None:
    """A script that uses nbclient and has set up no log: the cause is on stderr all the same, and
    not what ipykernel prints at its start."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert "DeadKernelError" in ran.stderr
    assert re.search(r"The kernel in sandbox kernel-\S+ died: exit code 3\.\n", ran.stderr)
    assert "Ctrl-C" not in ran.stderr
