"""One HTTP request and its response, passed on between a client and a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sandbox_kernel.gateway.byte_source import ByteSource
from sandbox_kernel.gateway.http_body import END_OF_CHUNKS, chunk, pieces_of
from sandbox_kernel.gateway.http_head import (
    UNTIL_CLOSE,
    BadHead,
    Body,
    Headers,
    ResponseHead,
    body_of_response,
    take_response,
    write_request,
    write_response,
)
from sandbox_kernel.gateway.proxy_protocol import Request
from sandbox_kernel.gateway.refusals import PeerClosed, Refusal
from sandbox_kernel.gateway.relay import Counts, Wire, relay
from sandbox_kernel.gateway.rewriting import (
    MOST_SIGNED,
    Filter,
    Follows,
    Rewriting,
    RewrittenRequest,
    RewrittenResponse,
)
from sandbox_kernel.gateway.watch import Watch

_MOST_INTERIM = 16
_WEBSOCKET: Headers = (("connection", "Upgrade"), ("upgrade", "websocket"))
_CHUNKED: Headers = (("transfer-encoding", "chunked"),)
_CLOSE: Headers = (("connection", "close"),)


class ServerClosed(Refusal):
    """The server closed the connection without an answer."""

    def __init__(self, why: str = "the server closed the connection without an answer") -> None:
        super().__init__(502, why)


class Exchange:
    """Passes on one request and its response. After ``run``, the attributes say whether either
    connection can be used again; ``answered`` whether the client has got any of the response."""

    def __init__(
        self,
        request: Request,
        body: Body,
        client: Wire,
        server: Wire,
        counts: Counts,
        watch: Watch,
        rewriting: Rewriting,
        rewritten: RewrittenRequest,
    ) -> None:
        self._request = request
        self._rewriting = rewriting
        self._rewritten = rewritten
        self._body = body
        self._client = client
        self._server = server
        self._counts = counts
        self._watch = watch
        self._whole: bytes | None = None
        """The request's body, if it had to be read before the request could be sent."""
        self._upload: asyncio.Task[None] | None = None
        self._upload_failed: Exception | None = None
        self.answered = False
        self.keep_client = False
        self.keep_server = False

    async def run(self) -> None:
        """Refusal, PeerClosed or OSError if it cannot be completed: then both connections are of
        no use any more, and unless ``answered``, the client can be told."""
        try:
            await self._send_head()
            if not self._body.is_empty:
                self._upload = asyncio.create_task(self._send_body())
            response = await self._response()
            if response.status == 101:
                await self._switch(response)
            else:
                await self._pass_response(response)
        except (Refusal, PeerClosed, OSError):
            if self._upload_failed is not None and not self.answered:
                raise self._upload_failed from None
            raise
        finally:
            if self._upload is not None:
                self._upload.cancel()
                await asyncio.gather(self._upload, return_exceptions=True)

    async def _send_head(self) -> None:
        head, rewritten = self._request.head, self._rewritten
        if rewritten.sign is not None:
            self._whole = await self._read_whole()
            headers = rewritten.sign(self._whole)
        else:
            headers = rewritten.headers
        framing: Headers = ()
        if self._whole is not None:
            framing = (("content-length", str(len(self._whole))),) if self._whole else ()
        elif self._as_chunks:
            framing = _CHUNKED
        elif head.all("content-length"):
            framing = (("content-length", str(self._body.length)),)
        if self._wants_websocket:
            framing += _WEBSOCKET
        host = self._request.host
        written = write_request(head.method, rewritten.path_and_query, host, headers + framing)
        await self._to_server(written)

    @property
    def _as_chunks(self) -> bool:
        """Whether the body goes to the server in chunks: its length is not known."""
        rewritten = self._rewritten.body is not None and not self._body.is_empty
        return self._body.chunked or rewritten

    async def _read_whole(self) -> bytes:
        """The request's body, which its head depends on. Refusal; PeerClosed."""
        found = bytearray()
        if "100-continue" in self._request.head.words("expect"):
            await self._to_client(write_response(100, "Continue", ()))
        async for piece in pieces_of(self._client.source, self._body):
            found += piece
            if len(found) > MOST_SIGNED:
                most = MOST_SIGNED // (1024 * 1024)
                raise Refusal(413, f"the body is to be signed again, and longer than {most} MiB")
        return bytes(found)

    @property
    def _wants_websocket(self) -> bool:
        head = self._request.head
        return head.wants_websocket and head.method == "GET" and self._body.is_empty

    async def _send_body(self) -> None:
        """Send the request's body while the response may already arrive."""
        try:
            if self._whole is not None:
                return await self._to_server(self._whole)
            async for piece in self._filtered(
                self._client.source, self._body, self._rewritten.body
            ):
                await self._to_server(chunk(piece) if self._as_chunks else piece)
            if self._as_chunks:
                await self._to_server(END_OF_CHUNKS)
        except ServerClosed:
            pass  # it may have answered before
        except (Refusal, PeerClosed, OSError) as error:
            # The server waits for the rest of a body that will not come.
            self._upload_failed = error
            self._server.writer.transport.abort()

    async def _filtered(
        self, source: ByteSource, body: Body, filter_: Filter | None = None
    ) -> AsyncIterator[bytes]:
        """The content of a body as it is passed on, in pieces that are not empty."""
        async for piece in pieces_of(source, body):
            changed = piece if filter_ is None else filter_.feed(piece)
            if changed:
                yield changed
        if filter_ is not None and (rest := filter_.end()):
            yield rest

    async def _to_server(self, data: bytes) -> None:
        try:
            self._server.writer.write(data)
            self._counts.sent += len(data)
            await self._server.writer.drain()
        except OSError:
            raise ServerClosed from None
        self._watch.moved()

    async def _to_client(self, data: bytes) -> None:
        self._client.writer.write(data)
        self._counts.received += len(data)
        await self._client.writer.drain()
        self._watch.moved()

    async def _response(self) -> ResponseHead:
        """The head of the response. Interim ones are passed on."""
        for _ in range(_MOST_INTERIM):
            try:
                response = await self._server.source.take(take_response)
            except (PeerClosed, OSError):
                raise ServerClosed from None
            self._watch.moved()
            if response.status >= 200 or response.status == 101:
                return response
            if not self._request.head.is_old:
                seen = self._seen(response)
                await self._to_client(write_response(response.status, seen.reason, seen.headers))
        raise BadHead("too many interim responses", 502)

    def _seen(self, response: ResponseHead) -> RewrittenResponse:
        """What the client may see of a response. Refusal."""
        target = self._request.target
        follows = Follows.WEBSOCKET if response.status == 101 else Follows.BODY
        return self._rewriting.response(
            target, response.end_to_end(), response.reason, follows=follows
        )

    async def _switch(self, response: ResponseHead) -> None:
        if not self._wants_websocket or not response.wants_websocket:
            raise BadHead("the server switched to a protocol that was not asked for", 502)
        seen = self._seen(response)
        self.answered = True
        await self._to_client(write_response(101, seen.reason, seen.headers + _WEBSOCKET))
        client, server = self._client, self._server
        await relay(client, server, self._counts, self._watch, downwards_filter=seen.body)

    async def _pass_response(self, response: ResponseHead) -> None:
        request = self._request.head
        body = body_of_response(response, request.method)
        as_chunks = body.chunked and not request.is_old
        self.keep_client = not (request.is_last or body == UNTIL_CLOSE)
        seen = self._seen(response)
        headers = seen.headers + self._framing_for_client(response, body, as_chunks)
        self.answered = True
        await self._to_client(write_response(response.status, seen.reason, headers))
        await self._pass_body(body, as_chunks, seen.body)
        sent = self._upload is None or (self._upload.done() and self._upload_failed is None)
        self.keep_client = self.keep_client and sent
        closing = "close" in response.words("connection")
        self.keep_server = sent and not (response.is_old or closing or body == UNTIL_CLOSE)

    def _framing_for_client(self, response: ResponseHead, body: Body, as_chunks: bool) -> Headers:
        framing: Headers = () if self.keep_client else _CLOSE
        if as_chunks:
            return framing + _CHUNKED
        if not body.is_empty:
            length = str(body.length) if body.length else ""
        elif self._request.head.method == "HEAD" or response.status == 304:
            length = "".join(response.all("content-length"))  # what the body would have been
        else:
            length = "" if response.status == 204 else "0"
        return (*framing, ("content-length", length)) if length else framing

    async def _pass_body(self, body: Body, as_chunks: bool, filter_: Filter | None) -> None:
        try:
            async for piece in self._filtered(self._server.source, body, filter_):
                await self._to_client(chunk(piece) if as_chunks else piece)
        except PeerClosed:
            raise ServerClosed("the server closed the connection within its answer") from None
        if as_chunks:
            await self._to_client(END_OF_CHUNKS)
