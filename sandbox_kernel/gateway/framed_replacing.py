"""Replaces in streams of messages that say how long they are: WebSocket frames from a server, and
gRPC. The end of a message waits for nothing, since the other side may wait for it. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from sandbox_kernel.gateway.refusals import Refusal
from sandbox_kernel.gateway.replacing import Replacements, Replacer

TakeHeader = Callable[[bytes], "tuple[int, int] | None"]
"""Gives the lengths of a header and of its message; None: more of the header is needed."""


class FramedReplacer:
    """A filter (rewriting.Filter). Replacements must keep lengths. A match that is cut into two
    messages is not found."""

    def __init__(self, replacements: Replacements, take_header: TakeHeader) -> None:
        self._replacements = replacements
        self._take_header = take_header
        self._header = b""
        self._left = 0
        self._message = Replacer(replacements)

    def feed(self, data: bytes) -> bytes:
        done = []
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                done.append(self._message.feed(piece))
                if not self._left:
                    done.append(self._message.end())
                continue
            before, self._header = len(self._header), self._header + data[:16]
            lengths = self._take_header(self._header)
            if lengths is None:
                data = data[16:]
                continue
            size, self._left = lengths
            done.append(self._header[:size])
            data, self._header = data[size - before :], b""
        return b"".join(done)

    def end(self) -> bytes:
        header, self._header = self._header, b""
        return header + self._message.end()


def websocket_header(data: bytes) -> tuple[int, int] | None:
    """Of a frame from a server. Refusal for one that is masked or compressed."""
    if len(data) < 2:
        return None
    if data[1] & 0x80 or data[0] & 0x70:
        raise Refusal(502, "the server sent a WebSocket frame that cannot be read")
    length, more = data[1], {126: 2, 127: 8}.get(data[1], 0)
    if len(data) < 2 + more:
        return None
    return 2 + more, int.from_bytes(data[2 : 2 + more], "big") if more else length


def grpc_header(data: bytes) -> tuple[int, int] | None:
    """Of a gRPC message. Refusal for one that is compressed."""
    if len(data) < 5:
        return None
    if data[0]:
        raise Refusal(502, "the server sent a compressed gRPC message, which cannot be read")
    return 5, int.from_bytes(data[1:5], "big")
