"""Clients whose own connections the host hands to the agent."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from sandbox_kernel.guest.connector import ACCEPTED, CLIENTS
from sandbox_kernel.guest.endpoints import CHANNELS
from sandbox_kernel.guest.sessions import MAX_STRANGERS
from sandbox_kernel.wire.descriptors import send_with_descriptors
from tests.guest.agents import LIMIT, AgentProcess, Host, NewHost
from tests.helpers.waiting import wait_until

MIB = 2**20
HELLO = {"token": "token", "session": "one"}

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can look into the agent")

OpenCarrier = Callable[..., socket.socket]


@pytest.fixture
def open_carrier(agent: AgentProcess) -> Iterator[OpenCarrier]:
    """Runs a connector for clients; the host's end of its socket, on which ``hello`` was said."""
    with ExitStack() as stack:

        def open_(hello: object = HELLO) -> socket.socket:
            read, write = agent.connect(codec=CLIENTS)
            carrier = stack.enter_context(socket.socket(fileno=read))
            stack.enter_context(socket.socket(fileno=write)).close()
            carrier.settimeout(LIMIT)
            if hello is not None:
                carrier.sendall(json.dumps(hello).encode() + b"\n")
            return carrier

        yield open_


@pytest.fixture
def carrier(host: Host, open_carrier: OpenCarrier) -> socket.socket:
    """One that the agent has accepted."""
    carrier = open_carrier()
    assert carrier.recv(10) == ACCEPTED
    return carrier


def hand_over(carrier: socket.socket, channel: str = "shell") -> socket.socket:
    """A client's end of a connection that the agent has got."""
    ours, theirs = socket.socketpair()
    with theirs:
        send_with_descriptors(carrier, bytes([CHANNELS.index(channel)]), [theirs.fileno()])
    ours.settimeout(LIMIT)
    return ours


def receive(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := client.recv(MIB)):
        data += piece
    return data


@pytest.mark.parametrize("channel", CHANNELS)
def test_each_channel(host: Host, carrier: socket.socket, channel: str) -> None:
    """The client talks with the kernel's socket of that name, before and after it listens."""
    with hand_over(carrier, channel) as early:
        early.sendall(b"hello")
        host.launch()
        greeting = channel.encode() + b"\n"
        assert receive(early, len(greeting) + 5) == greeting + b"hello"
        with hand_over(carrier, channel) as late:
            late.sendall(b"me, too")
            assert receive(late, len(greeting) + 7) == greeting + b"me, too"


def test_much_passes_unchanged(host: Host, carrier: socket.socket) -> None:
    """More than all buffers on the way hold, in both directions, for a client that reads late: the
    kernel and the client wait for each other."""
    host.launch()
    sent = bytes(range(256)) * (32 * 1024)
    with hand_over(carrier) as client:
        assert receive(client, 6) == b"shell\n"
        sender = threading.Thread(target=client.sendall, args=(sent,))
        sender.start()
        wait_until(lambda: not writable(client), "nothing more is taken")
        assert receive(client, len(sent)) == sent
        sender.join(LIMIT)


def writable(sock: socket.socket) -> bool:
    return bool(select.select([], [sock], [], 0)[1])


@root
def test_a_client_that_leaves(host: Host, carrier: socket.socket) -> None:
    """Its connection to the kernel ends, and others stay."""
    host.launch()
    before = sockets_of(host)
    with hand_over(carrier):
        pass
    with hand_over(carrier) as stays:
        assert receive(stays, 6) == b"shell\n"
        with hand_over(carrier) as leaves:
            assert receive(leaves, 6) == b"shell\n"
        stays.sendall(b"still here")
        assert receive(stays, 10) == b"still here"
    wait_until(lambda: sockets_of(host) == before, "both connections are closed")


def sockets_of(host: Host) -> int:
    """How many sockets the agent has. It is not dumpable, so only root can look."""
    folder = f"/proc/{host.agent.process.pid}/fd"
    return sum(os.readlink(f"{folder}/{fd}").startswith("socket:") for fd in os.listdir(folder))


def test_a_kernel_that_ends_takes_its_clients_along(host: Host, carrier: socket.socket) -> None:
    """This kernel does not speak ZMTP, so no later one could go on with its connections."""
    host.launch()
    with hand_over(carrier) as client:
        assert receive(client, 6) == b"shell\n"
        client.sendall(b"exit 3")
        assert receive(client, 1) == b""
    assert host.event()["exit_code"] == 3


@root
def test_clients_end_with_their_carrier(host: Host, carrier: socket.socket) -> None:
    """The host's process has ended: clients see that, and nothing of them stays."""
    host.launch()
    before = sockets_of(host)
    with hand_over(carrier) as client:
        assert receive(client, 6) == b"shell\n"
        carrier.close()
        assert receive(client, 1) == b""
    wait_until(lambda: sockets_of(host) == before - 1, "all is closed, and the carrier")


@pytest.mark.parametrize("running", [True, False])
def test_clients_end_with_their_session(
    new_host: NewHost, host: Host, carrier: socket.socket, running: bool
) -> None:
    """Another host takes the sandbox over."""
    if running:
        host.launch()
    with hand_over(carrier) as client:
        if running:
            assert receive(client, 6) == b"shell\n"
        new_host("two").connect()
        assert receive(client, 1) == b""
    assert carrier.recv(1) == b""


def test_a_host_has_one_carrier(
    host: Host, carrier: socket.socket, open_carrier: OpenCarrier
) -> None:
    """A second one replaces the first."""
    second = open_carrier()
    assert second.recv(10) == ACCEPTED
    assert carrier.recv(1) == b""
    host.launch()
    with hand_over(second) as client:
        assert receive(client, 6) == b"shell\n"


@pytest.mark.parametrize(
    "hello",
    [
        *({**HELLO, "token": "guess"}, {**HELLO, "session": "two"}, {"session": "one"}),
        *({"token": "token"}, {}, [], "token", None, 1, {**HELLO, "token": None}),
        *({**HELLO, "token": "\u00e9"}, {**HELLO, "session": ["one"]}),
    ],
    ids=str,
)
def test_strangers_are_refused(host: Host, open_carrier: OpenCarrier, hello: object) -> None:
    """Anything in the sandbox can reach the agent's socket, and must not become the one to whom
    the host's clients go, or end the present one."""
    carrier = open_carrier(None)
    carrier.sendall(json.dumps(hello).encode() + b"\n")
    assert carrier.recv(10) == b""
    assert open_carrier().recv(10) == ACCEPTED


def test_before_any_session(agent: AgentProcess, open_carrier: OpenCarrier) -> None:
    """Nobody has a token yet, so there is none to know."""
    for hello in (HELLO, {"token": "", "session": ""}):
        assert open_carrier(hello).recv(10) == b""


@pytest.mark.parametrize("said", [b"x" * 100_000, b"[" * 50_000 + b"\n", b'{"token": "t"}\nmore'])
def test_nonsense_ends_a_carrier(host: Host, open_carrier: OpenCarrier, said: bytes) -> None:
    """However long it is."""
    carrier = open_carrier(None)
    try:
        carrier.sendall(said)
        assert carrier.recv(10) == b""
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert host.call("info")["version"]


def test_few_strangers_are_kept(host: Host, open_carrier: OpenCarrier) -> None:
    """Carriers that say nothing do not fill the agent's table of descriptors."""
    carriers = []
    for _ in range(MAX_STRANGERS + 2):
        carriers.append(open_carrier(None))
        host.agent.connectors[-1].wait(LIMIT)
    assert [carrier.recv(1) for carrier in carriers[:2]] == [b"", b""]
    carriers[-1].sendall(json.dumps(HELLO).encode() + b"\n")
    assert carriers[-1].recv(10) == ACCEPTED


def test_only_unix_sockets_and_known_channels(host: Host, carrier: socket.socket) -> None:
    """What else comes is closed, and the carrier goes on."""
    host.launch()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=LIMIT) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            send_with_descriptors(carrier, b"\0", [accepted.fileno()])
        assert client.recv(1) == b""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            send_with_descriptors(carrier, b"\xff", [theirs.fileno()])
        ours.settimeout(LIMIT)
        assert ours.recv(1) == b""
    with open(os.devnull) as file:
        send_with_descriptors(carrier, b"\0", [file.fileno()])
    carrier.sendall(b"\0\0\0")  # without descriptors
    with hand_over(carrier) as client:
        assert receive(client, 6) == b"shell\n"
