"""A client of our own that listens to a kernel: for ``idle_pause`` and ``hint_log``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zmq
import zmq.asyncio

from sandbox_kernel.jupyter.connections import addresses, guest_connection

PREFIX = b"kernel"
"""Topics of status messages begin so, in ipykernel and xeus; further words differ."""
_MAX_MESSAGE = 2**20


def listen(connection: Mapping[str, Any]) -> zmq.asyncio.Socket:
    """A socket that is subscribed to ``PREFIX``. Close it without linger."""
    address = addresses(connection)["iopub"]
    socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
    keys = guest_connection(connection)
    if keys.get("curve_publickey"):
        socket.curve_secretkey = keys["curve_secretkey"].encode()
        socket.curve_publickey = socket.curve_serverkey = keys["curve_publickey"].encode()
    socket.subscribe(PREFIX)
    unix = isinstance(address, str)
    socket.connect(f"ipc://{address}" if unix else f"tcp://{address[0]}:{address[1]}")
    return socket
