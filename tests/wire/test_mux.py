"""The multiplexer: many streams in one session, fair and bounded."""

from __future__ import annotations

import pytest

from sandbox_kernel.wire import WireError
from sandbox_kernel.wire.frames import ACK, BLOCKED, CREDIT, DATA, FIN, OPEN, RESET, Frame
from sandbox_kernel.wire.mux import (
    BULK,
    CHUNK,
    CONTROL,
    DEFAULT_WINDOW,
    HIGH_WATER,
    INITIAL_WINDOW,
    INTERACTIVE,
    MAX_REASON,
    MAX_STREAMS,
    MAX_TARGET,
    MAX_WINDOW,
    OUTPUT,
    PRIORITIES,
    WIDEST_WINDOW,
    Data,
    Finished,
    Opened,
    Reset,
    Stream,
)
from sandbox_kernel.wire.session import REPLAY_LIMIT, SPARE_FRAMES
from tests.wire.sides import PLENTY, Side, data_of, frames_of, pair


def opened(host: Side, guest: Side, priority: int = INTERACTIVE) -> tuple[Stream, Stream]:
    """A stream that the host has opened, as both sides see it."""
    ours = host.mux.open("kernel:shell", priority)
    (event,) = guest.feed(host.out())
    assert isinstance(event, Opened)
    assert host.feed(guest.out()) == []
    return ours, event.stream


def raw(type_: int, stream: int, payload: bytes = b"") -> Frame:
    """A session frame as a peer without rules might send it; the number does not matter here."""
    return Frame(type_, stream, 1, 0, payload)


def test_a_stream_is_opened_to_a_target_with_a_priority() -> None:
    """The host's ids are odd, the guest's even, each used once."""
    host, guest = pair()
    assert [host.mux.open("kernel:shell", INTERACTIVE).id for _ in range(2)] == [1, 3]
    assert [guest.mux.open("egress", BULK).id for _ in range(2)] == [2, 4]
    first, _ = guest.feed(host.out())
    assert isinstance(first, Opened)
    assert (first.target, first.stream.id, first.stream.priority) == (
        "kernel:shell",
        1,
        INTERACTIVE,
    )


def test_bytes_flow_both_ways_and_end_each_by_itself() -> None:
    """A stream is closed when both directions have been finished."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    ours.write(b"ques")
    ours.write(b"tion")
    ours.finish()
    ours.write(b"too late")
    ours.finish()
    data, finished = guest.feed(host.out())
    assert data == Data(theirs, b"question")
    assert finished == Finished(theirs)
    assert not theirs.closed
    theirs.write(b"answer")
    theirs.finish()
    assert host.feed(guest.out()) == [Data(ours, b"answer"), Finished(ours)]
    assert [stream.closed for stream in (ours, theirs)] == [True, True]
    assert host.mux.streams == guest.mux.streams == {}


def test_an_end_waits_for_what_was_written_before_it() -> None:
    """Also when that has to wait for credit."""
    host, guest = pair(window=INITIAL_WINDOW)
    ours, theirs = opened(host, guest)
    payload = bytes(INITIAL_WINDOW + 10)
    ours.write(payload)
    ours.finish()
    events = guest.feed(host.out())
    assert len(data_of(events)) == INITIAL_WINDOW
    assert Finished(theirs) not in events
    theirs.consumed(INITIAL_WINDOW)
    host.feed(guest.out())
    assert guest.feed(host.out()) == [Data(theirs, bytes(10)), Finished(theirs)]


def test_a_reset_ends_both_directions_at_once() -> None:
    """What was queued is dropped, what is late is ignored, and the reason arrives."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    ours.write(b"never sent")
    theirs.write(b"late")
    theirs.finish()
    ours.reset("changed my mind \ud800" + "!" * 2 * MAX_REASON)
    ours.reset("again")
    ours.write(b"nothing")
    ours.finish()
    assert (ours.closed, ours.buffered) == (True, 0)
    (event,) = guest.feed(host.out())
    assert isinstance(event, Reset)
    assert event.reason.startswith("changed my mind ?!")
    assert len(event.reason) == MAX_REASON
    assert theirs.closed
    theirs.consumed(DEFAULT_WINDOW)
    assert host.feed(guest.out()) == []
    assert frames_of(host.out()) == []


def test_what_is_late_for_a_closed_stream_is_ignored() -> None:
    """The peer did not know yet."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    theirs.write(b"late")
    late = guest.out()
    ours.reset("gone")
    assert host.feed(late) == []
    theirs.reset("gone, too")
    assert guest.feed(host.out()) == []
    assert host.feed(guest.out()) == []


def test_a_writer_gets_no_further_than_its_credit() -> None:
    """The window is what a reader may have to hold; consuming opens it again, by quarters."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    ours.write(bytes(3 * DEFAULT_WINDOW))
    assert len(data_of(guest.feed(host.out()))) == DEFAULT_WINDOW
    assert host.out() == b""
    theirs.consumed(DEFAULT_WINDOW // 4 - 1)
    assert CREDIT not in [f.type for f in frames_of(guest.out())]
    theirs.consumed(1)
    host.feed(guest.out())
    assert len(data_of(guest.feed(host.out()))) == DEFAULT_WINDOW // 4


def test_a_window_grows_while_its_reader_keeps_up() -> None:
    """On a long link it is the window that limits: the writer says so once, and it is doubled."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    ours.write(bytes(2 * WIDEST_WINDOW))
    windows = [DEFAULT_WINDOW]
    while windows[-1] < WIDEST_WINDOW:
        for event in guest.feed(host.out()):
            assert isinstance(event, Data)
            theirs.consumed(len(event.payload))
        host.session.receive(Frame(ACK, 0, 0, guest.session.received, b""), 0.0)
        guest.mux.receive(raw(BLOCKED, 1))
        windows.append(theirs._window)
        host.feed(guest.out())
    assert windows == [2**n * 2**20 for n in range(4)]
    guest.mux.receive(raw(BLOCKED, 1))
    assert theirs._window == WIDEST_WINDOW


def test_a_window_does_not_grow_for_a_reader_that_is_behind() -> None:
    """There it is the reader that limits, and more would only be held."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    ours.write(bytes(DEFAULT_WINDOW + 1))
    data = host.out()
    assert [f.stream for f in frames_of(data) if f.type == BLOCKED] == [ours.id]
    guest.feed(data)
    assert CREDIT not in [f.type for f in frames_of(guest.out())]
    assert theirs._window == DEFAULT_WINDOW
    assert host.out() == b""


def test_no_window_grows_after_the_end() -> None:
    """Nothing more will come through it."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    ours.finish()
    guest.feed(host.out())
    guest.mux.receive(raw(BLOCKED, 1))
    assert theirs._window == DEFAULT_WINDOW


def test_no_credit_for_a_stream_that_will_send_nothing_more() -> None:
    """After Finished it would be of no use."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    ours.write(bytes(DEFAULT_WINDOW))
    ours.finish()
    guest.feed(host.out())
    theirs.consumed(DEFAULT_WINDOW)
    assert CREDIT not in [f.type for f in frames_of(guest.out())]


def test_a_new_stream_begins_with_a_small_window_that_both_sides_widen() -> None:
    """CREDIT follows OPEN, from both ends; a window of the initial size needs none."""
    host, guest = pair()
    host.mux.open("kernel:iopub", OUTPUT)
    data = host.out()
    more = (DEFAULT_WINDOW - INITIAL_WINDOW).to_bytes(4, "big")
    assert [(f.type, f.payload) for f in frames_of(data)] == [
        (OPEN, b"\x03kernel:iopub"),
        (CREDIT, more),
    ]
    guest.feed(data)
    assert [(f.type, f.payload) for f in frames_of(guest.out())] == [(CREDIT, more)]

    small, _ = pair(window=INITIAL_WINDOW)
    small.mux.open("kernel:iopub", OUTPUT)
    assert [f.type for f in frames_of(small.out())] == [OPEN]


def test_a_window_grows_while_only_the_link_holds_the_writer_back() -> None:
    """A writer out of credit says so; a reader that has read all widens the window, to a bound."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    for window in (2 * DEFAULT_WINDOW, 4 * DEFAULT_WINDOW, WIDEST_WINDOW, WIDEST_WINDOW):
        ours.write(bytes(2 * WIDEST_WINDOW))
        while frames := frames_of(host.out()):
            for frame in frames:  # the reader takes each piece as it comes
                theirs.consumed(len(data_of(guest.take_frames([frame]))))
            host.session.receive(Frame(ACK, 0, 0, guest.session.received, b""), 0.0)
        assert ours.buffered  # out of credit
        host.feed(guest.out())
        assert theirs._window == window


def test_a_reader_that_is_behind_gets_no_wider_window() -> None:
    """What holds the writer back is then not the link."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    ours.write(bytes(2 * DEFAULT_WINDOW))
    guest.feed(host.out())
    assert theirs._window == DEFAULT_WINDOW


def test_the_urgent_overtakes_what_waits() -> None:
    """An interrupt gets through while a cell prints gigabytes."""
    host, guest = pair()
    output, _ = opened(host, guest, OUTPUT)
    control, _ = opened(host, guest, CONTROL)
    output.write(bytes(HIGH_WATER))
    host.mux.pump(1)
    control.write(b"interrupt")
    control.finish()
    sent = [f.stream for f in frames_of(host.out()) if f.type == DATA]
    assert sent[:3] == [output.id, control.id, output.id]


def test_streams_of_one_priority_take_turns() -> None:
    """In pieces of at most CHUNK."""
    host, guest = pair()
    streams = [opened(host, guest, OUTPUT)[0] for _ in range(3)]
    for stream in streams:
        stream.write(bytes(2 * CHUNK))
    sent = [(f.stream, len(f.payload)) for f in frames_of(host.out())]
    assert sent == [(stream.id, CHUNK) for _ in range(2) for stream in streams]


def test_small_writes_share_a_frame() -> None:
    """As many as fit; what does not fit stays whole for the next."""
    host, guest = pair()
    ours, _ = opened(host, guest)
    for size in (10, 20, CHUNK - 30, 40, CHUNK):
        ours.write(bytes(size))
    ours.write(b"")
    assert [len(f.payload) for f in frames_of(host.out())] == [CHUNK, 40, CHUNK]


def test_pump_gives_the_session_about_its_budget() -> None:
    """The rest stays where an urgent stream can still overtake it."""
    host, guest = pair()
    ours, _ = opened(host, guest)
    ours.write(bytes(10 * CHUNK))
    host.mux.pump(2 * CHUNK)
    assert ours.buffered == 8 * CHUNK
    host.mux.pump(0)
    assert ours.buffered == 8 * CHUNK


def test_a_producer_is_told_when_there_is_room_again() -> None:
    """Once, and only if it asked to be."""
    host, guest = pair()
    ours, _ = opened(host, guest)
    ours.write(bytes(HIGH_WATER))
    was_full = ours.full
    ours.waiting = True
    assert host.mux.pump(CHUNK) == [ours]
    assert (was_full, ours.full) == (True, False)
    assert host.mux.pump(CHUNK) == []
    ours.write(bytes(2 * HIGH_WATER))
    ours.waiting = True
    assert host.mux.pump(1) == []  # one piece is not enough


def test_a_full_session_leaves_data_with_the_streams() -> None:
    """While a link is away, no more than the replay buffer holds is taken from them."""
    host, guest = pair()
    streams = [opened(host, guest)[0] for _ in range(10)]
    host.session.detach()
    for stream in streams:
        stream.write(bytes(DEFAULT_WINDOW))
    host.mux.pump(PLENTY)
    assert REPLAY_LIMIT <= host.session.unacked_bytes <= REPLAY_LIMIT + CHUNK
    assert sum(stream.buffered for stream in streams) > 0


def test_the_end_of_a_session_closes_every_stream() -> None:
    """Without a word to the peer, which is not there."""
    host, guest = pair()
    streams = {opened(host, guest)[0] for _ in range(3)}
    for stream in streams:
        stream.write(b"queued")
    assert set(host.mux.close()) == streams
    assert all(stream.closed for stream in streams)
    assert host.mux.close() == []
    assert host.out() == b""


def test_too_many_streams_are_reset_not_held() -> None:
    """The limit is on what the peer has open; closing one makes room."""
    host, guest = pair()
    streams = [host.mux.open("kernel:hb", CONTROL) for _ in range(MAX_STREAMS + 1)]
    assert len(guest.feed(host.out())) == MAX_STREAMS
    (reset,) = host.feed(guest.out())
    assert reset == Reset(streams[-1], "too many streams")
    streams[0].reset("done")
    host.mux.open("kernel:hb", CONTROL)
    assert [type(e) for e in guest.feed(host.out())] == [Reset, Opened]


WRONG = {
    "an id of ours": raw(OPEN, 2, b"\x00x"),
    "an id twice": raw(OPEN, 1, b"\x00x"),
    "id zero": raw(OPEN, 0, b"\x00x"),
    "no priority": raw(OPEN, 3),
    "a priority that is none": raw(OPEN, 3, bytes([PRIORITIES])),
    "a target that is too long": raw(OPEN, 3, b"\x00" + b"x" * (MAX_TARGET + 1)),
    "data for a stream of theirs that never was": raw(DATA, 9, b"x"),
    "data for a stream of ours that never was": raw(DATA, 2, b"x"),
    "data for no stream": raw(DATA, 0, b"x"),
    "empty data": raw(DATA, 1),
    "credit of a wrong length": raw(CREDIT, 1, b"\x00\x01"),
    "more credit than there can be": raw(CREDIT, 1, MAX_WINDOW.to_bytes(4, "big")),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_peer_that_breaks_the_rules_ends_the_session(what: str) -> None:
    """Nothing of this can come from damage: checksums and numbers have been checked before."""
    host, guest = pair()
    opened(host, guest)
    with pytest.raises(WireError) as caught:
        guest.mux.receive(WRONG[what])
    assert caught.value.fatal


def test_more_data_than_credit_ends_the_session() -> None:
    """To the byte."""
    host, guest = pair()
    opened(host, guest)
    for _ in range(DEFAULT_WINDOW // CHUNK):
        guest.mux.receive(raw(DATA, 1, bytes(CHUNK)))
    with pytest.raises(WireError, match="DATA on stream 1 after FIN or beyond its credit"):
        guest.mux.receive(raw(DATA, 1, b"x"))


def test_nothing_comes_after_the_end() -> None:
    """Neither data nor a second end."""
    host, guest = pair()
    opened(host, guest)
    guest.mux.receive(raw(FIN, 1))
    with pytest.raises(WireError, match="after FIN"):
        guest.mux.receive(raw(DATA, 1, b"x"))
    with pytest.raises(WireError, match="second FIN"):
        guest.mux.receive(raw(FIN, 1))


def test_text_from_the_peer_is_made_readable() -> None:
    """Targets and reasons need not be UTF-8."""
    _, guest = pair()
    event = guest.mux.receive(raw(OPEN, 1, b"\x00\xff"))
    assert isinstance(event, Opened)
    assert event.target == "\ufffd"
    assert guest.mux.receive(raw(RESET, 1, b"\xff")) == Reset(event.stream, "\ufffd")


def test_what_the_peer_may_not_have_got_is_known_by_stream() -> None:
    """Data that waits for credit or for an acknowledgement; neither ends nor credits."""
    host, guest = pair()
    first, _ = opened(host, guest)
    second, _ = opened(host, guest)
    assert host.mux.undelivered() == []
    first.write(b"question")
    second.finish()
    assert host.mux.undelivered() == [first]
    sent = host.out()
    assert host.mux.undelivered() == [first]
    guest.feed(sent)
    guest.mux.open("x", BULK)  # whatever is said acknowledges
    host.feed(guest.out())
    assert host.mux.undelivered() == []


@pytest.mark.parametrize(
    ("type_", "payload"),
    [(CREDIT, b"\0\0\0\0"), (CREDIT, b"\0\0\0\1"), (BLOCKED, b""), (OPEN, b"\0x")],
)
def test_a_flood_without_data_ends_the_link(type_: int, payload: bytes) -> None:
    """Credits of nothing, and the like, are numbered as any frame, and move as little."""
    host, guest = pair()
    ours, _ = opened(host, guest)
    ids = range(2, 4 * SPARE_FRAMES, 2) if type_ == OPEN else [ours.id] * 2 * SPARE_FRAMES
    frames = [raw(type_, id_, payload) for id_ in ids]
    with pytest.raises(WireError, match="move nothing"):
        list(map(host.mux.receive, frames))


def test_data_for_streams_that_are_over_is_bounded_by_their_credit() -> None:
    """The peer may not have known yet; what it had no credit for it cannot have sent."""
    host, guest = pair()
    ours, _ = opened(host, guest)
    ours.reset("no more")
    for _ in range(DEFAULT_WINDOW // CHUNK):
        assert host.mux.receive(raw(DATA, ours.id, bytes(CHUNK))) is None
    with pytest.raises(WireError, match="DATA on closed streams") as caught:
        host.mux.receive(raw(DATA, ours.id, b"x"))
    assert caught.value.fatal
    with pytest.raises(WireError, match="move nothing"):
        list(map(host.mux.receive, [raw(FIN, ours.id)] * 2 * SPARE_FRAMES))


def test_a_window_is_narrowed_for_a_slow_reader_and_widened_again() -> None:
    """Credit is held back until no more is under way than the new window allows; when the reader
    keeps up again, it grows as before, as far as the reader says."""
    host, guest = pair()
    ours, theirs = opened(host, guest)
    ours.narrow(1)  # not below what each side may take for granted
    theirs.write(bytes(2 * DEFAULT_WINDOW))
    got = data_of(host.feed(guest.out()))
    assert len(got) == DEFAULT_WINDOW
    ours.consumed(DEFAULT_WINDOW - INITIAL_WINDOW)
    assert not [f for f in frames_of(host.out()) if f.type == CREDIT]
    ours.consumed(INITIAL_WINDOW)
    guest.feed(host.out())
    ours.widest = 2 * INITIAL_WINDOW
    more = host.feed(guest.out())
    assert len(data_of(more)) == INITIAL_WINDOW
    for _ in range(3):
        ours.consumed(len(data_of(more)))
        host.mux.receive(raw(BLOCKED, ours.id))
        guest.feed(host.out())
        more = host.feed(guest.out())
    assert ours._window == 2 * INITIAL_WINDOW
