"""One VM by its name: its state, its processes, its console and its end.

The SDK keeps VMs in a folder and a database of its own; one process of the program ``msb`` runs
each. This module checks itself whether that process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import microsandbox as sdk
from microsandbox import _microsandbox as native

from sandbox_kernel.errors import SandboxError, SandboxTimeout
from sandbox_kernel.host_processes import ProcessId, find_processes
from sandbox_kernel.sandboxes.untrusted_files import read_end
from sandbox_kernel.untrusted_text import printable

T = TypeVar("T")
KILL_TIMEOUT = 10.0
_TOO_OLD = "upgrade msb"
_INSIST, _PAUSE = 120.0, 0.5
_TAIL = 256 * 1024
_REASON = 800
_OOM = re.compile(r"Out of memory: Killed process \d+ \(([^)\n]{1,64})\)")
_IDLE = "sandbox idle, requesting guest shutdown"
_ABOUT_A_CLIENT = "agent relay: handshake"
"""In lines about a client that hung up, not about the VM."""


def home() -> Path:
    """Where the SDK keeps its VMs."""
    return Path(os.environ.get("MSB_HOME") or "~/.microsandbox").expanduser()


def folder(vm: str) -> Path:
    return home() / "sandboxes" / vm


async def insist(attempt: Callable[[], Awaitable[T]], vm: str = "") -> T:
    """Start a VM. Before it does, the SDK asks its own program what that can do; on a busy machine
    it does not wait long enough for the answer, and takes the program for one that is too old. So
    it is asked again for a time. ``vm`` is a new one, of which a failed attempt leaves a folder."""
    deadline = time.monotonic() + _INSIST
    while True:
        try:
            return await attempt()
        except (sdk.UnsupportedError, SandboxError) as error:
            if _TOO_OLD not in str(error) or time.monotonic() > deadline:
                raise
            if vm:
                await destroy(vm)
            await asyncio.sleep(_PAUSE)


async def status(vm: str) -> str:
    """``running``, ``paused``, ``stopped``; ``gone`` if there is no such VM."""
    try:
        found = str((await sdk.Sandbox.get(vm)).status)
    except sdk.SandboxNotFoundError:
        return "gone"
    except sdk.MicrosandboxError as error:
        raise SandboxError(f"microsandbox cannot tell the state of {vm!r}: {error}") from error
    if found == "paused":
        return found
    return "running" if found in ("running", "starting", "draining") else "stopped"


def processes(vm: str) -> list[ProcessId]:
    """The host's processes that run this VM."""
    name = (b"--name", vm.encode())
    return find_processes(
        lambda words: words[1:2] == [b"machine"] and name in itertools.pairwise(words)
    )


async def kill(vm: str) -> None:
    """End a VM at once, and see to it that its process has ended. No error if there is none."""
    # What counts is whether its process has ended, which is looked at next.
    with contextlib.suppress(sdk.MicrosandboxError, asyncio.TimeoutError):
        await asyncio.wait_for((await sdk.Sandbox.get(vm)).kill(timeout=KILL_TIMEOUT), KILL_TIMEOUT)
    await ended(vm)


async def ended(vm: str) -> None:
    """Wait until no process runs the VM any more, and kill what does not end."""
    for process in await asyncio.to_thread(processes, vm):
        if not await asyncio.to_thread(process.kill, KILL_TIMEOUT):
            raise SandboxError(
                f"The process {process.pid} of the microVM {vm!r} does not end. Try again later."
            )


async def destroy(vm: str) -> None:
    """Kill a VM and delete it with its disk. No error if there is none."""
    await kill(vm)
    with contextlib.suppress(sdk.SandboxNotFoundError):
        await asyncio.wait_for(sdk.Sandbox.remove(vm), KILL_TIMEOUT * 3)
    # A creation that failed can leave a folder that the SDK itself knows nothing of.
    await asyncio.to_thread(shutil.rmtree, folder(vm), ignore_errors=True)


async def fork(vm: str, child: str, timeout: float) -> None:
    """Fork a running VM. By the SDK's program, not its Python function: that one takes a closed
    network for a resource of the host's, and has no way to say that it may be inherited."""
    command = [native.resolved_cli_msb_path(), "fork", vm, "--name", child, "--quiet"]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--dangerously-inherit-resources",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), timeout)
    except asyncio.TimeoutError:
        raise SandboxTimeout(
            f"The microVM {vm!r} could not be forked within {timeout:g} s."
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        reason = printable(said.decode(errors="replace"))[-_REASON:].strip()
        raise SandboxError(f"The microVM {vm!r} could not be forked: {reason}")


def network_is_off(config: object) -> bool:
    """Whether a VM's configuration, as the SDK tells it, lets nothing in or out."""
    network = config.get("network") if isinstance(config, dict) else None
    if not isinstance(network, dict):
        return False
    policy = network.get("policy")
    closed = {"default_egress": "deny", "default_ingress": "deny", "rules": []}
    return network.get("enabled") is False or (policy == closed and not network.get("ports"))


def console(vm: str) -> str:
    """What was last written to the VM's console: by its kernel, and by spawned commands."""
    return _tail(folder(vm) / "logs" / "kernel.log")


def oom_kills(vm: str) -> list[str]:
    """Names of processes that the VM's kernel killed when memory ran out, as its console says."""
    return _OOM.findall(console(vm))


def why_ended(vm: str) -> str:
    """Why a VM ended, in words, as far as the SDK's log tells."""
    if _IDLE in _tail(folder(vm) / "logs" / "runtime.log"):
        return "its lease is over: nobody was attached"
    if "the main command has ended" in console(vm)[-2000:]:
        return "its main command ended"
    if failure := why_not_started(vm):
        return f"the microVM failed: {failure}"
    return "it was killed from outside, or the host was restarted"


def why_not_started(vm: str) -> str:
    """What the SDK's log has in errors about a VM that did not start, or failed later."""
    lines = _tail(folder(vm) / "logs" / "runtime.log").splitlines()
    errors = [
        line.partition(" ")[2].strip()
        for line in lines
        if " ERROR " in line and _ABOUT_A_CLIENT not in line
    ]
    return " ".join(errors)[-_REASON:]


def _tail(path: Path) -> str:
    return read_end(path, _TAIL).replace("\r\n", "\n")
