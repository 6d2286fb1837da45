"""The session: frames arrive once and in order, whatever happens to the links."""

from __future__ import annotations

import pytest

from sandbox_kernel.wire import WireError
from sandbox_kernel.wire.frames import (
    ACK,
    DATA,
    FIN,
    HELLO,
    MAX_PAYLOAD,
    OPEN,
    PING,
    PONG,
    REFUSE,
    WELCOME,
    Frame,
)
from sandbox_kernel.wire.session import (
    ACK_BYTES,
    ACK_FRAMES,
    DEAD_AFTER,
    MAX_FLOODS,
    MAX_UNACKED_FRAMES,
    PING_AFTER,
    REPLAY_LIMIT,
    SPARE_A_SECOND,
    SPARE_FRAMES,
    Session,
)
from tests.wire.sides import frames_of

NOW = 0.0


def attached(peer_received: int = 0) -> Session:
    session = Session()
    session.attach(peer_received, NOW)
    return session


def taken(session: Session) -> list[Frame]:
    """What the session puts on its link now, as frames."""
    assert session.pending
    frames = frames_of(b"".join(session.take()))
    assert session.take() == []
    return frames


def numbers(frames: list[Frame]) -> list[int]:
    return [frame.seq for frame in frames]


def data(seq: int, payload: bytes = b"x", ack: int = 0) -> Frame:
    return Frame(DATA, 1, seq, ack, payload)


def test_frames_are_numbered_from_one_and_carry_what_was_received() -> None:
    """Acknowledgements ride on whatever is sent."""
    session = attached()
    session.send(OPEN, 1, b"\x00control")
    session.send(FIN, 1)
    session.receive(data(1), NOW)
    assert taken(session) == [Frame(OPEN, 1, 1, 1, b"\x00control"), Frame(FIN, 1, 2, 1, b"")]


def test_nothing_is_pending_without_a_link() -> None:
    """What is queued meanwhile goes out on the next link."""
    session = Session()
    session.send(DATA, 1, b"early")
    assert not session.pending
    session.attach(0, NOW)
    assert numbers(taken(session)) == [1]


def test_a_new_link_begins_where_the_peer_left_off() -> None:
    """What the peer has is dropped, the rest is sent again, in order."""
    session = attached()
    for payload in (b"a", b"b", b"c"):
        session.send(DATA, 1, payload)
    assert numbers(taken(session)) == [1, 2, 3]
    session.detach()
    session.send(DATA, 1, b"d")
    session.attach(1, NOW)
    assert [frame.payload for frame in taken(session)] == [b"b", b"c", b"d"]
    assert session.unacked_bytes == 3


def test_frames_are_kept_until_they_are_acknowledged() -> None:
    """Any frame of the peer's can carry the acknowledgement."""
    session = attached()
    session.send(DATA, 1, b"12345")
    session.send(DATA, 1, b"678")
    taken(session)
    assert session.unacked_bytes == 8
    assert not session.receive(Frame(ACK, 0, 0, 1, b""), NOW)
    assert session.unacked_bytes == 3
    session.receive(data(1, ack=2), NOW)
    assert session.unacked_bytes == 0


def test_a_frame_that_comes_twice_is_new_once() -> None:
    """A link that was cut may have delivered what is then replayed."""
    session = attached()
    assert session.receive(data(1), NOW)
    assert not session.receive(data(1), NOW)
    assert session.receive(data(2), NOW)
    assert session.received == 2


def test_a_gap_ends_the_link_but_not_the_session() -> None:
    """Bytes were lost; a replay brings them."""
    session = attached()
    with pytest.raises(WireError, match="frame 2 follows frame 0") as caught:
        session.receive(data(2), NOW)
    assert not caught.value.fatal


def test_an_acknowledgement_from_the_future_ends_the_session() -> None:
    """On a frame, and in a handshake."""
    session = attached()
    session.send(DATA, 1, b"x")
    for wrong in (lambda: session.receive(data(1, ack=2), NOW), lambda: session.attach(2, NOW)):
        with pytest.raises(WireError, match="never sent") as caught:
            wrong()
        assert caught.value.fatal


def test_a_peer_cannot_forget_what_it_acknowledged() -> None:
    """What it wants again is gone; a silent gap would follow. All is as before otherwise."""
    session = attached()
    for _ in range(3):
        session.send(DATA, 1, b"x")
    session.attach(2, NOW)
    with pytest.raises(WireError, match="has lost frames") as caught:
        session.attach(1, NOW)
    assert caught.value.fatal
    session.attach(3, NOW)
    with pytest.raises(WireError, match="has lost frames"):
        session.attach(2, NOW)


@pytest.mark.parametrize(
    ("payload", "count"), [(b"", ACK_FRAMES), (bytes(MAX_PAYLOAD), ACK_BYTES // MAX_PAYLOAD)]
)
def test_a_one_sided_flow_is_acknowledged_now_and_then(payload: bytes, count: int) -> None:
    """After so many bytes or frames an ACK goes out by itself, once."""
    session = attached()
    for seq in range(1, count):
        session.receive(data(seq, payload), NOW)
    assert not session.pending
    session.receive(data(count, payload), NOW)
    assert taken(session) == [Frame(ACK, 0, 0, count, b"")]


def test_no_ack_of_its_own_when_something_else_goes_out() -> None:
    """A numbered frame says it as well."""
    session = attached()
    for seq in range(1, ACK_FRAMES + 1):
        session.receive(data(seq), NOW)
    session.send(DATA, 1, b"answer")
    assert taken(session) == [Frame(DATA, 1, 1, ACK_FRAMES, b"answer")]


def test_a_full_replay_buffer_takes_no_more_data() -> None:
    """Memory is bounded while a link is away: by bytes, and by frames."""
    session = Session()
    for _ in range(REPLAY_LIMIT // MAX_PAYLOAD):
        assert session.room
        session.send(DATA, 1, bytes(MAX_PAYLOAD))
    assert session.unacked_bytes == REPLAY_LIMIT
    session.attach(1, NOW)
    assert session.room

    session = Session()
    for _ in range(MAX_UNACKED_FRAMES // 2):
        assert session.room
        session.send(DATA, 1, b"x")
    assert not session.room


def test_a_peer_that_acknowledges_nothing_is_given_up() -> None:
    """Small frames are always taken, but not for ever."""
    session = attached()
    for _ in range(MAX_UNACKED_FRAMES):
        session.send(FIN, 1)
    session.receive(data(1), NOW)
    session.send(FIN, 1)
    with pytest.raises(WireError, match="frames unacknowledged") as caught:
        session.receive(data(2), NOW)
    assert caught.value.fatal


def test_a_ping_is_answered_with_its_payload() -> None:
    """Ahead of everything else, and not numbered."""
    session = attached()
    session.send(DATA, 1, b"x")
    session.receive(Frame(PING, 0, 0, 0, b"tick"), NOW)
    session.receive(Frame(PING, 0, 0, 0, b""), NOW)
    pong, empty_pong, other = taken(session)
    assert pong == Frame(PONG, 0, 0, 0, b"tick")
    assert empty_pong == Frame(PONG, 0, 0, 0, b"")
    assert other.type == DATA


def test_no_empty_buffer_is_given_to_the_link() -> None:
    """Writing nothing cannot be told from a link that takes nothing."""
    session = attached()
    session.receive(Frame(PING, 0, 0, 0, b""), NOW)
    session.send(FIN, 1)
    buffers = session.take()
    assert buffers
    assert all(buffers)


def test_the_answers_to_a_flood_of_pings_are_bounded() -> None:
    """Those beyond a few are not answered."""
    session = attached()
    for _ in range(1000):
        session.receive(Frame(PING, 0, 0, 0, bytes(MAX_PAYLOAD)), NOW)
    assert len(taken(session)) == 8


def test_what_belongs_to_a_link_ends_with_it() -> None:
    """A PONG on another link would answer nothing."""
    session = attached()
    session.receive(Frame(PING, 0, 0, 0, b""), NOW)
    session.detach()
    session.attach(0, NOW)
    assert not session.pending


@pytest.mark.parametrize("kind", [HELLO, WELCOME])
def test_a_handshake_that_is_delivered_twice_is_ignored(kind: int) -> None:
    """A stream may repeat itself; numbers tell for session frames, the type for these."""
    assert not attached().receive(Frame(kind, 0, 0, 0, b"{}"), NOW)


def test_a_refusal_after_the_handshake_ends_the_session() -> None:
    """It comes as the answer to HELLO, or not at all."""
    with pytest.raises(WireError, match="REFUSE after") as caught:
        attached().receive(Frame(REFUSE, 0, 0, 0, b"{}"), NOW)
    assert caught.value.fatal


def test_a_silent_link_is_asked_and_then_given_up() -> None:
    """One PING in each PING_AFTER of silence; any frame is a sign of life."""
    session = attached()
    assert session.check_alive(PING_AFTER - 1)
    assert not session.pending
    assert session.check_alive(PING_AFTER)
    assert taken(session) == [Frame(PING, 0, 0, 0, b"")]
    assert session.check_alive(PING_AFTER + 1)
    assert not session.pending

    session.receive(Frame(PONG, 0, 0, 0, b""), 2 * PING_AFTER)
    assert session.check_alive(2 * PING_AFTER + DEAD_AFTER - 1)
    assert not session.check_alive(2 * PING_AFTER + DEAD_AFTER)


def test_how_long_the_link_takes() -> None:
    """The PING precedes queued data. ``measure`` returns its time once, and sends the next."""
    session = attached()
    session.send(DATA, 1, b"x")
    assert session.measure(1.0) is None
    ping, other = taken(session)
    assert (ping.type, other.type) == (PING, DATA)
    session.receive(Frame(PONG, 0, 0, 0, b"another"), 1.25)
    assert session.measure(1.25) is None
    assert not session.pending
    session.receive(Frame(PONG, 0, 0, 0, ping.payload), 1.5)
    assert session.measure(1.5) == 0.5
    assert taken(session) == [ping]
    session.receive(Frame(PONG, 0, 0, 0, ping.payload), 1.501)
    assert session.measure(1.502) == pytest.approx(0.001)
    assert session.measure(1.503) is None
    assert not session.pending  # not so soon


def test_a_measurement_ends_with_its_link() -> None:
    """The PONG of a lost link never comes. The next link sends a PING of its own."""
    session = attached()
    assert session.measure(1.0) is None
    assert len(taken(session)) == 1
    session.detach()
    assert session.measure(2.0) is None
    session.attach(0, 3.0)
    assert not session.pending
    assert session.measure(3.0) is None
    (ping,) = taken(session)
    assert ping.type == PING


def test_checksums_of_payloads_are_a_matter_of_the_link() -> None:
    """The replay of a frame may have one where the first sending had none."""
    session = Session()
    session.attach(0, NOW, checked=False)
    session.send(DATA, 1, b"x")
    unchecked = b"".join(session.take())
    session.attach(0, NOW, checked=True)
    checked = b"".join(session.take())
    assert unchecked != checked
    assert frames_of(unchecked) == frames_of(checked)


def flooded(session: Session, frame: Frame, now: float = NOW) -> tuple[int, WireError]:
    """How many such frames the session takes, and how it ends."""
    for number in range(100 * SPARE_FRAMES):
        try:
            session.receive(frame, now)
        except WireError as error:
            return number, error
    raise AssertionError("it takes them for ever")


@pytest.mark.parametrize("type_", [ACK, PING, PONG, WELCOME, DATA])
def test_frames_that_move_nothing_end_the_link_and_then_the_session(type_: int) -> None:
    """A peer that only acknowledges, pings or repeats itself costs time and brings nothing."""
    session = attached()
    assert session.receive(data(1), NOW)
    useless = Frame(type_, 0, 1 if type_ == DATA else 0, 0, b"")
    for attempt in range(MAX_FLOODS + 1):
        count, error = flooded(session, useless)
        assert count == SPARE_FRAMES
        assert "move nothing" in str(error)
        assert error.fatal == (attempt == MAX_FLOODS)
        session.detach()
        session.attach(0, NOW)


def test_what_moves_something_allows_for_a_frame_that_does_not() -> None:
    """A stream that delivers everything twice, pings as time goes by, and acknowledgements of
    what was sent meanwhile are all well."""
    session = attached()
    for number in range(1, 3 * SPARE_FRAMES):
        assert session.receive(data(number), NOW)
        assert not session.receive(data(number), NOW)
    for number in range(3 * SPARE_FRAMES):
        session.receive(Frame(PING, 0, 0, 0, b""), number / SPARE_A_SECOND)
        session.take()
    now = 3 * SPARE_FRAMES / SPARE_A_SECOND
    for number in range(1, 3 * SPARE_FRAMES):
        session.send(FIN, 1)
        session.receive(Frame(ACK, 0, 0, number, b""), now)
