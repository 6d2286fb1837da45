"""A kernel outlives the process that started it, or does not, as the user wants it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from jupyter_client.utils import run_sync

from sandbox_kernel.errors import SandboxError, SessionRefused
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.tunnel.background import background_loop
from tests.helpers.waiting import wait_until

from .conftest import KernelStarter
from .live import PATIENCE, jail_processes
from .other_process import attach, forget_endpoints, other_process

WAIT = "sys.stdin.read()\n"
LOSE = """
while km.is_alive(): time.sleep(0.05)
try:
    km.restart_kernel(now=True)
except Exception as error:
    print(error, flush=True)
"""
WATCH = "while km.is_alive(): time.sleep(0.05)\nprint(km.provisioner.death, flush=True)\n"


def sandboxes() -> list[str]:
    return asyncio.run(LocalClient().list())


def remove(name: str, folder: Path) -> None:
    asyncio.run(LocalClient().remove(name))
    forget_endpoints(folder)


def test_reattach_after_the_process_was_killed(start_kernel: KernelStarter) -> None:
    """SIGKILL for the server; a new one goes on with the kernel, its variables and its files."""
    with other_process(WAIT) as (process, info):
        process.kill()
        process.wait()
        assert sandboxes() == [info["sandbox"]]
        live = attach(start_kernel, info)
        assert live.sandbox == info["sandbox"]
        assert live.ok("x + 1").value == "42"
        cell = live.begin("print('begun')\nwhile True: pass")
        live.manager.interrupt_kernel()
        reply = live.client.get_shell_msg(timeout=PATIENCE)
        assert reply["parent_header"]["msg_id"] == cell
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        live.manager.restart_kernel(now=True)
        live.reconnect()
        assert live.run("x").reply["ename"] == "NameError"
        assert live.ok("open('kept.txt').read()").value == "'kept'"
        live.manager.shutdown_kernel()
        assert sandboxes() == []


def test_takeover(start_kernel: KernelStarter) -> None:
    """The process that still had the kernel loses it, and learns who has it."""
    with other_process(WATCH) as (process, info):
        live = attach(start_kernel, info)
        assert process.stdout is not None
        death = process.stdout.readline().strip()
        assert death == (
            f"The agent in sandbox '{info['sandbox']}' refused the session: another host process "
            f"has taken this sandbox over (superseded)."
        )
        process.wait()
        assert live.ok("x + 1").value == "42"


def test_restart_by_the_process_that_lost_the_kernel(start_kernel: KernelStarter) -> None:
    """It gets an error, not a second kernel in the place of the first."""
    with other_process(LOSE) as (process, info):
        live = attach(start_kernel, info)
        assert process.stdout is not None
        assert "another host process has taken this sandbox over" in process.stdout.readline()
        process.wait()
        assert live.ok("x + 1").value == "42"
        assert sandboxes() == [info["sandbox"]]


def test_lease(folder: Path) -> None:
    """A sandbox that nobody comes back to ends by itself."""
    with other_process(WAIT, SANDBOX_KERNEL_LEASE_SECONDS="1") as (process, info):
        assert jail_processes(folder)
        process.kill()
        process.wait()
        wait_until(lambda: not jail_processes(folder), "the end of the sandbox's lease")
        asyncio.run(LocalClient().sweep())
        assert info["sandbox"] not in sandboxes()
        forget_endpoints(folder)


def test_lease_is_kept_while_somebody_is_attached(start_kernel: KernelStarter) -> None:
    """A lease is counted from the last moment that somebody was there."""
    live = start_kernel(lease_seconds=0.5)
    live.ok("import time; time.sleep(2)")
    assert live.manager.is_alive()


def test_exit_without_shutdown(folder: Path) -> None:
    """A program that just ends takes its kernels along, as with local ones."""
    with other_process("") as (process, _):
        assert process.wait(PATIENCE) == 0
    assert sandboxes() == []
    assert not jail_processes(folder)


def test_exit_by_exception_without_shutdown(folder: Path) -> None:
    """Also if it ends by an error."""
    with other_process("raise SystemExit(3)") as (process, _):
        assert process.wait(PATIENCE) == 3
    assert sandboxes() == []


def test_keep_on_exit(start_kernel: KernelStarter) -> None:
    """With keep_on_exit the kernel waits for the next process."""
    with other_process("", SANDBOX_KERNEL_KEEP_ON_EXIT="true") as (process, info):
        assert process.wait(PATIENCE) == 0
    assert sandboxes() == [info["sandbox"]]
    assert attach(start_kernel, info).ok("x").value == "41"


def test_detach_and_attach_in_one_process(start_kernel: KernelStarter) -> None:
    """A provisioner can let go of its kernel, and another take it."""
    live = start_kernel()
    live.ok("x = 1")
    info = json.loads(json.dumps(run_sync(live.provisioner.get_provisioner_info)()))
    run_sync(live.provisioner.detach)()
    assert not live.manager.has_kernel
    assert attach(start_kernel, info).ok("x").value == "1"


def test_attach_to_a_sandbox_that_is_gone(start_kernel: KernelStarter) -> None:
    """Never a new, empty sandbox in its place: an error that names it."""
    with other_process("") as (process, info):
        process.wait(PATIENCE)
    with pytest.raises(SandboxError, match=f"No sandbox named '{info['sandbox']}'"):
        attach(start_kernel, info)


def test_attach_to_a_kernel_that_has_died(start_kernel: KernelStarter, folder: Path) -> None:
    """The error says how the kernel ended."""
    code = "kc.execute('import os; os._exit(4)')\nwhile km.is_alive(): time.sleep(0.05)\n"
    code += "print(flush=True)\n"
    with other_process(code, SANDBOX_KERNEL_KEEP_ON_EXIT="1") as (process, info):
        process.wait(PATIENCE)
    with pytest.raises(SandboxError, match=r"has ended: exit code 4\."):
        attach(start_kernel, info)
    remove(info["sandbox"], folder)


def test_attach_with_a_wrong_token(start_kernel: KernelStarter, folder: Path) -> None:
    """Who does not know the token is refused, and the kernel goes on for who does."""
    with other_process(WAIT) as (process, info):
        records = Records()
        record = records.load("local", info["sandbox"])
        right = record.kernel
        record.kernel = {**right, "token": "0" * 64}
        records.save(record)
        with pytest.raises(SandboxError, match="token is wrong"):
            attach(start_kernel, info)
        record.kernel = right
        records.save(record)
        process.kill()
        process.wait()
        assert attach(start_kernel, info).ok("x").value == "41"


def test_a_refusal_alone_is_no_takeover(start_kernel: KernelStarter) -> None:
    """A hostile agent may claim that the sandbox has another owner: it is removed all the same."""
    live = start_kernel()
    refusal = SessionRefused("superseded, says the sandbox")
    background_loop().call_soon_threadsafe(live.kernel.tunnel._end, refusal)
    wait_until(lambda: not live.manager.is_alive(), "the end of the tunnel")
    assert not live.kernel.taken_over
    live.manager.shutdown_kernel(now=True)
    assert Records().list("local") == []


def test_a_kernel_with_another_key_is_not_adopted(start_kernel: KernelStarter) -> None:
    """The sandbox is the same, but its kernel was restarted meanwhile, by who had taken it
    over: what was kept about the earlier one does not open it."""
    live = start_kernel()
    info = run_sync(live.provisioner.get_provisioner_info)()
    info["connection_info"]["key"] = "another key"
    with pytest.raises(SandboxError, match="another one than before"):
        attach(start_kernel, info)
    assert live.ok("1 + 1").value == "2"
