"""An idle kernel is paused by the server's culler, and goes on when it is needed."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager

from sandbox_kernel.jupyter import kernel_factory
from sandbox_kernel.jupyter.jupyter_internals import wrap_method
from sandbox_kernel.jupyter.server.culling import PausingCuller
from sandbox_kernel.records import Records
from tests.kernels.live import PATIENCE, provisioner_of

from .freezer import FreezerClient


async def run(client: Any, code: str) -> str:
    said: list[str] = []
    reply = await client.execute_interactive(
        code,
        timeout=PATIENCE,
        output_hook=lambda m: said.append(m["content"].get("text", "")),
    )
    assert reply["content"]["status"] == "ok", reply
    return "".join(said)


async def cull(manager: Any, kernel_id: str) -> None:
    """As the server does it every few minutes, for a kernel that has long been idle."""
    kernel = manager.get_kernel(kernel_id)
    kernel.last_activity = datetime.now(timezone.utc) - timedelta(hours=1)
    kernel.execution_state = "idle"
    await manager.cull_kernel_if_idle(kernel_id)


@pytest.mark.slow
async def test_culling_pauses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are there afterwards; and a paused kernel can be shut down."""
    monkeypatch.setattr(kernel_factory, "load_backend", lambda name: FreezerClient())
    manager = AsyncMappingKernelManager(root_dir=str(folder / "root"), cull_idle_timeout=60)
    culler = PausingCuller(manager, logging.getLogger("test"))
    wrap_method(manager, "cull_kernel_if_idle", culler.cull)
    wrap_method(manager, "shutdown_kernel", culler.shut_down)
    kernel_id = await manager.start_kernel(kernel_name="sandbox")
    kernel: Any = manager.get_kernel(kernel_id)
    client = kernel.client()
    client.start_channels()
    await client.wait_for_ready(timeout=PATIENCE)
    await run(client, "x = 41")
    await cull(manager, kernel_id)
    assert kernel_id in manager
    assert provisioner_of(kernel).paused
    assert await kernel.is_alive()
    handle = await FreezerClient().get(Records().list("local")[0].name)
    assert (await handle.info()).status == "paused"
    await provisioner_of(kernel).resume()
    assert await run(client, "print(x + 1)") == "42\n"
    await cull(manager, kernel_id)
    assert provisioner_of(kernel).paused
    client.stop_channels()
    await manager.shutdown_kernel(kernel_id)
    assert kernel_id not in manager
    assert Records().list("local") == []
