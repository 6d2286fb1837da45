"""Fuzz both parsers of the wire with atheris (coverage-guided). Not part of the test suite.

    pip install atheris
    python tests/fuzz/fuzz_wire.py --seeds /tmp/corpus      # write seed inputs, once
    python tests/fuzz/fuzz_wire.py /tmp/corpus -max_total_time=600

The first byte of an input chooses the side (host or guest), the codec, how the rest is cut into
pieces, and whether its checksums are put right (or hardly anything would get past them); the rest
is what the other side of the link sends. A parser may raise WireError and nothing
else, must keep its memory bounded, and must give the same events however the bytes are cut.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    sys.exit(__doc__)

sys.path.insert(0, str(Path(__file__).parents[2]))
with atheris.instrument_imports(include=["sandbox_kernel.wire"]):
    from sandbox_kernel.wire import VERSION, WireError
    from sandbox_kernel.wire.codec import BASE64, CODECS, PREAMBLE, RAW
    from sandbox_kernel.wire.connection import AgentConnection, HostConnection
    from sandbox_kernel.wire.frames import (
        CHECKED,
        CREDIT,
        DATA,
        FIN,
        HEADER_SIZE,
        MAX_PAYLOAD,
        OPEN,
        PING,
        RESET,
        Frame,
        encode,
    )
    from sandbox_kernel.wire.handshake import (
        REFUSALS,
        Hello,
        Refuse,
        Welcome,
        encode_message,
    )
    from sandbox_kernel.wire.lines import LineReader
    from sandbox_kernel.wire.mux import Data, Mux
    from sandbox_kernel.wire.session import MAX_UNACKED_FRAMES, REPLAY_LIMIT, Session

HI = Hello(VERSION, "0123456789abcdef", "secret", 0, False, True)
HOST, TEXT, REPAIR = 1, 2, 32
_CUTS = (1, 3, 31, 32, 33, 1000, 65536, 10**9)


class Side:
    """One side of a link, driven as ``Peer`` drives it."""

    def __init__(self, host: bool, codec: str) -> None:
        self.events: list[tuple[object, ...]] = []
        self._session = Session()
        self._mux = mux = Mux(self._session, host=host)
        self._control = LineReader()
        self._connection = HostConnection(mux, HI, codec) if host else AgentConnection(codec)
        if host:
            mux.open("control", 0)

    def feed(self, data: bytes) -> None:
        connection = self._connection
        connection.receive_data(data)
        while True:
            for event in connection.events(0.0):
                self._handle(event)
            connection.data_to_send(2**20)
            self._check_bounds()
            if connection.mux is None or not connection.more:
                return

    def _handle(self, event: Any) -> None:
        fields = [getattr(field, "id", field) for field in event]
        self.events.append((type(event).__name__, *fields))
        if isinstance(event, Hello):
            assert isinstance(self._connection, AgentConnection)
            self._connection.accept(self._mux, event, 0.0)
        elif isinstance(event, Data):
            try:
                for line in self._control.feed(event.payload):
                    json.loads(line)
            except (ValueError, RecursionError):
                event.stream.reset("control: bad message")
            else:
                event.stream.consumed(len(event.payload))

    def _check_bounds(self) -> None:
        assert len(self._session._replay) <= MAX_UNACKED_FRAMES + 2
        assert self._session.unacked_bytes <= REPLAY_LIMIT + MAX_PAYLOAD
        assert self._connection._decoder._have <= HEADER_SIZE + MAX_PAYLOAD + 10**6


def outcome(flags: int, data: bytes, size: int) -> list[tuple[object, ...]]:
    """The events before the link broke (or did not), in pieces of a size."""
    side = Side(bool(flags & HOST), BASE64 if flags & TEXT else RAW)
    with contextlib.suppress(WireError):
        for at in range(0, len(data), size):
            side.feed(data[at : at + size])
    return side.events


def repaired(data: bytes) -> bytes:
    """The data with right checksums, as far as it can be read as frames."""
    at = data.find(PREAMBLE)
    at = 0 if at < 0 else at + len(PREAMBLE)
    fixed = bytearray(data)
    while at + HEADER_SIZE <= len(data):
        after = at + HEADER_SIZE + int.from_bytes(data[at : at + 4], "big")
        covered = data[at + 8 : after if data[at + 9] & CHECKED else at + HEADER_SIZE]
        fixed[at + 4 : at + 8] = zlib.crc32(covered).to_bytes(4, "big")
        at = after
    return bytes(fixed)


def one_input(data: bytes) -> None:
    """What atheris calls."""
    if not data:
        return
    flags, rest = data[0], data[1:]
    if flags & REPAIR and not flags & TEXT:
        rest = repaired(rest)
    pieces = outcome(flags, rest, _CUTS[flags >> 2 & 7])
    whole = outcome(flags, rest, len(rest) or 1)
    # A piece that breaks the link takes the good frames in front of it along.
    shorter = min(len(pieces), len(whole))
    assert pieces[:shorter] == whole[:shorter]


def seeds() -> dict[str, bytes]:
    """Good conversations in both directions, for the fuzzer to spoil."""
    hello = encode_message(HI)
    welcome = encode_message(Welcome(VERSION, HI.session, 0))

    def frames(*bodies: tuple[int, int, bytes]) -> bytes:
        numbered = enumerate(bodies, 1)
        return b"".join(encode(Frame(t, s, n, 0, p)) for n, (t, s, p) in numbered)

    to_guest = frames(
        (OPEN, 1, b"\0control"),
        (CREDIT, 1, b"\0\x0c\0\0"),
        (DATA, 1, b'{"id": 1, "call": "info", "args": {}}\n'),
        (OPEN, 3, b"\2kernel:shell"),
        (DATA, 3, b"\xff\0\0\0\0\0\0\0\1\x7f"),
        (FIN, 3, b""),
        (RESET, 1, b"enough"),
    )
    to_host = frames(
        (CREDIT, 1, b"\0\x0c\0\0"),
        (DATA, 1, b'{"id": 1, "result": {"version": 1}}\n'),
        (DATA, 1, b'{"event": "kernel_exited", "generation": 1}\n'),
        (FIN, 1, b""),
    )
    ping = encode(Frame(PING, 0, 0, 0, b"are you there?"))
    talks = {
        "to-guest": (0, hello + ping + to_guest),
        "to-host": (HOST, welcome + ping + to_host),
        "refused": (HOST, encode_message(Refuse("token", REFUSALS["token"]))),
    }
    found = {}
    for name, (side, plain) in talks.items():
        banner = b"Welcome!\r\n" + PREAMBLE if side else b""
        for text in (0, TEXT):
            link = b"".join(CODECS[BASE64 if text else RAW]().encode([plain]))
            for cut in range(len(_CUTS)):
                flags = side | text | cut << 2 | (0 if text else REPAIR)
                found[f"{name}-{text}-{cut}"] = bytes([flags]) + banner + link
    return found


def main(arguments: list[str]) -> Any:
    if arguments[1:2] == ["--seeds"]:
        folder = Path(arguments[2])
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in seeds().items():
            (folder / name).write_bytes(data)
        return print(f"{len(seeds())} seeds are in {folder}")
    atheris.Setup(arguments, one_input)
    return atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
