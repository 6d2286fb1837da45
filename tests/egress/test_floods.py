"""Programs that ask the ways out for more than they have: the sandbox's other programs go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.egress.jail import Jail, running_jail

pytestmark = pytest.mark.slow

GET = b"GET http://x.many.example/ HTTP/1.1\r\nHost: x.many.example\r\nConnection: close\r\n\r\n"


@pytest.fixture
def jail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Jail]:
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path))
    with running_jail("*.many.example", monkeypatch=monkeypatch) as jail:
        yield jail
        assert jail.talk(GET).status == 502, "served, though no server has that name"
        assert jail.kernel.tunnel.reconnects == 0
        assert jail.kernel.tunnel.failure is None


def test_names_and_connections_without_end(jail: Jail) -> None:
    """What moves nothing is bounded in the sandbox already: the host would end the session."""
    script = """
import socket, struct
resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
resolver.connect(("127.0.0.1", 53))
resolver.setblocking(False)
answers = 0
for number in range(30_000):
    label = b"n%d" % number
    name = bytes([len(label)]) + label + b"\\6denied\\7example\\0"
    try:
        resolver.send(struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + name + b"\\0\\1\\0\\1")
    except OSError:
        pass
    try:
        while resolver.recv(4096):
            answers += 1
    except OSError:
        pass
connections = 0
for _ in range(200):
    with socket.create_connection(("127.0.0.1", 3128), timeout=60):
        connections += 1
print(answers > 1000, connections)
"""
    assert jail.python(script) == "True 200\n"


def test_more_names_than_there_are_addresses(jail: Jail) -> None:
    """Those that have one keep it; the others are an error of the resolver, at once."""
    script = """
import socket
def address(number):
    try:
        return socket.gethostbyname("n%d.many.example" % number)
    except socket.gaierror as error:
        return error.errno
found = [address(number) for number in range(1100)]
known = [one for one in found if isinstance(one, str)]
print(len(known) > 100, len(set(known)) == len(known))
print(set(found) - set(known) == {socket.EAI_AGAIN})
print([address(number) for number in range(50)] == found[:50])
with socket.create_connection((known[-1], 443), timeout=60):
    print("the last one is served")
"""
    assert jail.python(script).splitlines() == [
        *("True True", "True", "True", "the last one is served")
    ]


def test_the_agents_ports_cannot_be_taken(jail: Jail) -> None:
    script = """
import socket
for kind, port in ((socket.SOCK_STREAM, 3128), (socket.SOCK_DGRAM, 53)):
    for address in ("127.0.0.1", "0.0.0.0"):
        sock = socket.socket(socket.AF_INET, kind)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            sock.bind((address, port))
            if kind == socket.SOCK_STREAM:
                sock.listen()
            print("taken", address, port)
        except OSError as error:
            print(error.strerror)
"""
    assert jail.python(script).splitlines() == ["Address already in use"] * 4
