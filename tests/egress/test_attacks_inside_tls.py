"""What may not pass inside TLS that the gateway ends, tried from inside a real jail, with plain
sockets and with a client of HTTP/2 that says what no honest program says."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator
from typing import Any

import pytest
import trustme

from tests.helpers.named_hosts import NamedHosts

from .jail import Jail, running_jail
from .secure_server import serve_https
from .servers import web_h2

pytestmark = pytest.mark.slow

RULES: tuple[Any, ...] = tuple(
    {"host": host, "methods": ["GET"], "path": "/v1/*"} for host in ("h1.example", "h2.example")
)
PYTHON = "/home/sandbox/.venv/bin/python"


@pytest.fixture(scope="module")
def jail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jail]:
    """All tests of this module share it. ``h1.example`` speaks HTTP/1.1, ``h2.example`` HTTP/2."""
    folder, root = tmp_path_factory.mktemp("tls"), trustme.CA()
    root.cert_pem.write_to_path(str(folder / "roots.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    root.issue_cert("h1.example").configure_cert(context)
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.ExitStack() as stack:
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(folder / "data"))
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "roots.pem"))
        hosts = NamedHosts(monkeypatch)
        hosts.add("h1.example", 443, stack.enter_context(serve_https(context)))
        hosts.add("h2.example", 443, stack.enter_context(web_h2(root, "h2.example")))
        yield stack.enter_context(running_jail(*RULES, monkeypatch=monkeypatch, hosts=hosts))


def said(jail: Jail, script: str) -> Any:
    """What a script of Python in the jail prints, as JSON."""
    ran = jail.run([PYTHON, "-c", script])
    assert ran.ok, ran.output
    return json.loads(ran.output)


DIAL = """
import json, socket, ssl
def dial(host, protocol):
    context = ssl.create_default_context()
    context.set_alpn_protocols([protocol])
    plain = socket.create_connection((host, 443), timeout=60)
    return context.wrap_socket(plain, server_hostname=host)
"""
BY_HTTP_1 = (
    DIAL
    + """
def ask(request):
    with dial("h1.example", "http/1.1") as sock:
        sock.sendall(request.encode("latin-1"))
        answer = b""
        try:
            while data := sock.recv(65536):
                answer += data
        except OSError:
            pass
    return [int(part.split(b" ")[1]) for part in answer.split(b"HTTP/1.1")[1:]]
print(json.dumps([ask(request) for request in REQUESTS]))
"""
)


def request(path: str, *headers: str, host: str = "h1.example", method: str = "GET") -> str:
    return "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""))


LAST = "Connection: close"
HTTP_1: dict[str, tuple[str, list[int]]] = {
    "an honest one": (request("/v1/x", LAST), [200]),
    "dots": (request("/v1/../v2", LAST), [403]),
    "escaped dots": (request("/v1/%2e%2e/v2", LAST), [403]),
    "an escaped slash": (request("/v1/..%2fv2", LAST), [403]),
    "a backslash": (request("/v1/..\\v2", LAST), [403]),
    "two slashes": (request("/v1//../v2", LAST), [403]),
    "another method": (request("/v1/x", LAST, method="DELETE"), [403]),
    "another host": (request("/v1/x", LAST, host="h2.example"), [421]),
    "another host behind it": (request("/v1/x") + request("/v1/x", host="h2.example"), [200, 421]),
    "a denied request behind it": (request("/v1/x") + request("/v2", LAST), [200, 403]),
    "two lengths": (request("/v1/x", "Content-Length: 4", "Content-Length: 5"), [400]),
    "length and chunks": (
        request("/v1/x", "Content-Length: 4", "Transfer-Encoding: chunked"),
        [400],
    ),
    "a request as a body": (
        request("/v1/x", "Content-Length: 40", LAST) + request("/v2", "X: y" * 9)[:40],
        [200],
    ),
    "CONNECT": (request("h2.example:443", LAST, method="CONNECT"), [400]),
    "another line end": (request("/v1/x", "X: y\nZ: z", LAST), [400]),
}


def test_requests_inside_tls(jail: Jail) -> None:
    """Each by itself: what is denied by its path, method or host is denied whatever was said
    before, and what can be read in two ways is refused."""
    requests = [text for text, _ in HTTP_1.values()]
    answers = said(jail, f"REQUESTS = {requests!r}\n{BY_HTTP_1}")
    assert dict(zip(HTTP_1, answers, strict=True)) == {
        name: expected for name, (_, expected) in HTTP_1.items()
    }


BY_HTTP_2 = (
    DIAL
    + """
import h2.config, h2.connection, h2.events, h2.settings
def connect():
    sock = dial("h2.example", "h2")
    assert sock.selected_alpn_protocol() == "h2"
    config = h2.config.H2Configuration(
        header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
    )
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    sock.sendall(connection.data_to_send())
    return sock, connection
def head(path="/v1/x", method="GET", authority="h2.example", *more):
    pseudo = [(":method", method), (":scheme", "https"), (":authority", authority)]
    return [*pseudo, (":path", path), *more]
def answer(sock, connection):
    "The status of the first answer, or how the connection ended."
    while True:
        try:
            data = sock.recv(65536)
        except OSError:
            return "ended"
        if not data:
            return "ended"
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                return dict(event.headers)[":status"]
            if isinstance(event, h2.events.StreamReset):
                return "reset"
            if isinstance(event, h2.events.ConnectionTerminated):
                return "ended"
        sock.sendall(connection.data_to_send())
def ask(headers):
    sock, connection = connect()
    with sock:
        connection.send_headers(1, headers, end_stream=True)
        sock.sendall(connection.data_to_send())
        return answer(sock, connection)
"""
)
REFUSED = {"400", "reset", "ended"}
HTTP_2: dict[str, tuple[str, set[str]]] = {
    "an honest one": ("head()", {"200"}),
    "dots": ("head('/v1/../v2')", {"403"}),
    "escaped dots": ("head('/v1/%2e%2e/v2')", {"403"}),
    "a backslash": ("head('/v1/..\\\\v2')", {"403"}),
    "two slashes": ("head('/v1//../v2')", {"403"}),
    "another method": ("head(method='POST')", {"403"}),
    "another authority": ("head(authority='h1.example')", {"421"}),
    "another host": ("head('/v1/x', 'GET', 'h2.example', ('host', 'h1.example'))", {"421"}),
    "chunks": (
        "head('/v1/x', 'GET', 'h2.example', ('transfer-encoding', 'chunked'))",
        REFUSED,
    ),
    "a line end": ("head('/v1/x', 'GET', 'h2.example', ('x', 'y\\r\\nz: z'))", REFUSED),
    "a connection's own": ("head('/v1/x', 'GET', 'h2.example', ('connection', 'x'))", REFUSED),
    "much": (
        "head('/v1/x', 'GET', 'h2.example', *[('x%d' % n, 'y' * 900) for n in range(99)])",
        {"431", *REFUSED},
    ),
}


def test_requests_by_http_2(jail: Jail) -> None:
    """The same, and what means something else in HTTP/1."""
    heads = ", ".join(f"ask({text})" for text, _ in HTTP_2.values())
    answers = said(jail, f"{BY_HTTP_2}print(json.dumps([{heads}]))")
    wrong = {
        name: answer
        for (name, (_, expected)), answer in zip(HTTP_2.items(), answers, strict=True)
        if answer not in expected
    }
    assert not wrong


FLOODS = {
    "resets": "connection.send_headers(n, head(), end_stream=True); connection.reset_stream(n)",
    "pings": "connection.ping(n.to_bytes(8, 'big'))",
    "settings": "connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: n})",
}


@pytest.mark.parametrize("kind", FLOODS)
def test_floods(jail: Jail, kind: str) -> None:
    """The connection ends, and the next one is served."""
    script = f"""{BY_HTTP_2}
sock, connection = connect()
with sock:
    sock.settimeout(60)
    try:
        for n in range(1, 200001, 2):
            {FLOODS[kind]}
            sock.sendall(connection.data_to_send())
        ended = False
    except OSError:
        ended = True
print(json.dumps([ended, ask(head())]))
"""
    assert said(jail, script) == [True, "200"]
