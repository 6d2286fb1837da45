"""What may not pass, tried from inside a real jail: through the proxy's port as HTTP and as SOCKS,
and by name, with plain sockets that say what no honest program says."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.service import Limits
from tests.egress.jail import Answer, Jail, running_jail
from tests.helpers.named_hosts import NamedHosts, listening, port_of, serve_with_threads
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

RULES = (
    *("a.example", "b.example", "rebinding.example", "*.many.example", "proxy.example:8080"),
    *("tls.example:443", "endless.example", "half.example:7"),
)


class Origin:
    """A server that keeps what it gets, and answers each head of a request."""

    def __init__(self) -> None:
        self.received = b""

    def __call__(self, connection: socket.socket) -> None:
        rest = b""
        while data := connection.recv(65536):
            self.received += data
            rest += data
            while b"\r\n\r\n" in rest:
                rest = rest.partition(b"\r\n\r\n")[2]
                connection.sendall(ANSWER)


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
MOVED = b"HTTP/1.1 302 Moved\r\nLocation: http://denied.example/\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(scope="module")
def origin() -> Origin:
    return Origin()


@pytest.fixture(scope="module")
def jail(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jail]:
    """All tests of this module share it."""
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.ExitStack() as stack:
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        hosts = NamedHosts(monkeypatch)

        def serve(handle: Callable[[socket.socket], object], *places: tuple[str, int]) -> None:
            sock = stack.enter_context(listening())
            serve_with_threads(handle, sock)
            for name, port in places:
                hosts.add(name, port, port_of(sock))

        serve(origin, ("a.example", 80), ("a.example", 443), ("b.example", 80), ("b.example", 443))
        serve(origin, ("rebinding.example", 80), ("rebinding.example", 443), ("tls.example", 443))
        serve(lambda s: s.sendall(s.recv(65536)), ("proxy.example", 8080))
        yield stack.enter_context(running_jail(*RULES, monkeypatch=monkeypatch, hosts=hosts))


@pytest.fixture(autouse=True)
def fresh(jail: Jail, origin: Origin) -> None:
    origin.received = b""
    jail.hosts.looked_up.clear()
    jail.hosts.dialled.clear()


# --- how the ways speak


def connect(host: str, inside: bytes = b"") -> bytes:
    return f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1") + inside


def get(url: str, *headers: str, method: str = "GET") -> bytes:
    """A request with a whole URL, or with a path and a Host header among the others."""
    host = url.partition("://")[2].partition("/")[0]
    hosts = [f"Host: {host}"] if host else []
    lines = (f"{method} {url} HTTP/1.1", *hosts, *headers, "", "")
    return "\r\n".join(lines).encode("latin-1")


CLOSE = "Connection: close"


def socks(host: bytes, port: int, kind: int = 3, inside: bytes = b"") -> bytes:
    named = bytes([len(host)]) + host if kind == 3 else host
    return b"\5\1\0" + b"\5\1\0" + bytes([kind]) + named + port.to_bytes(2, "big") + inside


def is_refused(answer: Answer) -> bool:
    """By any of the ways, and nothing of a server came back."""
    assert b"hello" not in answer.data
    if answer.data.startswith(b"\5\0"):
        return answer.data[3:4] not in (b"", b"\0")
    if answer.data:
        return answer.status in (400, 403, 421)
    return answer.end in ("ConnectionResetError", "ConnectionRefusedError", "gaierror")


# --- addresses

FORBIDDEN = {
    "private": "10.0.0.1",
    "also private": "192.168.1.1",
    "loopback": "127.0.0.1",
    "loopback of IPv6": "::1",
    "link-local": "169.254.1.1",
    "link-local of IPv6": "fe80::1",
    "multicast": "224.0.0.1",
    "metadata": "169.254.169.254",
    "metadata of IPv6": "fd00:ec2::254",
    "metadata in a public range": "168.63.129.16",
    "shared": "100.64.0.1",
    "nothing": "0.0.0.0",
    "broadcast": "255.255.255.255",
    "IPv4 in IPv6": "::ffff:10.0.0.1",
    "IPv4 in IPv6, of old": "::10.0.0.1",
    "NAT64": "64:ff9b::a00:1",
    "6to4": "2002:a00:1::1",
    "unique local": "fd12::1",
}


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_addresses_of_no_concern_to_a_sandbox(jail: Jail, origin: Origin, kind: str) -> None:
    """Named in a request or found behind a permitted name, on every way."""
    address = FORBIDDEN[kind]
    shown = f"[{address}]" if ":" in address else address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    kind_of_address = 4 if ":" in address else 1
    jail.hosts.point("rebinding.example", address)
    for answer in (
        jail.talk(connect(f"{shown}:443")),
        jail.talk(get(f"http://{shown}/", CLOSE)),
        jail.talk(socks(packed, 443, kind_of_address)),
        jail.talk(socks(address.encode(), 443)),
        jail.talk(connect("rebinding.example:443")),
        jail.talk(get("http://rebinding.example/", CLOSE)),
        jail.talk(socks(b"rebinding.example", 443)),
        jail.talk(b"x", to=("rebinding.example", 443)),
        jail.talk(get("/", "Host: rebinding.example", CLOSE), to=("rebinding.example", 80)),
    ):
        assert is_refused(answer), answer
    assert jail.hosts.dialled == []
    assert origin.received == b""


def test_the_hosts_own_address(jail: Jail) -> None:
    """Whatever network it is in: no rule for a name leads to this machine."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        own = probe.getsockname()[0]
    jail.hosts.point("rebinding.example", own)
    answer = jail.talk(connect("rebinding.example:443"))
    assert answer.status == 403
    assert jail.hosts.dialled == []


def test_a_name_that_changes_its_address(jail: Jail) -> None:
    """Each connection looks a name up once, checks what it has found, and dials just that."""
    public = "93.184.216.200"
    jail.hosts.add_address(public, 80, 1)
    for answers in (["127.0.0.1"], [public, "127.0.0.1"], ["10.0.0.1", public]):
        jail.hosts.point("rebinding.example", *answers)
        jail.hosts.looked_up.clear()
        jail.talk(get("http://rebinding.example/", CLOSE))
        assert jail.hosts.looked_up == ["rebinding.example"]
    assert set(jail.hosts.dialled) == {(public, 80)}


# --- names

ODD = {
    "integer": b"2130706433",
    "octal": b"0177.0.0.1",
    "hexadecimal": b"0x7f.1",
    "short": b"127.1",
    "octal parts": b"010.0.0.1",
    "NUL": b"a.example\0.denied.example",
    "NUL before": b"denied.example\0a.example",
    "space": b"a.example denied.example",
    "tab": b"a.example\tx",
    "line end": b"a.example\r\n.example",
    "two dots at the end": b"a.example..",
    "two dots within": b"a..example",
    "dot before": b".a.example",
    "other alphabet": "\u0430.example".encode(),
    "latin-1": b"\xe4.a.example",
    "full-width dot": "a\uff0eexample".encode(),
    "full-width digits": "\uff11\uff10.0.0.1".encode(),
    "zone": b"fe80::1%lo",
    "user": b"a.example@denied.example",
    "percent": b"denied%2eexample",
    "slash": b"denied.example/a.example",
    "hash": b"denied.example#.a.example",
    "query": b"denied.example?.a.example",
    "brackets": b"[a.example]",
    "comma": b"denied.example,a.example",
    "nothing": b"",
    "only a dot": b".",
    "too long": b"a." * 124 + b"example",
    "long label": b"x" * 64 + b".example",
}


@pytest.mark.parametrize("kind", ODD)
def test_names_that_can_be_read_in_two_ways(jail: Jail, origin: Origin, kind: str) -> None:
    name = ODD[kind]
    text = name.decode("latin-1")
    for answer in (
        jail.talk(connect(f"{text}:443")),
        jail.talk(get(f"http://{text}/", CLOSE)),
        jail.talk(socks(name, 443)),
        jail.talk(
            b"GET / HTTP/1.1\r\nHost: " + name + b"\r\nConnection: close\r\n\r\n",
            to=("a.example", 80),
        ),
    ):
        assert is_refused(answer), answer
    assert jail.hosts.looked_up == []
    assert origin.received == b""


@pytest.mark.parametrize("name", ["A.EXAMPLE", "a.example."])
def test_other_spellings_are_the_same_host(jail: Jail, name: str) -> None:
    """Upper case, and one dot at the end: decided and dialled as the one name that they are."""
    assert jail.talk(get(f"http://{name}/", CLOSE)).status == 200
    assert jail.talk(socks(name.encode(), 80, inside=get("/", f"Host: {name}", CLOSE))).data
    assert set(jail.hosts.looked_up) == {"a.example"}


def test_a_denied_name_is_not_looked_up(jail: Jail) -> None:
    """A name is a message to whoever runs its domain: none leaves this machine without a rule."""
    for answer in (
        jail.talk(connect("secret.denied.example:443")),
        jail.talk(get("http://secret.denied.example/", CLOSE)),
        jail.talk(socks(b"secret.denied.example", 443)),
        jail.talk(b"", to=("secret.denied.example", 443)),
        jail.talk(connect("secret.a.example:443")),
    ):
        assert is_refused(answer), answer
    jail.run(["getent", "ahosts", "secret.denied.example"])
    jail.run(["getent", "ahosts", "x.many.example"])  # permitted, but nobody has dialled it
    assert jail.hosts.looked_up == []


def test_other_ports(jail: Jail) -> None:
    for answer in (
        jail.talk(connect("tls.example:80")),
        jail.talk(socks(b"tls.example", 22)),
        jail.talk(get("http://tls.example/", CLOSE)),
        jail.talk(b"", to=("tls.example", 80)),
        jail.talk(b"", to=("a.example", 22)),
        jail.talk(connect("a.example:0")),
        jail.talk(connect("a.example:65536")),
        jail.talk(connect("a.example:+443")),
    ):
        assert is_refused(answer), answer
    assert jail.hosts.dialled in ([], [(jail.hosts.address_of("a.example"), 22)])


# --- names inside a connection


def hello(name: str) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def test_tls_for_another_host(jail: Jail, origin: Origin) -> None:
    """Fronting: both hosts are allowed, and may be one server."""
    other = hello("b.example")
    for answer in (
        jail.talk(connect("a.example:443", other)),
        jail.talk(socks(b"a.example", 443, inside=other)),
        jail.talk(other, to=("a.example", 443)),
        jail.talk(connect("a.example:443", other[:1]), other[1:]),
    ):
        assert answer.end == "ConnectionResetError"
        assert b"hello" not in answer.data
    assert origin.received == b""
    assert [event["action"] for event in jail.events()[-4:]] == ["deny"] * 4


def test_a_host_header_for_another_host(jail: Jail, origin: Origin) -> None:
    other = get("/", "Host: b.example", CLOSE)
    for answer in (
        jail.talk(other.replace(b"GET /", b"GET http://a.example/")),
        jail.talk(other, to=("a.example", 80)),
        jail.talk(get("http://b.example/").replace(b"Host: b", b"Host: a")),
        jail.talk(connect("a.example:443").replace(b"Host: a", b"Host: b")),
    ):
        assert answer.status == 421
    inside = jail.talk(connect("a.example:80", other))
    assert b"HTTP/1.1 421 " in inside.data
    assert origin.received == b""


def test_a_second_request_for_another_host(jail: Jail, origin: Origin) -> None:
    answer = jail.talk(
        get("http://a.example/one")
        + get("http://denied.example/two")
        + get("http://b.example/3")
        + get("http://10.0.0.1/four", CLOSE)
    )
    heads = [line for line in answer.data.split(b"\r\n") if b"HTTP/1.1 " in line]
    assert [head.rpartition(b"HTTP/1.1 ")[2][:3] for head in heads] == [
        *(b"200", b"403", b"200", b"403")
    ]
    assert b"/two" not in origin.received
    assert b"/four" not in origin.received


def test_a_connect_within_a_connection(jail: Jail, origin: Origin) -> None:
    answer = jail.talk(get("http://a.example/") + connect("denied.example:443"))
    assert b"HTTP/1.1 400 " in answer.data
    answer = jail.talk(connect("a.example:80", connect("denied.example:443")))
    assert b"HTTP/1.1 400 " in answer.data
    assert b"CONNECT" not in origin.received


def test_a_relayed_connect(jail: Jail) -> None:
    """A proxy elsewhere is a host that needs a rule; what it does then is its own business."""
    assert jail.talk(connect("other-proxy.example:8080")).status == 403
    relayed = connect("denied.example:443")
    answer = jail.talk(connect("proxy.example:8080", relayed))
    assert answer.data.endswith(relayed)


def test_a_redirect_to_a_denied_host(jail: Jail) -> None:
    with listening() as sock:
        serve_with_threads(lambda s: (s.recv(65536), s.sendall(MOVED)), sock)
        jail.hosts.add("x.many.example", 80, port_of(sock))
        ran = jail.run(["curl", "-sSL", "http://x.many.example/"])
    assert ran.output.startswith("egress denied: denied.example:80 (no rule allows it")


# --- framing

SMUGGLED = {
    "two lengths": (["Content-Length: 4", "Content-Length: 30"], b"GET / HTTP/1.1\r\n\r\n"),
    "length and chunks": (["Content-Length: 4", "Transfer-Encoding: chunked"], b"0\r\n\r\nGET /"),
    "chunks and length": (["Transfer-Encoding: chunked", "Content-Length: 4"], b"0\r\n\r\nGET /"),
    "two codings": (["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], b"0\r\n\r\n"),
    "another coding": (["Transfer-Encoding: xchunked"], b"0\r\n\r\n"),
    "space before the colon": (["Transfer-Encoding : chunked"], b"0\r\n\r\n"),
    "control in a value": (["Transfer-Encoding:\x0bchunked"], b"0\r\n\r\n"),
    "folded header": (["X: y", " Transfer-Encoding: chunked"], b"0\r\n\r\n"),
    "signed length": (["Content-Length: +4"], b"abcd"),
    "hexadecimal length": (["Content-Length: 0x4"], b"abcd"),
    "list of lengths": (["Content-Length: 4, 4"], b"abcd"),
    "bare line end": (["X: y\nTransfer-Encoding: chunked"], b"0\r\n\r\n"),
    "bare return": (["X: y\rTransfer-Encoding: chunked"], b"0\r\n\r\n"),
    "second host": (["Host: b.example"], b""),
    "NUL in a header": (["X: a\0b"], b""),
    "no name": ([": y"], b""),
}


@pytest.mark.parametrize("kind", SMUGGLED)
def test_ambiguous_framing(jail: Jail, origin: Origin, kind: str) -> None:
    headers, body = SMUGGLED[kind]
    by_proxy = get("http://a.example/", *headers, method="POST")
    direct = by_proxy.replace(b"http://a.example", b"")
    for answer in (
        jail.talk(by_proxy + body),
        jail.talk(direct + body, to=("a.example", 80)),
        jail.talk(connect("a.example:80", direct + body)),
    ):
        final = answer.data[answer.data.rindex(b"HTTP/1.1 ") :]
        assert final.split(b" ")[1] in (b"400", b"501")
    assert origin.received == b""


def test_broken_chunks(jail: Jail, origin: Origin) -> None:
    """Found out while the body is passed on: the server must not take the rest for a request."""
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: a.example\r\n\r\n"
    for start in (b"0x1\r\nx\r\n", b"-1\r\n", b"1\nx\r\n", b"1 \r\nx\r\n", b"1\r\nxx", b"\r\n"):
        request = get("http://a.example/", "Transfer-Encoding: chunked", method="POST")
        assert jail.talk(request + start + smuggled).status == 400
    assert b"smuggled" not in origin.received


def test_a_pipelined_request_as_a_body(jail: Jail, origin: Origin) -> None:
    hidden = get("http://denied.example/hidden", CLOSE)
    length = f"Content-Length: {len(hidden)}"
    answer = jail.talk(get("http://a.example/", length, CLOSE, method="POST") + hidden)
    assert answer.data.count(b"HTTP/1.1 ") == 1
    received = origin.received.replace(hidden, b"")
    assert received.startswith(b"POST / HTTP/1.1\r\n")
    assert b"denied" not in received
    answer = jail.talk(
        get("http://a.example/", "Content-Length: 3", method="POST") + b"abc" + hidden
    )
    assert answer.data.count(b"HTTP/1.1 403 ") == 1


def test_an_answer_that_can_be_read_in_two_ways(jail: Jail) -> None:
    """Smuggling the other way: nothing of it reaches the sandbox."""
    for answer in (
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 9\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
        b"HTTP/1.1 101 Switch\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000,
    ):
        with listening() as sock:
            serve_with_threads(lambda s, a=answer: (s.recv(65536), s.sendall(a)), sock)
            jail.hosts.add("x.many.example", 80, port_of(sock))
            found = jail.talk(get("http://x.many.example/", CLOSE))
        assert found.status == 502
        assert b"hello" not in found.data


# --- the policy


def test_an_empty_list(jail: Jail) -> None:
    """Rules that are taken away at run time: nothing passes, and no name exists."""
    gate = jail.gateway._service.gate
    rules = gate.policy
    gate.set_policy(EgressPolicy())
    try:
        for answer in (
            jail.talk(connect("a.example:443")),
            jail.talk(get("http://a.example/", CLOSE)),
            jail.talk(socks(b"a.example", 443)),
            jail.talk(b"x", to=("b.example", 443)),
        ):
            assert is_refused(answer), answer
    finally:
        gate.set_policy(rules)
    assert jail.talk(get("http://a.example/", CLOSE)).status == 200


# --- time and memory


def test_slow_clients(jail: Jail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that never end, on every way, are answered and the connection ends."""
    monkeypatch.setattr(jail.gateway._service, "limits", Limits(head=0.2, idle=20))
    assert jail.talk(b"GET http://a.exa").status == 408
    assert jail.talk(b"").status == 408
    assert jail.talk(b"\5\1\0\5\1").data[:2] == b"\5\0"
    assert b" 408 " in jail.talk(b"GET / HTT", to=("a.example", 80)).data
    assert b" 408 " in jail.talk(connect("a.example:80", b"GET / HTT")).data
    assert jail.talk(b"\x16\3\1\2\0\1", to=("a.example", 443)).end == "ConnectionResetError"


def test_a_response_that_never_ends(jail: Jail) -> None:
    """A program that does not read stops the server, wherever the bytes would be kept."""
    written = 0

    def endless(connection: socket.socket) -> None:
        nonlocal written
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            written += connection.send(b"x" * 65536)

    script = (
        "import socket, sys\n"
        "sock = socket.create_connection(('endless.example', 80))\n"
        "sock.sendall(b'GET / HTTP/1.1\\r\\nHost: endless.example\\r\\n\\r\\n')\n"
        "sys.stdin.read()\n"
    )
    with listening() as sock:
        serve_with_threads(endless, sock)
        jail.hosts.add("endless.example", 80, port_of(sock))
        with jail.running(script):
            wait_until(lambda: written > 0, "the answer has begun")
            before = -1
            while written != before:  # until nothing moves any more
                before = written
                time.sleep(0.5)
            assert written < 64 * 2**20
    wait_until(lambda: jail.gateway.connections == 0, "the connection is over")
