"""Properties of the wire over links that do anything but alter bytes.

A random plan opens, writes, finishes and resets streams on both sides, delivers bytes in pieces of
any size, repeats frames, cuts links at any byte, and shakes hands again. Whatever the plan was:
each reader gets what was written, in order and once; what is held stays within its bounds; and
when the links behave again, everything arrives.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sandbox_kernel.wire import VERSION
from sandbox_kernel.wire import session as session_module
from sandbox_kernel.wire.codec import CODECS, RAW
from sandbox_kernel.wire.frames import encode
from sandbox_kernel.wire.handshake import (
    Hello,
    Welcome,
    decode_answer,
    decode_hello,
    encode_message,
)
from sandbox_kernel.wire.mux import (
    CHUNK,
    HIGH_WATER,
    INITIAL_WINDOW,
    PRIORITIES,
    WIDEST_WINDOW,
    Data,
    Event,
    Finished,
    Opened,
    Reset,
    Stream,
)
from tests.wire.sides import PLENTY, Side, frames_of

# Less than in earnest, so that plans reach them.
REPLAY_LIMIT = 256 * 1024
WINDOW = INITIAL_WINDOW
SMALL_FRAMES = 64 * 1024  # OPEN, CREDIT and RESET are not held back
NOISE = random.Random(0).randbytes(20 * 2**20)  # more than a plan can write to one stream
SIZES = st.sampled_from([1, 100, 5000, CHUNK - 1, CHUNK, CHUNK + 1, 100_000, HIGH_WATER])
HOST, GUEST = 0, 1
SIDES = st.sampled_from([HOST, GUEST])
WHICH = st.integers(0, 99)
RARELY = st.sampled_from([False, False, False, True])


@dataclass
class Flow:
    """One direction of one stream: what was written, and what its reader has seen of it."""

    writer: Stream
    reader: Stream | None = None
    written: int = 0
    read: int = 0
    unconsumed: int = 0
    finished: bool = False
    end_seen: bool = False
    given_up: bool = False

    def next_bytes(self, size: int) -> bytes:
        start = self.writer.id * 7919 + self.written
        self.written += size
        return NOISE[start : start + size]

    def check(self, payload: bytes) -> None:
        start = self.writer.id * 7919 + self.read
        assert not self.end_seen
        assert payload == NOISE[start : start + len(payload)]
        self.read += len(payload)
        self.unconsumed += len(payload)


@dataclass
class Line:
    """One direction of a link: whole frames under way, as they look on the wire."""

    under_way: deque[bytes] = field(default_factory=deque)
    sent: list[bytes] = field(default_factory=list)

    def put(self, side: Side, data: bytes) -> None:
        for frame in frames_of(data):
            unit = b"".join(side.outgoing.encode([encode(frame, side.session.checked)]))
            self.sent.append(unit)
            self.under_way.append(unit)

    def get(self, size: int) -> bytes:
        taken = []
        while size > 0 and self.under_way:
            unit = self.under_way.popleft()
            taken.append(unit[:size])
            if unit[size:]:
                self.under_way.appendleft(unit[size:])
            size -= len(unit)
        return b"".join(taken)


class Wire(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(session_module, "REPLAY_LIMIT", REPLAY_LIMIT)
        self.sides = (Side(host=True, window=WINDOW), Side(host=False, window=WINDOW))
        for side in self.sides:
            side.session.detach()
        self.lines: list[Line] | None = None
        self.flows: dict[tuple[int, int], Flow] = {}  # by writing side and stream id

    # --- what programs do

    @precondition(lambda self: len(self.flows) < 4)
    @rule(side=SIDES, priority=st.integers(0, PRIORITIES - 1))
    def open_stream(self, side: int, priority: int) -> None:
        stream = self.sides[side].mux.open("kernel:shell", priority)
        self.flows[side, stream.id] = Flow(stream)

    @precondition(lambda self: self.flows)
    @rule(which=WHICH, sizes=st.lists(SIZES, min_size=1, max_size=6))
    def write(self, which: int, sizes: list[int]) -> None:
        flow = self._flow(which)
        for size in sizes:
            if not (flow.writer.full or flow.finished or flow.given_up):
                flow.writer.write(flow.next_bytes(size))

    @precondition(lambda self: self.flows)
    @rule(which=WHICH, really=RARELY)
    def finish(self, which: int, really: bool) -> None:
        if not really:
            return
        flow = self._flow(which)
        flow.writer.finish()
        flow.finished = True

    @precondition(lambda self: self.flows)
    @rule(which=WHICH, really=RARELY)
    def reset(self, which: int, really: bool) -> None:
        if not really:
            return
        stream = self._flow(which).writer
        stream.reset("changed my mind")
        self._given_up(stream.id)

    @precondition(lambda self: self.flows)
    @rule(which=WHICH, part=st.sampled_from([0.1, 0.5, 1.0]))
    def consume(self, which: int, part: float) -> None:
        self._consume(self._flow(which), part)

    @rule()
    def consume_all(self) -> None:
        for flow in self.flows.values():
            self._consume(flow, 1.0)

    # --- what links do

    @precondition(lambda self: self.lines is None)
    @rule(codec=st.sampled_from(list(CODECS)), checked=st.booleans(), welcome_lost=RARELY)
    def connect(self, codec: str, checked: bool, welcome_lost: bool) -> None:
        """A new link, also while the guest still trusts the old one."""
        host, guest = self.sides
        host.session.detach()
        self.lines = None
        first = Hello(VERSION, "s", "t", host.session.received, True, checked)
        hello = decode_hello(*frames_of(encode_message(first)))
        answer = encode_message(Welcome(VERSION, "s", guest.session.received))
        guest.attach(hello.received, codec, checked=hello.checked)
        if welcome_lost:
            return
        welcome = decode_answer(*frames_of(answer))
        assert isinstance(welcome, Welcome)
        host.attach(welcome.received, codec, checked=checked)
        self.lines = [Line(), Line()]

    @precondition(lambda self: self.lines)
    @rule(really=RARELY, guest_notices=st.booleans())
    def cut(self, really: bool, guest_notices: bool) -> None:
        """Whatever is under way is lost, in the middle of a frame or not."""
        if not really:
            return
        self.lines = None
        self.sides[HOST].session.detach()
        if guest_notices:
            self.sides[GUEST].session.detach()

    @rule(side=SIDES, budget=st.sampled_from([1, CHUNK, 256 * 1024, PLENTY]))
    def send(self, side: int, budget: int) -> None:
        """The owner of this side believes that its link can take more."""
        sender = self.sides[side]
        if sender.session.attached:
            sender.mux.pump(budget)
            data = b"".join(sender.session.take())
            if self.lines is not None:
                self.lines[side].put(sender, data)

    @precondition(lambda self: self.lines)
    @rule(side=SIDES, size=st.sampled_from([1, 31, 33, 1000, CHUNK, PLENTY]), times=WHICH)
    def deliver(self, side: int, size: int, times: int) -> None:
        assert self.lines is not None
        for _ in range(times % 40 if size < CHUNK else 1):
            self._arrived(1 - side, self.lines[side].get(size))

    @precondition(lambda self: self.lines)
    @rule(side=SIDES)
    def carry(self, side: int) -> None:
        """A link that just works, for one direction and one turn."""
        self.send(side, PLENTY)
        self.deliver(side, PLENTY, 1)

    @precondition(lambda self: self.lines)
    @rule(side=SIDES, which=WHICH)
    def repeat(self, side: int, which: int) -> None:
        """A frame of this link comes once more, later."""
        assert self.lines is not None
        line = self.lines[side]
        if line.sent:
            line.under_way.append(line.sent[which % len(line.sent)])

    # --- what must hold

    @invariant()
    def memory_is_bounded(self) -> None:
        for side in self.sides:
            assert side.session.unacked_bytes <= REPLAY_LIMIT + CHUNK + SMALL_FRAMES
        for flow in self.flows.values():
            if flow.reader is not None:
                assert flow.unconsumed <= flow.reader._window <= WIDEST_WINDOW
            assert flow.writer.buffered < 2 * HIGH_WATER

    @invariant()
    def a_closed_stream_is_forgotten(self) -> None:
        for (side, id_), flow in self.flows.items():
            assert flow.writer.closed != (id_ in self.sides[side].mux.streams)

    def teardown(self) -> None:
        """When links behave and readers read, everything arrives; then closing is clean."""
        try:
            self._drain()
            self.memory_is_bounded()
            for flow in self.flows.values():
                if not flow.given_up:
                    assert (flow.read, flow.end_seen) == (flow.written, flow.finished)
                    back = self._back(flow)
                    done = flow.finished and back is not None and back.finished
                    assert flow.writer.closed == done
                else:
                    assert flow.writer.closed
            for side in self.sides:
                side.mux.close()
                side.session.detach()
                assert side.mux.streams == {}
                assert side.mux.pump(PLENTY) == []
        finally:
            self.patch.undo()

    def _drain(self) -> None:
        self.connect(codec=RAW, checked=True, welcome_lost=False)
        assert self.lines is not None
        total = sum(flow.written for flow in self.flows.values())
        for _ in range(20 + total // CHUNK):  # a bound that only a deadlock exceeds
            for side in (HOST, GUEST):
                self.send(side, PLENTY)
                self._arrived(1 - side, self.lines[side].get(PLENTY))
            self.consume_all()

    # --- helpers

    def _flow(self, which: int) -> Flow:
        return list(self.flows.values())[which % len(self.flows)]

    def _back(self, flow: Flow) -> Flow | None:
        for (_, id_), other in self.flows.items():
            if id_ == flow.writer.id and other is not flow:
                return other
        return None

    def _given_up(self, id_: int) -> None:
        for side in (HOST, GUEST):
            if (side, id_) in self.flows:
                self.flows[side, id_].given_up = True

    @staticmethod
    def _consume(flow: Flow, part: float) -> None:
        size = int(flow.unconsumed * part)
        if flow.reader is not None and size:
            flow.unconsumed -= size
            flow.reader.consumed(size)

    def _arrived(self, side: int, data: bytes) -> None:
        for event in self.sides[side].feed(data) if data else []:
            self._event(side, event)

    def _event(self, side: int, event: Event) -> None:
        stream = event.stream
        if isinstance(event, Opened):
            flow = self.flows[1 - side, stream.id]
            flow.reader = stream
            back = Flow(stream, reader=flow.writer, given_up=flow.given_up)
            self.flows[side, stream.id] = back
            return
        flow = self.flows[1 - side, stream.id]
        if isinstance(event, Data):
            flow.check(bytes(event.payload))
        elif isinstance(event, Finished):
            assert flow.finished
            assert flow.read == flow.written
            flow.end_seen = True
        else:
            assert isinstance(event, Reset)
            assert flow.given_up


TestWire = Wire.TestCase
TestWire.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
