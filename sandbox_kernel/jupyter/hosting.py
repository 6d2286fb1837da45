"""What the provisioner and the launcher share: kernels of this process, and their programs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SandboxExists, SandboxNotFound, SpecError, SpecRefused
from sandbox_kernel.jupyter.configuration import KernelConfiguration
from sandbox_kernel.jupyter.pool import drain_all, forget_all, pool_for
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.paths import runtime_dir
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.sandboxes.left import user_of
from sandbox_kernel.sandboxes.local import environment
from sandbox_kernel.sandboxes.local.private import contains, shown_with
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background
from sandbox_kernel.tunnel.endpoints import PRIORITY

EXIT_TIMEOUT = 10.0

PASSED_ON = ("JPY_SESSION_NAME",)
"""Environment variables of this process that a kernel may see without being named in its spec."""

_ENDPOINTS = "c-"
_ENDPOINTS_GRACE = 60.0

_ours: dict[str, SandboxedKernel] = {}
"""Sandboxes that this process must end when it exits."""
_making: set[asyncio.Task[Any]] = set()
"""What makes sandboxes now; cancelled, it leaves none."""


async def create_kernel(
    configuration: KernelConfiguration, argv: Sequence[str], log: Log
) -> SandboxedKernel:
    """A new sandbox for a kernel with this command line. Runs on the background loop."""
    task = asyncio.current_task()
    assert task is not None
    _making.add(task)
    try:
        return await _create_kernel(configuration, argv, log)
    finally:
        _making.discard(task)


async def _create_kernel(
    configuration: KernelConfiguration, argv: Sequence[str], log: Log
) -> SandboxedKernel:
    client = load_backend(configuration.backend)
    spec = configuration.spec
    check_pausing(configuration, client)
    if client.capabilities.python:
        spec = show_program(spec, argv)
    warm_argv = tuple(argv) if configuration.warm_start else ()

    async def make(one: SandboxSpec) -> SandboxedKernel:
        kernel = None
        if configuration.pause_on_exit and configuration.named:
            kernel = await _paused_before(client, one.name, log)
        kernel = kernel or await SandboxedKernel.create(
            client, one, log, warm_argv=warm_argv, keep_unused=configuration.keep_on_exit
        )
        kernel.pause_on_exit = configuration.pause_on_exit
        own(kernel)
        return kernel

    taken = None
    if configuration.pool_size and not configuration.named:
        plan = {**spec.to_dict(), "name": ""}
        pool = pool_for(
            [configuration.backend, plan, list(warm_argv)],
            configuration.pool_size,
            configuration.pool_idle_seconds,
            lambda: make(replace(spec, name="")),
            remove_kernel,
        )
        taken = await pool.take()
    kernel = taken or await make(spec)
    kernel.log = log
    if configuration.keep_on_exit:
        disown(kernel)
    return kernel


def check_pausing(configuration: KernelConfiguration, client: SandboxClient) -> None:
    """SpecRefused if the kernel is to be paused, and the backend cannot do that."""
    for field in ("pause_on_exit", "idle_pause_seconds"):
        if getattr(configuration, field) and not client.capabilities.pause:
            raise SpecRefused(
                f"The kernel was not started: the backend {client.backend!r} cannot pause a "
                f"sandbox, so {field} must be left out."
            )


async def _paused_before(client: SandboxClient, name: str, log: Log) -> SandboxedKernel | None:
    """The sandbox that an earlier kernel of this name has left, with its files; None if there is
    none. Its kernel, if it still runs, makes room for the new one."""
    try:
        handle = await client.get(name)
        user = user_of(Records().load(handle.backend, handle.name))
    except SandboxNotFound:
        return None
    if user is not None:
        raise SandboxExists(
            f"The kernel was not started: sandbox {name!r} is in use by process {user}. Shut its "
            f"kernel down first, or choose another name."
        )
    kernel = await SandboxedKernel.attach(client, name, log)
    if kernel.exit_code is None:
        await kernel.send_signal(signal.SIGKILL)
        await kernel.wait()
    log.info("The kernel goes on in the sandbox %s, with its files.", name)
    return kernel


async def attach_kernel(
    backend: str, name: str, log: Log, *, sandbox_id: str, key: str
) -> SandboxedKernel:
    """Take over a sandbox with a kernel: this one, and none that has its name since. Runs on the
    background loop."""
    client = load_backend(backend)
    return await SandboxedKernel.attach(client, name, log, sandbox_id=sandbox_id, key=key)


async def remove_kernel(kernel: SandboxedKernel) -> None:
    """End a kernel with its sandbox, or pause that (``pause_on_exit``). Runs on the background
    loop."""
    await kernel.leave()
    _ours.pop(kernel.handle.name, None)


async def leave_kernel(kernel: SandboxedKernel) -> None:
    """Let go of a kernel that has ended, without its sandbox. Runs on the background loop."""
    await kernel.release()
    _ours.pop(kernel.handle.name, None)


def endpoint_folder() -> str:
    """A name for the folder of a new kernel's local sockets; it is made when they are.

    On the way, folders that dead processes have left are deleted: old ones where nobody listens.
    """
    for folder in runtime_dir().glob(f"{_ENDPOINTS}*"):
        with contextlib.suppress(OSError):  # somebody else deletes it just now
            old = time.time() - folder.stat().st_mtime > _ENDPOINTS_GRACE
            if old and not any(_listens(path) for path in folder.iterdir()):
                shutil.rmtree(folder)
    return str(runtime_dir() / f"{_ENDPOINTS}{secrets.token_hex(6)}")


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # it is busy, or something else: not ours to delete
        return True


def own(kernel: SandboxedKernel) -> None:
    """End this kernel when the process exits."""
    _ours[kernel.handle.name] = kernel


def disown(kernel: SandboxedKernel) -> None:
    """Do not end this kernel when the process exits."""
    _ours.pop(kernel.handle.name, None)


def show_program(spec: SandboxSpec, argv: Sequence[str]) -> SandboxSpec:
    """The spec with what the kernel's program needs made readable: its environment if it has one,
    else hardly more than its file. SpecError if that would show what must stay hidden."""
    program = shutil.which(argv[0]) or argv[0] if argv else ""
    if not os.path.isabs(program):
        return spec
    if os.path.basename(program).startswith("python"):
        return spec if spec.python else replace(spec, python=program)
    return replace(spec, readable=(*spec.readable, *shown_with(program)))


def check_out_of_reach(
    configuration: KernelConfiguration, argv: Sequence[str], folder: str
) -> None:
    """SpecError if the interpreter would be run on the host, to describe it, from a folder that
    the sandbox's files are mirrored to. (Hidden names are not. The interpreter of this process
    runs anyway.)"""
    if not load_backend(configuration.backend).capabilities.python:
        return
    from sandbox_kernel.workspace.links import hidden_part

    python = show_program(configuration.spec, argv).python
    if python is None or os.path.dirname(python) == os.path.dirname(sys.executable):
        return
    top = os.path.realpath(folder)
    for path in environment.on_the_way(python):
        if contains(top, path) and not hidden_part(os.path.relpath(path, top)):
            raise SpecError(
                f"The kernel was not started: mirror would let code in the sandbox write to {top}, "
                f"and the interpreter python={python!r} is in there and runs on the host, too. "
                f"Move its environment out of the folder or into a hidden one (.venv), or leave "
                f"mirror out."
            )


def with_interpreter(argv: Sequence[str], spec: SandboxSpec) -> list[str]:
    """The command line, run by the interpreter that the spec names. Jupyter has turned a
    kernelspec's plain ``python`` into the interpreter of this process."""
    if spec.python and argv and argv[0] == sys.executable:
        return [spec.python, *argv[1:]]
    return list(argv)


def addresses(connection: Mapping[str, Any]) -> dict[str, str | tuple[str, int]]:
    """Channel -> local address, as a connection file gives them."""
    ip = str(connection["ip"])
    found: dict[str, str | tuple[str, int]] = {}
    for channel in PRIORITY:
        port = int(connection[f"{channel}_port"])
        found[channel] = (ip, port) if connection["transport"] == "tcp" else f"{ip}-{port}"
    return found


def guest_connection(connection: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a connection file that the kernel in the sandbox must have, too."""
    keep = ("key", "signature_scheme", "kernel_name", "curve_publickey", "curve_secretkey")
    values = {key: connection[key] for key in keep if connection.get(key) is not None}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def _end_ours() -> None:
    """At exit: a kernel that nobody has shut down ends with its process, as a local one does. One
    with a saved workspace is saved first, which takes as long as it goes on."""
    # A second Ctrl-C would leave behind what is being ended; SIGTERM still ends this process.
    if (_ours or _making) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _making:
        background.submit(_give_up_making()).result()
    if not _ours:
        return

    async def remove_all(kernels: list[SandboxedKernel]) -> None:
        await drain_all()
        results = await asyncio.gather(*(_end(k) for k in kernels), return_exceptions=True)
        for kernel, result in zip(kernels, results, strict=True):
            if isinstance(result, Exception):
                logging.getLogger("sandbox_kernel").warning(
                    "sandbox %s could not be removed: %s", kernel.handle.name, result
                )

    saving = [kernel for kernel in _ours.values() if kernel.ending is not None]
    others = [kernel for kernel in _ours.values() if kernel.ending is None]
    ended = background.submit(remove_all(others))
    saved = background.submit(remove_all(saving))
    try:
        ended.result(EXIT_TIMEOUT)
    finally:
        saved.result()  # each step of it has a limit


async def _give_up_making() -> None:
    making = list(_making)
    for task in making:
        task.cancel()
    if making and (await asyncio.wait(making, timeout=EXIT_TIMEOUT))[1]:
        logging.getLogger("sandbox_kernel").warning(
            "A sandbox that was being made may be left; `sandbox-kernel ps` lists it."
        )


def end_in_order() -> None:
    """Python does nothing at exit if SIGTERM ends it, and a local kernel ends with its process
    then, too: so such a process, unless it has plans of its own for this signal, exits instead. To
    be called before a sandbox is made; a second signal ends the process at once."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_DFL)
    raise SystemExit(128 + signum)


async def _end(kernel: SandboxedKernel) -> None:
    if kernel.ending is None:
        await remove_kernel(kernel)
    else:
        await kernel.ending(EXIT_TIMEOUT)


def _after_fork_in_child() -> None:
    _ours.clear()
    _making.clear()
    if signal.getsignal(signal.SIGTERM) is _exit:  # the child has nothing to end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    forget_all()


atexit.register(_end_ours)
os.register_at_fork(after_in_child=_after_fork_in_child)
