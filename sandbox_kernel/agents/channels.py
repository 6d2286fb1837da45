"""The sockets of one client of a kernel, on its caller's event loop.

Plain ZMQ sockets that the loop watches: no task and no future for a message, which would cost more
than a trivial cell does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from sandbox_kernel.errors import KernelError
from sandbox_kernel.jupyter.envelopes import Envelope, open_envelope

_KINDS = {"shell": zmq.DEALER, "control": zmq.DEALER, "stdin": zmq.DEALER, "iopub": zmq.SUB}
_MOST_WAITING = 20_000
"""Messages that wait while the caller's loop does other things."""
_MAX_MESSAGE = 2**28
_AT_ONCE = 200
"""Messages after which the loop's other work has its turn."""

Hear = Callable[[str, Envelope], None]


class Channels:
    """``hear`` gets the channel and each message that is one. All of it on one loop."""

    def __init__(self, manager: Any, hear: Hear) -> None:
        self._manager = manager
        self._session = manager.session
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def open(self) -> None:
        context: zmq.Context[Any] = zmq.Context.shadow(self._manager.context.underlying)
        for channel, kind in _KINDS.items():
            socket = context.socket(kind)
            self._sockets[channel] = socket
            self._configure(socket, channel)
            port = getattr(self._manager, f"{channel}_port")
            ip, transport = self._manager.ip, self._manager.transport
            socket.connect(f"tcp://{ip}:{port}" if transport == "tcp" else f"ipc://{ip}-{port}")
            self._loop.add_reader(socket.fileno(), self._read, channel, socket)

    def _configure(self, socket: zmq.Socket[bytes], channel: str) -> None:
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        if channel == "iopub":
            socket.rcvhwm = _MOST_WAITING
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        else:
            socket.identity = self._session.bsession
        # Managers of older versions know no encryption.
        public = getattr(self._manager, "curve_publickey", None)
        secret = getattr(self._manager, "curve_secretkey", None)
        if public is not None:
            socket.curve_serverkey = socket.curve_publickey = public
            socket.curve_secretkey = secret

    def close(self) -> None:
        """Idempotent."""
        while self._sockets:
            _, socket = self._sockets.popitem()
            self._loop.remove_reader(socket.fileno())
            socket.close(0)

    def send(self, channel: str, kind: str, content: Mapping[str, Any], message_id: str) -> None:
        """KernelError if the kernel takes nothing."""
        message = self._session.msg(kind, dict(content))
        message["msg_id"] = message["header"]["msg_id"] = message_id
        if channel not in self._sockets:
            raise KernelError("The connection to the kernel is closed.")
        socket = self._sockets[channel]
        try:
            socket.send_multipart(self._session.serialize(message), zmq.NOBLOCK)
        except zmq.Again:
            raise KernelError(
                f"The kernel takes no messages on its {channel} channel; restart it."
            ) from None
        # Sending may consume the event that tells of a message that can be read.
        self._loop.call_soon(self._read, channel, socket)

    def _read(self, channel: str, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_AT_ONCE):
            if socket.closed:
                return
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope = open_envelope(parts)
            if envelope is not None:
                self._hear(channel, envelope)
        self._loop.call_soon(self._read, channel, socket)
