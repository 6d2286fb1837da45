"""Replaces in streams of messages that say how long they are: WebSocket frames from a server, and
gRPC. The end of a message waits for nothing, since the other side may wait for it. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from sandbox_kernel.gateway.refusals import Refusal
from sandbox_kernel.gateway.replacing import Replacements, Replacer

_MOST_HELD = 64


class Frame(NamedTuple):
    """What the header of a frame says."""

    header: int
    length: int
    goes_on: bool = False
    """The message goes on in the next frame."""
    is_control: bool = False
    """It may stand between those of a message, and belongs to none."""


TakeHeader = Callable[[bytes], "Frame | None"]
"""Reads the header that data begins with; None: more of it is needed."""


class FramedReplacer:
    """A filter (rewriting.Filter). Replacements must keep lengths. A match that is cut into two
    messages is not found; one that is cut into frames of one message is."""

    def __init__(self, replacements: Replacements, take_header: TakeHeader) -> None:
        self._replacements = replacements
        self._take_header = take_header
        self._header = b""
        self._frame = Frame(0, 0)
        self._left = 0
        self._control = b""
        self._message = Replacer(replacements)
        self._fed = self._passed = 0
        """Bytes of messages, headers and control frames aside."""
        self._between: deque[tuple[int, bytes]] = deque()
        """Headers and control frames that wait, and how many bytes of messages go before."""

    def feed(self, data: bytes) -> bytes:
        done = []
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                done.append(self._content(piece))
                continue
            before, self._header = len(self._header), self._header + data[:16]
            frame = self._take_header(self._header)
            if frame is None:
                data = data[16:]
                continue
            header, data = self._header[: frame.header], data[frame.header - before :]
            self._frame, self._left, self._header = frame, frame.length, b""
            done.append(self._insert(header))
            done.append(self._content(b""))
        return b"".join(done)

    def end(self) -> bytes:
        cut = self._replacements.in_whole(self._control) + self._header
        self._control = self._header = b""
        return self._pass(self._message.end()) + cut

    def _content(self, piece: bytes) -> bytes:
        """More of the present frame."""
        if self._frame.is_control:
            self._control += piece
            if self._left:
                return b""
            whole, self._control = self._control, b""
            return self._insert(self._replacements.in_whole(whole))
        self._fed += len(piece)
        done = self._message.feed(piece)
        if not self._left and not self._frame.goes_on:
            done += self._message.end()
        return self._pass(done)

    def _insert(self, data: bytes) -> bytes:
        """Something that stands where the message is now, of which a part may be held back."""
        self._between.append((self._fed, data))
        if len(self._between) > _MOST_HELD:
            raise Refusal(502, "the server sent too many frames within a message")
        return self._pass(b"")

    def _pass(self, content: bytes) -> bytes:
        done = []
        while self._between and self._between[0][0] <= self._passed + len(content):
            at, data = self._between.popleft()
            done += [content[: at - self._passed], data]
            content, self._passed = content[at - self._passed :], at
        self._passed += len(content)
        return b"".join((*done, content))


def websocket_header(data: bytes) -> Frame | None:
    """Of a frame from a server. Refusal for one that is masked or compressed."""
    if len(data) < 2:
        return None
    ends, is_control, short = bool(data[0] & 0x80), bool(data[0] & 0x08), data[1]
    if short & 0x80 or data[0] & 0x70 or (is_control and (short > 125 or not ends)):
        raise Refusal(502, "the server sent a WebSocket frame that cannot be read")
    more = {126: 2, 127: 8}.get(short, 0)
    if len(data) < 2 + more:
        return None
    length = int.from_bytes(data[2 : 2 + more], "big") if more else short
    return Frame(2 + more, length, not ends and not is_control, is_control)


def grpc_header(data: bytes) -> Frame | None:
    """Of a gRPC message. Refusal for one that is compressed."""
    if len(data) < 5:
        return None
    if data[0]:
        raise Refusal(502, "the server sent a compressed gRPC message, which cannot be read")
    return Frame(5, int.from_bytes(data[1:5], "big"))
