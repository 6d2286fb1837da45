"""Handover: gives clients' connections to the agent, where the sandbox is on this machine.

Then no byte of them passes through this process, and a busy interpreter delays nobody. Only Unix
sockets are handed over: a TCP socket would be a way out of the sandbox, for it can be disconnected
and connected to another address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket

from sandbox_kernel.errors import LinkLost
from sandbox_kernel.guest.connector import ACCEPTED, CLIENTS
from sandbox_kernel.guest.endpoints import CHANNELS
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.wire.descriptors import send_with_descriptors

OPEN_TIMEOUT = 10.0


class Handover:
    """A socket to the agent that takes connections. When it is closed, or this process ends, the
    agent closes them."""

    def __init__(self, carrier: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._carrier = carrier
        self._loop.add_reader(carrier.fileno(), self._ended)

    @classmethod
    async def open(cls, handle: SandboxHandle, folder: str, token: str, session: str) -> Handover:
        """For a session that the agent knows. LinkLost if the agent does not take connections."""
        connector = handle.guest_argv("connect", folder, CLIENTS)
        stream = await handle.open_command(Command(connector, duplex=True))
        try:
            if stream.socket is None:
                raise LinkLost(f"Sandbox {handle.name!r} has no sockets for its commands.")
            carrier = socket.socket(fileno=os.dup(stream.socket.fileno()))
            try:
                await cls._greet(carrier, {"token": token, "session": session})
            except BaseException:
                carrier.close()
                raise
        finally:
            await stream.close()
        return cls(carrier)

    @staticmethod
    async def _greet(carrier: socket.socket, hello: dict[str, str]) -> None:
        loop = asyncio.get_running_loop()
        carrier.setblocking(False)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                await loop.sock_sendall(carrier, json.dumps(hello).encode() + b"\n")
                answer = await loop.sock_recv(carrier, 1)
        except (OSError, TimeoutError) as error:
            raise LinkLost(f"The agent did not answer: {error!r}.") from None
        if answer != ACCEPTED:
            raise LinkLost("The agent takes no connections of clients.")

    def take(self, connection: socket.socket, channel: str) -> bool:
        """Give the agent a client's connection, which is closed here. False if it was not taken,
        and is as before."""
        if self._carrier.fileno() < 0 or connection.family != socket.AF_UNIX:
            return False
        try:
            number = bytes([CHANNELS.index(channel)])
            send_with_descriptors(self._carrier, number, [connection.fileno()])
        except BlockingIOError:
            return False  # the agent is behind
        except OSError:
            self.close()
            return False
        connection.close()
        return True

    def close(self) -> None:
        """Idempotent."""
        if self._carrier.fileno() >= 0:
            self._loop.remove_reader(self._carrier.fileno())
            self._carrier.close()

    def _ended(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._carrier.recv(1)
        self.close()  # the agent says nothing here, so it has gone or is none of ours
