"""HTTP/2 inside TLS that is ended: requests are decided one by one, and nobody can misuse that."""

from __future__ import annotations

import asyncio
import contextlib
import json
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import h2.config
import h2.connection
import h2.errors
import h2.events
import httpx
import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway import service
from sandbox_kernel.gateway.http2.budget import Budget
from sandbox_kernel.gateway.http2.floods import Flood
from sandbox_kernel.gateway.http2.peer import STREAM_WINDOW, Block, Data, Peer, Stream
from sandbox_kernel.gateway.service import Limits
from tests.helpers.waiting import until

from .secure import H2Client, H2Request, H2Server, Secure, securing

RULE = {"host": "a.example", "methods": ["GET", "HEAD"], "path": "/v1/*"}
ANY = {"host": "a.example", "path": "/*"}
BOTH = ("h2", "http/1.1")


@contextlib.asynccontextmanager
async def talking(folder: Path, *rules: Any, server: H2Server | None = None, **options: Any) -> Any:
    """A gateway, a server of HTTP/2 behind it, and a client that is connected to it."""
    served = server or H2Server()
    async with securing(folder, *rules, handle=served, protocols=BOTH, **options) as at:
        client = H2Client(*await at.connect("h2"))
        yield at, served, client
        client._writer.transport.abort()
        await until(lambda: at.rig.gateway.connections == 0)
        assert at.rig.gateway._service.budget.kept == 0, "what was kept is released"


def get(client: H2Client, at: Secure, path: str, *more: tuple[str, str], **options: Any) -> int:
    options.setdefault("authority", at.host)
    return client.get(path, *more, **options)


# --- what holds


async def test_methods_and_paths_hold_for_each_stream(tmp_path: Path) -> None:
    async with talking(tmp_path, RULE) as (at, served, client):
        streams = [
            get(client, at, "/v1/x?key=1"),
            get(client, at, "/v2"),
            get(client, at, "/v1/x", method="DELETE"),
            get(client, at, "/v1/y"),
        ]
        answers = [await client.response(stream) for stream in streams]
        assert [status for status, _ in answers] == [200, 403, 403, 200]
        line = f"egress denied: {at.host} (no rule allows it; allow it with egress="
        assert answers[1][1].decode().startswith(line)
        assert answers[1][1].endswith(b"\n")
        assert [request[":path"] for request in served.requests] == ["/v1/x?key=1", "/v1/y"]
        assert served.connections == 1
        await until(lambda: len(at.rig.events) == 4)
        asked = {(e["action"], e["method"], e["path"]) for e in at.rig.events}
        assert asked == {
            *(("allow", "GET", "/v1/x"), ("allow", "GET", "/v1/y")),
            *(("deny", "GET", "/v2"), ("deny", "DELETE", "/v1/x")),
        }


async def test_another_host_inside_is_refused(tmp_path: Path) -> None:
    async with talking(tmp_path, ANY, "b.example") as (at, served, client):
        for host in ("b.example", "a.example", f"b.example:{at.served.port}", "a.example:443"):
            stream = get(client, at, "/", authority=host)
            assert (await client.response(stream))[0] == 421
        both = get(client, at, "/", ("host", f"b.example:{at.served.port}"))
        assert (await client.response(both))[0] == 421
        assert served.requests == []
        await until(lambda: at.rig.actions() == ["deny"] * 5)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([("transfer-encoding", "chunked")], 400),
        ([("connection", "x-secret")], 400),
        ([("upgrade", "h2c")], 400),
        ([("keep-alive", "5")], 400),
        ([("proxy-connection", "x")], 400),
        ([("te", "gzip")], 400),
        ([("x-a", "b\r\nx-c: d")], 400),
        ([("x-a", "b\nx")], 400),
        ([("x-a", "b\0c")], 400),
        ([("x-a\r\nb", "c")], 400),
        ([("X-Upper", "c")], 400),
        ([("x:a", "c")], 400),
        ([("", "c")], 400),
        ([(":path", "/other")], 400),
        ([("x", "y"), (":method", "GET")], 400),
        ([(":protocol", "websocket")], 400),
        ([(":unknown", "x")], 400),
        ([("content-length", "1"), ("content-length", "2")], 400),
        ([("x", "y")] * 101, 431),
    ],
)
async def test_deceiving_headers_reach_nobody(
    tmp_path: Path, more: list[tuple[str, str]], expected: int
) -> None:
    """What would split a request, or mean another one, in HTTP/1 behind the server."""
    async with talking(tmp_path, ANY) as (at, served, client):
        stream = get(client, at, "/", *more, end="content-length" not in dict(more))
        try:
            status, _ = await client.response(stream)
            assert status == expected
        except EOFError:
            pass  # a mistake of the connection
        assert served.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {":method": "CONNECT"},
        {":method": "get"},
        {":method": "GET / HTTP/1.1\r\nx: y"},
        {":scheme": "http"},
        {":path": "v1"},
        {":path": "/v1 HTTP/1.1"},
        {":path": "/v1\r\nx: y"},
        {":path": "https://b.example/"},
        {":path": ""},
        {":path": "/v1#x"},
        {":authority": "a@a.example"},
        {":authority": "a.example:443\0"},
    ],
)
async def test_deceiving_requests_reach_nobody(tmp_path: Path, headers: dict[str, str]) -> None:
    async with talking(tmp_path, ANY) as (at, served, client):
        usual = {":method": "GET", ":scheme": "https", ":authority": at.host, ":path": "/"}
        stream = client.send(*{**usual, **headers}.items())
        status, _ = await client.response(stream)
        assert status == 400
        assert served.requests == []


@pytest.mark.parametrize("path", ["/v1/%2e%2e/x", "/v1/..", "/v1//x", "/v1\\x", "/v1/%2f"])
async def test_odd_paths_are_refused(tmp_path: Path, path: str) -> None:
    async with talking(tmp_path, RULE) as (at, served, client):
        assert (await client.response(get(client, at, path)))[0] == 403
        assert served.requests == []


async def test_a_body_has_the_length_that_it_claims(tmp_path: Path) -> None:
    async with talking(tmp_path, ANY) as (at, served, client):
        stream = get(client, at, "/", ("content-length", "3"), method="POST", end=False)
        client.connection.send_data(stream, b"12345", end_stream=True)
        with contextlib.suppress(EOFError):
            assert (await client.response(stream))[0] != 200
        assert not any(request.body for request in served.requests)


@pytest.mark.parametrize(
    "headers",
    [
        [(":status", "200"), ("connection", "close")],
        [(":status", "200"), ("transfer-encoding", "chunked")],
        [(":status", "200"), ("x", "a\r\nb")],
        [(":status", "200"), ("X-Upper", "a")],
        [(":status", "abc")],
        [(":status", "101")],
        [("x", "y")],
    ],
)
async def test_deceiving_answers_are_not_passed_on(
    tmp_path: Path, headers: list[tuple[str, str]]
) -> None:
    def answer(connection: h2.connection.H2Connection, stream: int, _: H2Request) -> None:
        connection.config.validate_outbound_headers = False
        connection.config.normalize_outbound_headers = False
        connection.send_headers(stream, headers, end_stream=True)

    server = H2Server(answer=answer)
    async with talking(tmp_path, ANY, server=server) as (at, _, client):
        with contextlib.suppress(EOFError):
            assert (await client.response(get(client, at, "/")))[0] == 502
        await until(lambda: at.rig.actions() == ["error"])


async def test_rates_count_requests(tmp_path: Path) -> None:
    rule = {"host": "a.example", "rate_limit_rpm": 2}
    async with talking(tmp_path, rule) as (at, _, client):
        statuses = [(await client.response(get(client, at, "/")))[0] for _ in range(3)]
        assert statuses == [200, 200, 429]


# --- what passes


async def test_bodies_trailers_and_interim_answers(tmp_path: Path) -> None:
    def early(connection: h2.connection.H2Connection, stream: int) -> None:
        connection.send_headers(stream, [(":status", "103"), ("link", "</x>")])

    def answer(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        connection.send_headers(stream, [(":status", "200"), ("trailer", "x-sum")])
        connection.send_data(stream, bytes(request.body))
        connection.send_headers(stream, request.trailers, end_stream=True)

    server = H2Server(answer=answer, on_headers=early)
    async with talking(tmp_path, ANY, server=server) as (at, served, client):
        stream = get(client, at, "/", ("te", "trailers"), method="POST", end=False)
        client.connection.send_data(stream, b"content")
        client.connection.send_headers(stream, [("x-sum", "7")], end_stream=True)
        assert await client.response(stream) == (200, b"content")
        kinds = {type(event): event for event in client.events}
        interim = kinds[h2.events.InformationalResponseReceived]
        assert (b"link", b"</x>") in list(interim.headers)
        trailers = kinds[h2.events.TrailersReceived]
        assert list(trailers.headers) == [(b"x-sum", b"7")]
        assert served.requests[0]["te"] == "trailers"
        await until(lambda: at.rig.events)
        assert (at.rig.events[0]["sent"], at.rig.events[0]["received"]) == (7, 7)


async def test_a_stream_that_nobody_reads_does_not_stop_the_others(tmp_path: Path) -> None:
    """Nor is more of each kept than its window."""
    server = H2Server()

    def answer(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        connection.send_headers(stream, [(":status", "200")])
        large = request[":path"] == "/large"
        server.pending[stream] = bytearray(10_000_000 if large else 5)

    server.answer = answer
    async with talking(tmp_path, ANY, server=server) as (at, _, client):
        client.acknowledges = False
        client.connection.increment_flow_control_window(1 << 20)  # the connection's, not theirs
        for _ in range(10):
            get(client, at, "/large")
        await client.until(lambda: client.received == 10 * 65535)
        kept = at.rig.gateway._service.budget
        await until(lambda: kept.kept > 10 * (STREAM_WINDOW - 65536))
        stream = get(client, at, "/small")
        assert await client.response(stream) == (200, bytes(5))
        assert kept.kept <= 10 * STREAM_WINDOW


async def test_what_is_kept_is_bounded_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the budget, a server gets no more room on its connection; when it is free again, all
    goes on."""
    monkeypatch.setattr(Budget.__init__, "__defaults__", (600_000,))
    server = H2Server()

    def answer(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        connection.send_headers(stream, [(":status", "200")])
        server.pending[stream] = bytearray(1_000_000)

    server.answer = answer
    async with talking(tmp_path, ANY, server=server) as (at, _, client):
        client.acknowledges = False
        streams = [get(client, at, "/") for _ in range(10)]
        await client.flush()
        kept = at.rig.gateway._service.budget
        await until(lambda: kept.exceeded)
        client.acknowledges = True
        for stream in streams:
            client.connection.increment_flow_control_window(500_000, stream)
        client.connection.increment_flow_control_window(1 << 24)
        for stream in streams:
            assert len((await client.response(stream))[1]) == 1_000_000


async def test_heads_are_bounded_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HPACK makes large ones of a few bytes, so those that are under way are counted."""
    monkeypatch.setattr(service, "_MOST_HEADS", 20_000)
    server = H2Server()
    large = [("x-large", "x" * 3000)] * 4
    async with talking(tmp_path, ANY, server=server) as (at, _, client):
        waiting = [get(client, at, "/", *large, method="PUT", end=False) for _ in range(2)]
        await client.flush()
        await until(lambda: len(server.requests) == 2)
        assert (await client.response(get(client, at, "/")))[0] == 503
        for stream in waiting:
            client.connection.end_stream(stream)
            assert (await client.response(stream))[0] == 200
        assert (await client.response(get(client, at, "/")))[0] == 200
        await until(lambda: at.rig.gateway._service.heads.kept == 0)


async def test_small_frames_take_as_little_memory_as_large_ones() -> None:
    budget = Budget()
    stream = Stream(cast(Peer, SimpleNamespace(budget=budget)), 1)
    sent = bytes(number % 251 for number in range(100_000))
    for number, byte in enumerate(sent, 1):
        stream.arrived(Data(bytes([byte]), 2, ended=number == len(sent)))
    assert budget.kept == 2 * len(sent)
    assert len(stream._items) < 20
    items = [await stream.next() for _ in range(len(stream._items))]
    assert b"".join(item.content for item in items if isinstance(item, Data)) == sent
    assert await stream.next() is None


def test_header_blocks_of_a_stream_are_bounded() -> None:
    """Also where nobody reads them, because a client takes nothing."""
    stream = Stream(cast(Peer, SimpleNamespace(budget=Budget())), 1)
    interim = Block([(b":status", b"103")], ended=False)
    for _ in range(17):
        stream.arrived(interim)

    def flood() -> None:
        for _ in range(100):
            stream.arrived(interim)

    with pytest.raises(Flood, match="header blocks"):
        flood()


async def test_many_requests_at_once(tmp_path: Path) -> None:
    async with (
        securing(tmp_path, ANY, handle=H2Server(), protocols=BOTH) as at,
        httpx.AsyncClient(
            http2=True, verify=at.trusts_gateway(), proxy=at.proxy, timeout=60
        ) as client,
    ):
        await client.get(at.url)  # from now on, there is a connection for all
        found = await asyncio.gather(
            *(client.post(f"{at.url}/{n}", content=b"x" * 5000) for n in range(300))
        )
        assert {answer.status_code for answer in found} == {200}
        assert {answer.http_version for answer in found} == {"HTTP/2"}
        assert at.rig.actions() == ["allow"] * 301


async def test_a_server_that_says_goodbye_finishes_what_it_has(tmp_path: Path) -> None:
    """Requests after that go to a new connection."""

    def answer(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        from hyperframe.frame import GoAwayFrame

        frame = GoAwayFrame(0)
        frame.last_stream_id = stream
        connection._prepare_for_sending([frame])
        connection.send_headers(stream, [(":status", "200")])
        connection.send_data(stream, b"after goodbye", end_stream=True)

    server = H2Server(answer=answer)
    async with talking(tmp_path, ANY, server=server) as (at, served, client):
        for _ in range(8):
            stream = get(client, at, "/")
            assert await client.response(stream) == (200, b"after goodbye")
        assert served.connections == 8


async def test_a_client_that_resets_is_not_served_on(tmp_path: Path) -> None:
    def never(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        connection.send_headers(stream, [(":status", "200")])

    server = H2Server(answer=never)
    async with talking(tmp_path, ANY, server=server) as (at, served, client):
        stream = get(client, at, "/")
        await client.until(
            lambda: any(isinstance(e, h2.events.ResponseReceived) for e in client.events)
        )
        client.connection.reset_stream(stream)
        await client.flush()
        await until(lambda: served.resets == 1)
        await until(lambda: at.rig.actions() == ["error"])


async def test_a_change_of_rules_ends_a_stream_and_no_other(tmp_path: Path) -> None:
    def open_end(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        connection.send_headers(stream, [(":status", "200")])

    async with talking(tmp_path, ANY, server=H2Server(answer=open_end)) as (at, served, client):
        one, two = get(client, at, "/v1/x"), get(client, at, "/v2")
        await client.until(
            lambda: sum(isinstance(e, h2.events.ResponseReceived) for e in client.events) == 2
        )
        at.rig.gate.set_policy(EgressPolicy.of(RULE))
        await client.until(lambda: client.ended(two))
        assert not client.ended(one)
        await until(lambda: at.rig.actions() == ["deny"])
        assert "the rules have changed" in at.rig.events[0]["reason"]
        assert (await client.response(get(client, at, "/v2")))[0] == 403
        await until(lambda: served.resets == 1)


async def test_silence_ends(tmp_path: Path) -> None:
    def never(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        return

    limits = Limits(head=20, idle=0.3)
    async with talking(tmp_path, ANY, server=H2Server(answer=never), limits=limits) as (
        at,
        _,
        client,
    ):
        with contextlib.suppress(EOFError):
            assert (await client.response(get(client, at, "/")))[0] in (504, 0)
        assert await client.goodbye() in (h2.errors.ErrorCodes.NO_ERROR, -1)
        await until(lambda: at.rig.actions() == ["error"])


async def test_a_stream_that_moves_keeps_its_connection(tmp_path: Path) -> None:
    """However long it takes: only silence ends it."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        connection.initiate_connection()
        events: list[h2.events.Event] = []
        while not any(isinstance(event, h2.events.RequestReceived) for event in events):
            events += connection.receive_data(await reader.read(65536))
        connection.send_headers(1, [(":status", "200")])
        for number in range(20):
            connection.send_data(1, b"x", end_stream=number == 19)
            writer.write(connection.data_to_send())
            await asyncio.sleep(0.15)
        await reader.read()

    limits = Limits(head=20, idle=1.0)
    async with securing(tmp_path, ANY, handle=drip, protocols=BOTH, limits=limits) as at:
        client = H2Client(*await at.connect("h2"))
        client.acknowledges = False
        assert await client.response(get(client, at, "/")) == (200, 20 * b"x")
        client._writer.transport.abort()


async def test_a_client_that_speaks_only_http2_is_told_of_a_server_that_does_not(
    tmp_path: Path,
) -> None:
    async with securing(tmp_path, ANY) as at:
        client = H2Client(*await at.connect("h2"))
        status, text = await client.response(get(client, at, "/"))
        assert (status, text) == (
            502,
            f"{at.host} speaks no HTTP/2, and the client nothing else\n".encode(),
        )
        client._writer.transport.abort()


async def test_a_server_that_is_not_trusted(tmp_path: Path) -> None:
    async with talking(tmp_path, ANY, names=("wrong.example",)) as (at, _, client):
        status, text = await client.response(get(client, at, "/"))
        assert status == 502
        assert text.startswith(f"the certificate of {at.host} is not trusted".encode())


# --- floods


async def test_rapid_resets(tmp_path: Path) -> None:
    async with talking(tmp_path, ANY) as (at, served, client):
        with contextlib.suppress(OSError):
            for _ in range(400):
                stream = get(client, at, "/")
                client.connection.reset_stream(stream)
                await client.flush()
        assert await client.goodbye() in (h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, -1)
        await until(lambda: any("too many resets" in e["reason"] for e in at.rig.events))
        assert len(served.requests) < 300


@pytest.mark.parametrize("kind", ["ping", "settings", "empty data", "window"])
async def test_frames_that_cost_nothing(tmp_path: Path, kind: str) -> None:
    async with talking(tmp_path, ANY) as (at, _, client):
        stream = get(client, at, "/", method="POST", end=False)
        with contextlib.suppress(OSError):
            for _ in range(20):
                for _ in range(100):
                    if kind == "ping":
                        client.connection.ping(b"12345678")
                    elif kind == "settings":
                        client.connection.update_settings({4: 65535})
                    elif kind == "window":
                        client.connection.increment_flow_control_window(1)
                    else:
                        client.connection.send_data(stream, b"")
                await client.flush()
        assert await client.goodbye() in (h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, -1)
        await until(lambda: any("too many frames" in e["reason"] for e in at.rig.events))


async def test_too_many_headers(tmp_path: Path) -> None:
    """Their size, decompressed, and the number of frames that carry them."""
    from hyperframe.frame import ContinuationFrame, HeadersFrame

    async with talking(tmp_path, ANY) as (at, served, client):
        get(client, at, "/", *[("x-filler", "y" * 4000)] * 60)
        assert await client.goodbye() != h2.errors.ErrorCodes.NO_ERROR
        assert served.requests == []
    async with talking(tmp_path, ANY) as (at, served, client):
        await client.flush()
        frames = [HeadersFrame(1, b"\x82")] + [ContinuationFrame(1, b"\x82") for _ in range(200)]
        client._writer.write(b"".join(frame.serialize() for frame in frames))
        assert await client.goodbye() != h2.errors.ErrorCodes.NO_ERROR
        assert served.requests == []


async def test_too_many_streams(tmp_path: Path) -> None:
    def never(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        return

    async with talking(tmp_path, ANY, server=H2Server(answer=never)) as (at, served, client):
        for _ in range(100):
            get(client, at, "/")
        await client.flush()
        await until(lambda: len(served.requests) == 100)
        client.connection.remote_settings.max_concurrent_streams = 1000
        for _ in range(20):
            get(client, at, "/")
        assert await client.goodbye() != h2.errors.ErrorCodes.NO_ERROR
        assert len(served.requests) == 100


async def test_a_client_that_does_not_read_stops_the_server(tmp_path: Path) -> None:
    """A response that never ends takes no memory."""
    server = H2Server()

    def endless(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        connection.send_headers(stream, [(":status", "200")])
        server.pending[stream] = bytearray(50_000_000)

    server.answer = endless
    async with talking(tmp_path, ANY, server=server) as (at, _, client):
        client.acknowledges = False
        get(client, at, "/")
        await client.until(lambda: client.received == 65535)
        await until(lambda: at.rig.gateway._service.budget.kept > STREAM_WINDOW - 65536)
        assert server.sent <= 65535 + 2 * STREAM_WINDOW


# --- gRPC


class Echo(grpc.GenericRpcHandler):
    def service(self, details: Any) -> Any:
        kind = details.method.rpartition("/")[2]
        if kind == "Unary":
            return grpc.unary_unary_rpc_method_handler(lambda data, context: data)
        if kind == "Fail":
            return grpc.unary_unary_rpc_method_handler(self.fail)
        if kind == "Stream":
            return grpc.unary_stream_rpc_method_handler(
                lambda data, context: (data for _ in range(200))
            )
        return grpc.stream_stream_rpc_method_handler(lambda incoming, context: incoming)

    @staticmethod
    def fail(data: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("x-why", "because"),))
        raise context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")


async def test_grpc(tmp_path: Path) -> None:
    """Unary calls, streams both ways, errors in trailers, and a denial."""
    from .secure import ROOT

    certificate = ROOT.issue_cert("a.example")
    server = grpc.server(futures.ThreadPoolExecutor(8), handlers=[Echo()])
    credentials = grpc.ssl_server_credentials(
        [(certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())]
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        async with securing(tmp_path, {"host": "a.example", "path": "/echo.Echo/*"}) as at:
            at.host = f"a.example:{port}"
            at.rig.gateway.private_names = [at.host]
            await asyncio.to_thread(_call, at)
            assert set(at.rig.actions()) == {"allow", "deny"}
            called = {event["path"] for event in at.rig.events if event["action"] == "allow"}
            assert "/echo.Echo/Unary" in called
    finally:
        server.stop(None)


def _call(at: Secure) -> None:
    options = [("grpc.http_proxy", at.proxy)]
    trusts = grpc.ssl_channel_credentials(at.authority.certificate)
    with grpc.secure_channel(at.host, trusts, options) as channel:
        unary = channel.unary_unary("/echo.Echo/Unary")
        for size in (0, 5, 3_000_000):
            assert unary(b"x" * size, timeout=30) == b"x" * size
        with pytest.raises(grpc.RpcError) as failed:
            channel.unary_unary("/echo.Echo/Fail")(b"x", timeout=30)
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert failed.value.details() == "no"
        assert ("x-why", "because") in list(failed.value.trailing_metadata())
        streamed = channel.unary_stream("/echo.Echo/Stream")(b"y" * 20_000, timeout=30)
        assert sum(map(len, streamed)) == 200 * 20_000
        both = channel.stream_stream("/echo.Echo/Both")
        sent = (b"%d" % n for n in range(500))
        assert [int(answer) for answer in both(sent, timeout=30)] == list(range(500))
        with pytest.raises(grpc.RpcError) as denied:
            channel.unary_unary("/other.Other/Unary")(b"x", timeout=30)
        assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_httpx(tmp_path: Path) -> None:
    async with (
        securing(tmp_path, RULE, handle=H2Server(), protocols=BOTH) as at,
        httpx.AsyncClient(
            http2=True, verify=at.trusts_gateway(), proxy=at.proxy, timeout=20
        ) as client,
    ):
        found = await client.get(f"{at.url}/v1/x")
        assert (found.status_code, found.http_version) == (200, "HTTP/2")
        said = json.loads(found.text)
        assert [":authority", at.host] in said["headers"]
        denied = await client.get(f"{at.url}/v2")
        assert denied.status_code == 403
        assert denied.text.startswith("egress denied: ")


async def test_curl(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE, handle=H2Server(), protocols=BOTH) as at:
        for path, expected in (("/v1/x", "2 200"), ("/v2", "2 403")):
            process = await asyncio.create_subprocess_exec(
                *("curl", "-sS", "--cacert", str(at.bundle), "-x", at.proxy, "-o", "/dev/null"),
                *("-w", "%{http_version} %{http_code}", "--http2", at.url + path),
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await process.communicate()
            assert output.decode() == expected
