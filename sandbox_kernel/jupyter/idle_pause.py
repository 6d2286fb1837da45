"""Pauses the sandbox of a kernel that has nothing to do.

Only Jupyter's messages say whether a kernel is busy, and the tunnel does not read them. So this is
a client that subscribes to the kernel's status messages. Without any, a kernel is never idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.envelopes import open_envelope
from sandbox_kernel.jupyter.iopub_listener import PREFIX, listen
from sandbox_kernel.kernels import SandboxedKernel

_MAX_BUSY = 1000
_RETRY = 30.0


class Activity:
    """What the status messages of a kernel say, in their order."""

    def __init__(self, now: float) -> None:
        self._busy: set[str] = set()
        self._heard = False
        self.changed = now
        self.topic = b""
        """The topic of status messages, once it is known."""

    @property
    def idle(self) -> bool:
        """It has said that it is idle, for each thing that it was busy with."""
        return self._heard and not self._busy

    def hear(self, frames: list[bytes], now: float) -> None:
        """Take one message. A hostile kernel can only keep itself from being paused."""
        envelope = open_envelope(frames)
        if envelope is None or envelope.kind != "status":
            return
        request = str(envelope.parent.get("msg_id", ""))[:200]
        state = envelope.content().get("execution_state")
        if state is None:
            return
        self.topic = envelope.topic
        self._heard = True
        self.changed = now
        if state == "busy" and len(self._busy) < _MAX_BUSY:
            self._busy.add(request)
        elif state == "idle":
            self._busy.discard(request)


async def pause_when_idle(
    kernel: SandboxedKernel, connection: Mapping[str, Any], seconds: float
) -> None:
    """Pause the sandbox whenever the kernel has been idle, and no client has sent anything, for
    this long. The next message of a client resumes it. Runs until it is cancelled."""
    loop = asyncio.get_running_loop()
    activity = Activity(loop.time())
    socket = listen(connection)
    try:
        while kernel.exit_code is None:
            since = max(activity.changed, kernel.tunnel.last_input)
            left = since + seconds - loop.time()
            if kernel.tunnel.paused or not activity.idle:
                left = seconds
            elif left <= 0:
                await _pause(kernel)
                left = seconds
            if await socket.poll(max(1, int(1000 * left))):
                before = activity.topic
                activity.hear(await socket.recv_multipart(), loop.time())
                if activity.topic != before:
                    # From now on nothing else needs to travel.
                    socket.subscribe(activity.topic)
                    socket.unsubscribe(before or PREFIX)
    finally:
        socket.close(linger=0)


async def _pause(kernel: SandboxedKernel) -> None:
    try:
        if await kernel.pause():
            kernel.log.info("Sandbox %s is paused: its kernel is idle.", kernel.handle.name)
    except SandboxError as error:
        kernel.log.warning("Sandbox %s was not paused: %s", kernel.handle.name, error)
        await asyncio.sleep(_RETRY)
