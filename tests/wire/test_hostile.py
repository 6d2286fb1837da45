"""The far side is hostile: whatever it sends, only WireError comes out and memory stays bounded."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_kernel.wire import WireError
from sandbox_kernel.wire.codec import (
    CODECS,
    MAX_BANNER,
    MAX_LINE,
    Base64Codec,
    PreambleFilter,
)
from sandbox_kernel.wire.frames import (
    ACK,
    BLOCKED,
    CREDIT,
    DATA,
    FIN,
    HEADER_SIZE,
    HELLO,
    LINK_TYPES,
    MAX_PAYLOAD,
    OPEN,
    PING,
    REFUSE,
    RESET,
    SESSION_TYPES,
    WELCOME,
    Frame,
    FrameDecoder,
    encode,
)
from sandbox_kernel.wire.handshake import decode_answer, decode_hello
from sandbox_kernel.wire.mux import (
    DEFAULT_WINDOW,
    MAX_STREAMS,
    MAX_WINDOW,
    OUTPUT,
    WIDEST_WINDOW,
    Reset,
)
from sandbox_kernel.wire.session import REPLAY_LIMIT, SPARE_FRAMES, Session
from tests.wire.sides import PLENTY, Side

MIB = 2**20


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """What is allocated within the block and still held at its end, and the peak, are bounded."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def only_wire_errors(feed: Callable[[Any], object], pieces: Iterable[Any]) -> WireError | None:
    """Feed until something is refused, as the owner of a link does."""
    for piece in pieces:
        try:
            feed(piece)
        except WireError as error:
            return error
    return None


def a_host() -> Side:
    """A host with a stream to the sandbox, as it is when hostile bytes arrive."""
    side = Side(host=True)
    side.mux.open("kernel:iopub", OUTPUT).write(b"hello")
    side.out()
    return side


class Attacker:
    """Sends numbered frames that are intact, and as wrong as they please."""

    def __init__(self, victim: Side) -> None:
        self.victim = victim
        self.seq = 0

    def send(self, type_: int, stream: int, payload: bytes = b"", ack: int = 0) -> list[object]:
        self.seq += type_ in SESSION_TYPES
        seq = self.seq if type_ in SESSION_TYPES else 0
        return list(self.victim.feed(encode(Frame(type_, stream, seq, ack, payload))))


# --- arbitrary bytes


@settings(deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=20))
def test_arbitrary_bytes_to_the_decoders(pieces: list[bytes]) -> None:
    """Frames, both codecs, and the filter before them."""
    only_wire_errors(FrameDecoder().feed, pieces)
    only_wire_errors(PreambleFilter().feed, pieces)
    for name in CODECS:
        only_wire_errors(CODECS[name]().decode, pieces)


@settings(deadline=None)
@given(st.sampled_from([HELLO, WELCOME, REFUSE, ACK]), st.binary(max_size=300))
def test_arbitrary_bytes_as_a_handshake(type_: int, payload: bytes) -> None:
    """Of any type."""
    frame = Frame(type_, 0, 0, 0, payload)
    for decode in (decode_hello, decode_answer):
        with pytest.raises(WireError):
            decode(frame)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(LINK_TYPES | SESSION_TYPES)),
            st.integers(0, 6) | st.integers(0, 2**32 - 1),
            st.integers(-2, 2) | st.integers(-(2**32), 2**32),
            st.integers(0, 4) | st.integers(0, 2**64 - 1),
            st.binary(max_size=64) | st.just(b"\0\0\1\0"),
        ),
        max_size=30,
    )
)
def test_intact_frames_with_arbitrary_content(
    plan: list[tuple[int, int, int, int, bytes]],
) -> None:
    """Checksums are right, nothing else needs to be."""
    side = a_host()

    def feed(frame: Frame) -> None:
        side.take_frames(FrameDecoder().feed(encode(frame)))
        side.out()

    seq = 0
    for type_, stream, jump, ack, payload in plan:
        if type_ in SESSION_TYPES:
            seq = max(1, seq + 1 + jump * (jump not in (-2, 0, 2)))
        number = seq if type_ in SESSION_TYPES else 0
        try:
            feed(Frame(type_, stream, number, ack, payload))
        except WireError:
            return


def _recorded() -> bytes:
    """What an honest guest sends, to be altered."""
    guest = Side(host=False)
    guest.feed(encode(Frame(OPEN, 1, 1, 0, b"\3kernel:iopub")))
    guest.mux.streams[1].write(bytes(range(256)) * 4)
    guest.mux.streams[1].finish()
    stream = guest.mux.open("forward", OUTPUT)
    stream.write(b"x" * 100)
    stream.reset("no")
    return guest.out()


RECORDED = _recorded()
MUTATION = st.tuples(
    st.sampled_from(["set", "cut", "insert", "swap"]),
    st.integers(0, len(RECORDED) - 1),
    st.binary(min_size=1, max_size=40),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(MUTATION, min_size=1, max_size=5), st.sampled_from(list(CODECS)), st.integers(1, 400)
)
def test_mutated_traffic(mutations: list[tuple[str, int, bytes]], codec: str, piece: int) -> None:
    """Of an honest guest, on both codecs, in pieces of any size."""
    wire = bytearray(b"".join(CODECS[codec]().encode([RECORDED])))
    for how, at, data in mutations:
        if how == "set":
            wire[at : at + len(data)] = data
        elif how == "cut":
            del wire[at : at + len(data)]
        elif how == "insert":
            wire[at:at] = data
        else:
            wire[at : at + 40], wire[at + 40 : at + 80] = (
                wire[at + 40 : at + 80],
                wire[at : at + 40],
            )
    side = a_host()
    side.attach(0, codec)
    pieces = [bytes(wire[i : i + piece]) for i in range(0, len(wire), piece)]
    only_wire_errors(side.feed, pieces)


# --- bounds


@pytest.mark.parametrize("kind", ["random", "zeros", "ones", "text", "newlines", "preamble-like"])
@pytest.mark.parametrize("size", [1000, 65536])
def test_ten_megabytes_of_garbage(kind: str, size: int) -> None:
    """Every layer refuses it early, or lets it pass without keeping it."""
    piece = {
        "random": random.Random(1).randbytes(size),
        "zeros": bytes(size),
        "ones": b"\xff" * size,
        "text": b"A" * size,
        "newlines": b"\n" * size,
        "preamble-like": (b"\nsandbox-kernel/1 read" * size)[:size],
    }[kind]
    pieces = [piece] * (10 * MIB // size)
    gate = PreambleFilter()
    only_wire_errors(gate.feed, pieces)
    assert len(gate.seen) <= MAX_BANNER + size
    for codec in CODECS:
        side = a_host()
        side.attach(0, codec)
        only_wire_errors(side.feed, pieces)
        assert side.decoder._have <= HEADER_SIZE + MAX_PAYLOAD + size
        assert getattr(side.incoming, "_partial_size", 0) <= MAX_LINE + size


def test_a_frame_that_never_ends_byte_by_byte() -> None:
    """What waits for the rest is one frame at most, even in the smallest pieces."""
    frame = encode(Frame(DATA, 1, 1, 0, bytes(MAX_PAYLOAD)))[:-1]
    decoder = FrameDecoder()
    with memory_below(4 * MIB):
        for at in range(len(frame)):
            assert decoder.feed(frame[at : at + 1]) == []


def test_a_base64_line_byte_by_byte() -> None:
    """Likewise."""
    codec = Base64Codec()
    with memory_below(4 * MIB):
        error = only_wire_errors(codec.decode, [b"A"] * (2 * MAX_PAYLOAD))
    assert error is not None


# --- floods, each with its defined end


def test_a_flood_of_streams_that_are_acknowledged_is_reset() -> None:
    """MAX_STREAMS are held, each further one is refused by a RESET."""
    attacker = Attacker(Side(host=True))
    opened = 0
    with memory_below(16 * MIB):
        for id_ in range(2, 2 * 2000, 2):
            opened += len(
                attacker.send(OPEN, id_, b"\0x", ack=attacker.victim.session._next_seq - 1)
            )
            attacker.victim.out()
    assert opened == len(attacker.victim.mux.streams) == MAX_STREAMS


def test_a_flood_of_streams_that_acknowledges_nothing_ends_the_session() -> None:
    """Neither the answers nor the streams go on for ever."""
    attacker = Attacker(Side(host=True))

    def flood(id_: int) -> None:
        attacker.send(OPEN, id_, b"\0x")
        attacker.victim.out()

    error = only_wire_errors(flood, range(2, 10**6, 2))
    assert str(error) == "too many frames that move nothing"


def test_open_and_reset_for_ever_holds_nothing() -> None:
    """Streams that are gone leave nothing behind."""
    victim = Side(host=True)
    attacker = Attacker(victim)
    with memory_below(1 * MIB):
        for id_ in range(2, 2 * 2000, 2):
            attacker.send(OPEN, id_, b"\0x", ack=victim.session._next_seq - 1)
            victim.mux.streams[id_].write(b"never read")
            attacker.send(RESET, id_, b"")
            victim.out()
    assert victim.mux.streams == {}


def test_credit_that_overflows_ends_the_session() -> None:
    """However it is added up."""
    attacker = Attacker(a_host())
    quarter = (MAX_WINDOW // 4).to_bytes(4, "big")
    error = only_wire_errors(lambda payload: attacker.send(CREDIT, 1, payload), [quarter] * 10)
    assert str(error) == "CREDIT on stream 1 exceeds 2147483647 bytes"


def test_credit_for_nothing_is_harmless() -> None:
    """No busy loop, nothing is sent."""
    victim = a_host()
    attacker = Attacker(victim)
    victim.session.receive(Frame(ACK, 0, 0, victim.session._next_seq - 1, b""), 0.0)
    for _ in range(1000):
        attacker.send(CREDIT, 1, bytes(4))
        victim.mux.pump(PLENTY)
    assert victim.session.unacked_bytes == 0


def test_a_flood_of_complaints_widens_a_window_to_its_bound() -> None:
    """BLOCKED asks for credit; what it gets is limited."""
    attacker = Attacker(a_host())
    for _ in range(1000):
        attacker.send(BLOCKED, 1)
    stream = attacker.victim.mux.streams[1]
    assert stream._granted == stream._window == WIDEST_WINDOW


def test_acknowledgements_from_the_future_end_the_session() -> None:
    """On any frame."""
    for type_, payload in ((ACK, b""), (PING, b""), (DATA, b"x")):
        with pytest.raises(WireError, match="never sent") as caught:
            Attacker(a_host()).send(type_, 1, payload, ack=2**64 - 1)
        assert caught.value.fatal


def test_a_flood_of_pings_is_answered_within_bounds() -> None:
    """A victim that cannot write does not collect answers."""
    attacker = Attacker(a_host())
    with memory_below(2 * MIB):
        for _ in range(2000):
            attacker.send(PING, 0, bytes(MAX_PAYLOAD))
    assert len(attacker.victim.out()) == 8 * (HEADER_SIZE + MAX_PAYLOAD)


def test_empty_data_is_not_collected() -> None:
    """It would cost no credit, so the first ends the session."""
    with pytest.raises(WireError, match="empty DATA"):
        Attacker(a_host()).send(DATA, 1)


def test_a_reader_holds_no_more_than_its_window() -> None:
    """Whatever the sizes of the frames."""
    attacker = Attacker(a_host())
    taken: list[object] = []

    def feed(payload: bytes) -> None:
        taken.extend(attacker.send(DATA, 1, payload))

    error = only_wire_errors(feed, [bytes(7777)] * 1000)
    assert str(error) == "DATA on stream 1 after FIN or beyond its credit"
    assert len(taken) == DEFAULT_WINDOW // 7777


def test_a_peer_that_never_acknowledges_gets_no_more_than_the_replay_buffer() -> None:
    """It is a stall that pushes back on the producers, and costs no more memory."""
    victim = a_host()
    attacker = Attacker(victim)
    stream = victim.mux.streams[1]
    for _ in range(10):
        attacker.send(CREDIT, 1, (10 * MIB).to_bytes(4, "big"))
    for _ in range(1000):
        if not stream.full:
            stream.write(bytes(MAX_PAYLOAD))
        victim.out()
    assert victim.session.unacked_bytes <= REPLAY_LIMIT + MAX_PAYLOAD
    assert stream.full
    attacker.send(ACK, 0, ack=victim.session._next_seq - 1)
    victim.out()
    assert not stream.full


def test_old_frames_for_ever_are_ignored() -> None:
    """Replaying what is known changes nothing and is not acknowledged again and again; more of it
    than a bad network makes ends the link."""
    session = Session()
    session.attach(0, 0.0)
    frame = Frame(FIN, 1, 1, 0, b"")
    assert session.receive(frame, 0.0)
    for _ in range(SPARE_FRAMES):
        assert not session.receive(frame, 0.0)
    assert not session.pending


def test_a_reason_cannot_be_a_novel() -> None:
    """It goes into logs."""
    (event,) = Attacker(a_host()).send(RESET, 1, b"a" * MAX_PAYLOAD)
    assert isinstance(event, Reset)
    assert len(event.reason) == 1024
