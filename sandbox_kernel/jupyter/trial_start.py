"""Starts a kernel to see whether that works, and how long it takes, for ``sandbox-kernel doctor``.

It goes the way of every client: a kernelspec of ours on disk, jupyter_client's KernelManager, the
provisioner's entry point. So the user finds problems here and not in the first notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import tempfile
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.kernelspec import template
from sandbox_kernel.kernels.launched_process import LAUNCHED
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.spec import SETTINGS
from sandbox_kernel.tunnel.background import run

START, CELL = 60.0, 30.0
"""Seconds for the kernel to answer, and for its cell."""
_SPARE = 10.0
"""Seconds for a spare to be ready."""
_NAME = "doctor"


async def try_kernel(backend: str) -> str:
    """Start a kernel with the backend's defaults, run a cell in it and end it. Returns why that did
    not work, or an empty string. Leaves nothing behind."""
    with _manager(backend) as manager:
        try:
            await manager.start_kernel()
            return await _run_a_cell(manager)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the finding)
            reason = f"{type(error).__name__}: {error}"
            death = getattr(manager.provisioner, "death", "")
            return f"{death} ({reason})" if death else reason
        finally:
            if manager.has_kernel:
                await asyncio.shield(manager.shutdown_kernel(now=True))


Timeline = list[tuple[str, float]]
"""Steps, with the milliseconds after which each was done."""


async def profile_kernel(backend: str) -> dict[str, Timeline]:
    """Start a kernel with the backend's defaults, cold, and restart it. SandboxError if one of them
    does not work."""
    with _manager(backend) as manager:
        try:
            return await _profile(manager)
        except (TimeoutError, queue.Empty, RuntimeError, OSError) as error:
            raise SandboxError(
                f"A kernel of the backend {backend!r} cannot be measured: {type(error).__name__} "
                f"{error}. `sandbox-kernel doctor {backend}` says what does not work."
            ) from error
        finally:
            if manager.has_kernel:
                await asyncio.shield(manager.shutdown_kernel(now=True))


async def _profile(manager: Any) -> dict[str, Timeline]:
    begin = time.perf_counter()
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        kernel = manager.provisioner.kernel
        start = await _until_first_result(client, dict(kernel.steps))
        found = {"cold start": _since(begin, start)}
        await _until_spare(kernel)
        begin = time.perf_counter()
        await manager.restart_kernel(now=True)
        marks = {LAUNCHED: kernel.steps[LAUNCHED]}
        found["restart"] = _since(begin, await _until_first_result(client, marks))
        return found
    finally:
        client.stop_channels()


async def _until_first_result(client: Any, marks: dict[str, float]) -> dict[str, float]:
    await client.kernel_info(reply=True, timeout=START)
    marks["the kernel answers"] = time.perf_counter()
    await client.execute("1 + 1", reply=True, timeout=CELL)
    return {**marks, "the first cell has run": time.perf_counter()}


def _since(begin: float, marks: dict[str, float]) -> Timeline:
    return [(step, 1e3 * (at - begin)) for step, at in sorted(marks.items(), key=itemgetter(1))]


async def _until_spare(kernel: Any) -> None:
    """Wait until the next kernel has started, for a while. A small sandbox has no spare."""

    async for _ in attempts(_SPARE):
        if (await run(kernel.tunnel.control.call("status"))).get("spare"):
            return


@contextlib.contextmanager
def _manager(backend: str) -> Iterator[Any]:
    """A manager of a kernel with the backend's defaults."""
    from jupyter_client.kernelspec import KernelSpecManager  # lazy: start-up time
    from jupyter_client.manager import AsyncKernelManager  # lazy: start-up time

    with tempfile.TemporaryDirectory(prefix="sandbox-kernel-") as folder, _defaults():
        _write_kernelspec(Path(folder, _NAME), backend)
        specs = KernelSpecManager(kernel_dirs=[folder], ensure_native_kernel=False)
        yield AsyncKernelManager(kernel_name=_NAME, kernel_spec_manager=specs)


def _write_kernelspec(folder: Path, backend: str) -> None:
    kernel = template()
    config = {"backend": backend, "persist": False, "warm_spares": False}
    kernel["metadata"]["kernel_provisioner"]["config"] = config
    folder.mkdir()
    (folder / "kernel.json").write_text(json.dumps(kernel), encoding="utf-8")


async def _run_a_cell(manager: Any) -> str:
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=START)
        printed: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = await client.execute_interactive(
            "print(6 * 7)", timeout=CELL, output_hook=hear, allow_stdin=False
        )
    finally:
        client.stop_channels()
    if reply["content"]["status"] != "ok" or "".join(printed).strip() != "42":
        return f"the cell print(6 * 7) gave {reply['content']} and printed {printed!r}"
    return ""


@contextlib.contextmanager
def _defaults() -> Iterator[None]:
    """Without the settings in the environment, which are for the user's own kernels: with
    SANDBOX_KERNEL_BACKEND the trial would be of another backend than it says."""
    variables = [setting.variable for setting in SETTINGS.values()]
    hidden = {name: os.environ.pop(name) for name in variables if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
