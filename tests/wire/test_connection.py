"""Connections: the two ends of a link, from the first byte on, without I/O."""

from __future__ import annotations

import pytest

from sandbox_kernel.wire import VERSION, WireError
from sandbox_kernel.wire.codec import BASE64, CODECS, PREAMBLE, RAW
from sandbox_kernel.wire.connection import (
    BYTES_A_TURN,
    FRAMES_A_TURN,
    SEND_TURN,
    AgentConnection,
    Connection,
    HostConnection,
)
from sandbox_kernel.wire.frames import (
    ACK,
    DATA,
    HEADER_SIZE,
    MAX_PAYLOAD,
    PING,
    Frame,
    FrameDecoder,
    encode,
)
from sandbox_kernel.wire.handshake import (
    REFUSALS,
    Hello,
    Refuse,
    Welcome,
    encode_message,
)
from sandbox_kernel.wire.mux import BULK, HIGH_WATER, URGENT, Data, Mux, Opened
from sandbox_kernel.wire.session import FRAME_BURST, FRAMES_A_SECOND, Session
from tests.wire.sides import HI, PLENTY, data_of, shaken_hands, welcomed

WELCOME = encode_message(Welcome(VERSION, HI.session, 0))
REFUSED = Refuse("token", REFUSALS["token"])


def mux(*, host: bool) -> Mux:
    return Mux(Session(), host=host)


def carry(sender: Connection, receiver: Connection) -> list[object]:
    """One turn of a link that works, in one direction."""
    receiver.receive_data(b"".join(sender.data_to_send(PLENTY)))
    return list(receiver.events(0.0))


@pytest.mark.parametrize("codec", CODECS)
def test_from_hello_to_data(codec: str) -> None:
    """Each side's bytes are the other's events."""
    host, guest = mux(host=True), mux(host=False)
    ours, theirs = HostConnection(host, HI, codec), AgentConnection(codec)
    stream = host.open("x", BULK)
    stream.write(b"question")
    (hello,) = carry(ours, theirs)
    assert hello == HI
    assert isinstance(hello, Hello)
    theirs.accept(guest, hello, 0.0)
    ours.receive_data(PREAMBLE)
    assert carry(theirs, ours) == [Welcome(VERSION, HI.session, 0)]
    opened, data = carry(ours, theirs)
    assert isinstance(opened, Opened)
    assert isinstance(data, Data)
    assert (opened.target, bytes(data.payload)) == ("x", b"question")
    assert carry(theirs, ours) == []  # a CREDIT is the core's own affair


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("codec", CODECS)
def test_bytes_may_be_cut_anywhere(codec: str, size: int) -> None:
    """The events are the same, also those of the handshake."""
    host, guest = mux(host=True), mux(host=False)
    ours, theirs = HostConnection(host, HI, codec), AgentConnection(codec)
    for byte in b"".join(ours.data_to_send(PLENTY)):
        theirs.receive_data(bytes([byte]))
    (hello,) = theirs.events(0.0)
    assert isinstance(hello, Hello)
    theirs.accept(guest, hello, 0.0)
    guest.open("y", URGENT).write(b"news")
    sent = b"banner" + PREAMBLE + b"".join(theirs.data_to_send(PLENTY))
    events: list[object] = []
    for at in range(0, len(sent), size):
        ours.receive_data(sent[at : at + size])
        events += ours.events(0.0)
    assert [type(event) for event in events] == [Welcome, Opened, Data]


def test_a_host_says_how_far_it_has_received() -> None:
    """And the agent sends only what is missing."""
    host, guest = mux(host=True), mux(host=False)
    ours, theirs = shaken_hands(host, guest)
    guest.open("x", BULK).write(b"first")
    carry(theirs, ours)
    guest.open("y", BULK)
    theirs.data_to_send(PLENTY)  # lost with its link
    ours, theirs = shaken_hands(host, guest)
    (opened,) = ours.events(0.0)
    assert isinstance(opened, Opened)
    assert opened.target == "y"


def test_a_refusal_is_the_first_and_last_event() -> None:
    """The session is untouched, and may be tried again."""
    host = mux(host=True)
    host.open("x", BULK)
    ours, theirs = HostConnection(host, HI, RAW), AgentConnection(RAW)
    assert carry(ours, theirs) == [HI]
    assert list(theirs.events(0.0)) == []
    theirs.refuse("token")
    assert theirs.data_to_send(PLENTY) == [encode_message(REFUSED)]
    ours.receive_data(PREAMBLE + encode_message(REFUSED) + encode(Frame(ACK, 0, 0, 0, b"")))
    assert list(ours.events(0.0)) == [REFUSED]
    assert ours.data_to_send(PLENTY) == []
    assert not host.session.attached


def test_the_banner_explains_a_connector_that_failed() -> None:
    """What came before, or instead of, the preamble."""
    ours = HostConnection(mux(host=True), HI, RAW)
    ours.receive_data(b"sh: python3: not found\n")
    assert list(ours.events(0.0)) == []
    assert ours.banner == b"sh: python3: not found\n"
    assert welcomed(mux(host=True)).banner == b""


@pytest.mark.parametrize(
    "welcome", [Welcome(VERSION + 1, HI.session, 0), Welcome(VERSION, "another", 0)]
)
def test_a_welcome_must_fit_its_hello(welcome: Welcome) -> None:
    """There is no negotiation: host and guest program are shipped together."""
    ours = HostConnection(mux(host=True), HI, RAW)
    ours.receive_data(PREAMBLE + encode_message(welcome))
    with pytest.raises(WireError, match="another session or protocol version") as caught:
        list(ours.events(0.0))
    assert caught.value.fatal


def test_an_acknowledgement_in_the_handshake_must_fit_the_session() -> None:
    """Neither side goes on with a peer that has what was never sent."""
    with pytest.raises(WireError, match="never sent"):
        welcomed(mux(host=True), received=99)
    theirs = AgentConnection(RAW)
    theirs.receive_data(encode_message(HI))
    list(theirs.events(0.0))
    with pytest.raises(WireError, match="never sent"):
        theirs.accept(mux(host=False), HI._replace(received=99), 0.0)
    assert theirs.data_to_send(PLENTY) == [WELCOME]


def test_a_host_waits_for_the_answer() -> None:
    """It sends nothing behind HELLO; but a stream may deliver that twice."""
    theirs = AgentConnection(RAW)
    theirs.receive_data(encode_message(HI) * 2)
    assert list(theirs.events(0.0)) == [HI]
    theirs = AgentConnection(RAW)
    theirs.receive_data(encode_message(HI) + encode(Frame(PING, 0, 0, 0, b"")))
    with pytest.raises(WireError, match="before WELCOME") as caught:
        list(theirs.events(0.0))
    assert caught.value.fatal


def test_checksums_are_used_if_the_host_asks_for_them() -> None:
    """By both sides."""
    for checked in (True, False):
        host, guest = mux(host=True), mux(host=False)
        for sender in shaken_hands(host, guest, checked=checked):
            assert sender.mux is not None
            sender.mux.open("x", BULK).write(b"y")
            header, *_ = sender.data_to_send(PLENTY)
            assert header[9] == checked
    with pytest.raises(NotImplementedError):
        Connection(RAW)._handshake(Frame(PING, 0, 0, 0, b""), 0.0)


def test_a_frame_counts_as_received_when_its_event_is_given() -> None:
    """A caller that stops gets the rest again on the next link."""
    host = mux(host=True)
    stream = host.open("x", BULK)
    frames = b"".join(encode(Frame(DATA, stream.id, n, 0, b"x")) for n in (1, 2))
    ours = welcomed(host, behind=encode(Frame(PING, 0, 0, 0, b"")) + frames)
    next(ours.events(0.0))  # PING makes none
    assert host.session.received == 1
    assert ours.more


def test_a_link_full_of_frames_is_handled_in_turns() -> None:
    """Many short ones, or fewer long ones; then with pauses."""
    host = mux(host=True)
    stream = host.open("x", BULK)
    short = FRAMES_A_TURN * 20
    frames = b"".join(encode(Frame(DATA, stream.id, n + 1, 0, b"x")) for n in range(short))
    ours = welcomed(host, behind=frames)
    handled = 0
    while ours.more:
        count = len(list(ours.events(0.0)))
        assert 0 < count <= FRAMES_A_TURN
        handled += count
        assert ours.pause == pytest.approx(max(0.0, handled - FRAME_BURST) / FRAMES_A_SECOND)
    assert handled == short
    assert ours.pause > 0
    list(ours.events(1.0))
    assert ours.pause == 0.0

    host = mux(host=True)
    stream = host.open("x", BULK)
    stream.widen(2 * BYTES_A_TURN)
    long = BYTES_A_TURN // MAX_PAYLOAD + 1
    payload = bytes(MAX_PAYLOAD)
    frames = b"".join(encode(Frame(DATA, stream.id, n + 1, 0, payload)) for n in range(long))
    ours = welcomed(host, behind=frames)
    assert len(data_of(list(ours.events(0.0)))) == BYTES_A_TURN  # type: ignore[arg-type]
    assert ours.more
    assert len(list(ours.events(0.0))) == 1
    assert not ours.more


def test_little_is_sent_at_a_time_and_what_is_urgent_first() -> None:
    """What has been given to the link cannot be overtaken; producers hear of room."""
    host = mux(host=True)
    bulk = host.open("bulk", BULK)
    ours = welcomed(host)
    ours.data_to_send(PLENTY)
    bulk.write(bytes(HIGH_WATER))
    bulk.waiting = True
    other = host.open("other", BULK)
    other.write(b"later")
    first = b"".join(ours.data_to_send(PLENTY))
    assert SEND_TURN < len(first) <= SEND_TURN + 16 * HEADER_SIZE
    assert ours.resumed == [bulk]
    other.write(b"and later")
    host.open("urgent", URGENT).write(b"now")
    payloads = [bytes(f.payload) for f in FrameDecoder().feed(b"".join(ours.data_to_send(PLENTY)))]
    assert payloads[-2:] == [b"now", b"and later"]
    assert ours.resumed == []


@pytest.mark.parametrize("preamble", [True, False])
def test_a_session_of_one_link_needs_no_handshake(preamble: bool) -> None:
    """Its first bytes are frames, behind the preamble if it has one."""
    host, guest = mux(host=True), mux(host=False)
    ours = Connection.without_handshake(host, BASE64, 0.0, preamble=preamble)
    theirs = Connection.without_handshake(guest, BASE64, 0.0)
    if preamble:
        ours.receive_data(b"banner" + PREAMBLE)
    guest.open("x", BULK)
    (opened,) = carry(theirs, ours)
    assert isinstance(opened, Opened)


def test_damage_ends_the_link_only() -> None:
    """A new one and a replay mend it."""
    for codec, damage in ((RAW, bytes(64)), (BASE64, b"!\n")):
        ours = HostConnection(mux(host=True), HI, codec)
        with pytest.raises(WireError) as caught:
            ours.receive_data(PREAMBLE + damage)
        assert not caught.value.fatal
