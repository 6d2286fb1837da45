"""Pauses the sandbox of a kernel that has nothing to do.

Whether a kernel is busy only Jupyter's messages say, and the tunnel does not look at them. So this
is a client of the kernel's iopub channel, which hears its status messages and nothing else. A
kernel that sends none is never taken for idle.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import zmq
import zmq.asyncio

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.configuration import KernelConfiguration
from sandbox_kernel.jupyter.hosting import addresses
from sandbox_kernel.kernels import SandboxedKernel

_DELIMITER = b"<IDS|MSG>"
_PREFIX = b"kernel"
"""Topics of status messages begin so, in ipykernel and xeus; further words differ."""
_MAX_MESSAGE = 2**20
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
        """One message; anything but a status is passed over. The kernel may be hostile: it can
        keep itself from being paused, and nothing else."""
        try:
            at = frames.index(_DELIMITER)
            header, parent, content = (json.loads(frames[at + n]) for n in (2, 3, 5))
            if header["msg_type"] != "status":
                return
            request, state = str(parent.get("msg_id", ""))[:200], content["execution_state"]
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError):
            return
        self.topic = b"".join(frames[:at])
        self._heard = True
        self.changed = now
        if state == "busy" and len(self._busy) < _MAX_BUSY:
            self._busy.add(request)
        elif state == "idle":
            self._busy.discard(request)


def accompany(
    kernel: SandboxedKernel, configuration: KernelConfiguration, connection: Mapping[str, Any]
) -> None:
    """See that a kernel which has just been launched is paused as its configuration says. Called
    on the background loop."""
    kernel.pause_on_exit = configuration.pause_on_exit
    if configuration.idle_pause_seconds:
        watching = pause_when_idle(kernel, connection, configuration.idle_pause_seconds)
        kernel.accompany(asyncio.get_running_loop().create_task(watching))


async def pause_when_idle(
    kernel: SandboxedKernel, connection: Mapping[str, Any], seconds: float
) -> None:
    """Until it is cancelled: pause the kernel's sandbox whenever the kernel has been idle, and
    no client has sent anything, for so long. Whatever a client sends next resumes it."""
    loop = asyncio.get_running_loop()
    activity = Activity(loop.time())
    socket = _listener(connection)
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
                    socket.unsubscribe(before or _PREFIX)
    finally:
        socket.close(linger=0)


async def _pause(kernel: SandboxedKernel) -> None:
    try:
        if await kernel.pause():
            kernel.log.info("Sandbox %s is paused: its kernel is idle.", kernel.handle.name)
    except SandboxError as error:
        kernel.log.warning("Sandbox %s was not paused: %s", kernel.handle.name, error)
        await asyncio.sleep(_RETRY)


def _listener(connection: Mapping[str, Any]) -> zmq.asyncio.Socket:
    address = addresses(connection)["iopub"]
    socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
    if connection.get("curve_publickey"):
        public, secret = (
            key.encode() if isinstance(key, str) else key
            for key in (connection["curve_publickey"], connection["curve_secretkey"])
        )
        socket.curve_secretkey, socket.curve_publickey = secret, public
        socket.curve_serverkey = public
    socket.subscribe(_PREFIX)
    unix = isinstance(address, str)
    socket.connect(f"ipc://{address}" if unix else f"tcp://{address[0]}:{address[1]}")
    return socket
