"""Starts a kernel to see whether that works, for ``sandbox-kernel doctor``.

It goes the way of every client: a kernelspec of ours on disk, jupyter_client's KernelManager, the
provisioner's entry point. So the user finds problems here and not in the first notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox_kernel.jupyter.kernelspec import template
from sandbox_kernel.spec import SETTINGS

START, CELL = 60.0, 30.0
"""Seconds for the kernel to answer, and for its cell."""
_NAME = "doctor"


async def try_kernel(backend: str) -> str:
    """Start a kernel with the backend's defaults, run a cell in it and end it. Returns why that did
    not work, or an empty string. Leaves nothing behind."""
    from jupyter_client.kernelspec import KernelSpecManager  # lazy: start-up time
    from jupyter_client.manager import AsyncKernelManager  # lazy: start-up time

    with tempfile.TemporaryDirectory(prefix="sandbox-kernel-") as folder, _defaults():
        _write_kernelspec(Path(folder, _NAME), backend)
        specs = KernelSpecManager(kernel_dirs=[folder], ensure_native_kernel=False)
        manager = AsyncKernelManager(kernel_name=_NAME, kernel_spec_manager=specs)
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
