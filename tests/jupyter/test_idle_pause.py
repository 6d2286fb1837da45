"""Kernels that are paused when they are idle: the status messages that say so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio
from jupyter_client.session import Session

from sandbox_kernel.jupyter.idle_pause import pause_when_idle
from tests.helpers.waiting import until

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


@pytest.mark.parametrize("encrypted", [False, True])
async def test_an_idle_kernel_is_paused(tmp_path: Path, encrypted: bool) -> None:
    """Its status is heard over an encrypted transport, too, with the keys of its connection."""
    pauses = []

    async def pause() -> bool:
        pauses.append(1)
        return False

    kernel: Any = SimpleNamespace(
        exit_code=None, pause=pause, tunnel=SimpleNamespace(last_input=0.0, paused=False)
    )
    connection: dict[str, Any] = {"transport": "ipc", "ip": str(tmp_path / "k")}
    connection |= {f"{channel}_port": n for n, channel in enumerate(CHANNELS, 1)}
    publisher = zmq.asyncio.Context.instance().socket(zmq.PUB)
    if encrypted:
        public, secret = zmq.curve_keypair()
        publisher.curve_server = True
        publisher.curve_publickey, publisher.curve_secretkey = public, secret
        connection |= {"curve_publickey": public.decode(), "curve_secretkey": secret}
    publisher.bind(f"ipc://{tmp_path / 'k'}-{connection['iopub_port']}")
    session = Session(key=b"")
    idle = session.serialize(session.msg("status", {"execution_state": "idle"}), b"kernel.x.status")
    pausing = asyncio.create_task(pause_when_idle(kernel, connection, 0.01))

    async def paused() -> bool:
        await publisher.send_multipart(idle)
        return bool(pauses)

    try:
        await until(paused)
    finally:
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        publisher.close(linger=0)
