"""The end of this process: kernels that nobody has shut down end with it, as local ones do.

Kernels with a saved workspace are saved first, which takes as long as it makes progress.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from sandbox_kernel.jupyter.pool import drain_all, forget_all
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.tunnel import background

EXIT_TIMEOUT = 10.0

_log = logging.getLogger("sandbox_kernel")
_ours: dict[str, SandboxedKernel] = {}
"""Sandboxes that this process must end when it exits, by name."""
_making: set[asyncio.Task[Any]] = set()
"""Tasks that make sandboxes now; when they are cancelled, they leave none."""


def own(kernel: SandboxedKernel) -> None:
    """End this kernel when the process exits."""
    _ours[kernel.handle.name] = kernel


def disown(kernel: SandboxedKernel) -> None:
    """Do not end this kernel when the process exits."""
    _ours.pop(kernel.handle.name, None)


@contextlib.contextmanager
def making_a_sandbox() -> Iterator[None]:
    """The current task makes a sandbox, and is cancelled if the process exits meanwhile."""
    task = asyncio.current_task()
    assert task is not None
    _making.add(task)
    try:
        yield
    finally:
        _making.discard(task)


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process in order, unless it has a handler of its own: Python does
    nothing at exit if the signal ends it, and sandboxes would stay. To be called before a sandbox
    is made; a second SIGTERM ends the process at once."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_DFL)
    raise SystemExit(128 + signum)


def _at_exit() -> None:
    # A second Ctrl-C would leave sandboxes behind; SIGTERM still ends this process.
    if (_ours or _making) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _making:
        background.submit(_cancel_making()).result()
    if not _ours:
        return
    saving = [kernel for kernel in _ours.values() if kernel.ending is not None]
    others = [kernel for kernel in _ours.values() if kernel.ending is None]
    ended = background.submit(_end_all(others))
    saved = background.submit(_end_all(saving))
    try:
        ended.result(EXIT_TIMEOUT)
    finally:
        saved.result()  # each step of it has a limit


async def _cancel_making() -> None:
    making = list(_making)
    for task in making:
        task.cancel()
    if making and (await asyncio.wait(making, timeout=EXIT_TIMEOUT))[1]:
        _log.warning("A sandbox that was being made may be left; `sandbox-kernel ps` lists it.")


async def _end_all(kernels: list[SandboxedKernel]) -> None:
    await drain_all()
    results = await asyncio.gather(*(_end(k) for k in kernels), return_exceptions=True)
    for kernel, result in zip(kernels, results, strict=True):
        if isinstance(result, Exception):
            _log.warning("Sandbox %s could not be removed: %s", kernel.handle.name, result)


async def _end(kernel: SandboxedKernel) -> None:
    if kernel.ending is not None:
        await kernel.ending(EXIT_TIMEOUT)
    else:
        await kernel.leave()
        disown(kernel)


def _after_fork_in_child() -> None:
    _ours.clear()
    _making.clear()
    if signal.getsignal(signal.SIGTERM) is _exit:  # the child has nothing to end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    forget_all()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
