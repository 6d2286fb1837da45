"""Download: all bytes that the agent writes to one stream."""

from __future__ import annotations

import asyncio

from sandbox_kernel.errors import ProtocolError, SandboxError
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.wire.frames import Buffer
from sandbox_kernel.wire.mux import Stream
from sandbox_kernel.wire.peer import Peer


class Download:
    """Handles one stream. ``done`` gets the bytes, or an error, also beyond ``limit`` bytes."""

    def __init__(self, peer: Peer, stream: Stream, sandbox: str, limit: int) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._peer = peer
        self._stream = stream
        self._sandbox = sandbox
        self._limit = limit
        self._data = bytearray()
        stream.owner = self

    def fail(self, error: SandboxError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def on_data(self, payload: Buffer) -> None:
        self._stream.consumed(len(payload))
        self._data += payload
        if len(self._data) > self._limit:
            self._data.clear()
            self._stream.reset("too much")
            self._peer.flush_soon()
            who = f"The agent in sandbox {self._sandbox!r}"
            self.fail(ProtocolError(f"{who} sent more than {self._limit} bytes."))

    def on_finished(self) -> None:
        self._stream.finish()
        self._peer.flush_soon()
        if not self.done.done():
            self.done.set_result(bytes(self._data))

    def on_reset(self, reason: str) -> None:
        who = f"The agent in sandbox {self._sandbox!r}"
        self.fail(SandboxError(f"{who} closed the stream: {printable(reason[:200])}."))

    def on_room(self) -> None:
        """Nothing is written to the stream."""
