"""One HTTP request and its response, passed on between a client and a server."""

from __future__ import annotations

import asyncio

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
    ) -> None:
        self._request = request
        self._body = body
        self._client = client
        self._server = server
        self._counts = counts
        self._watch = watch
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
        request, head = self._request, self._request.head
        framing: Headers = ()
        if self._body.chunked:
            framing = _CHUNKED
        elif head.all("content-length"):
            framing = (("content-length", str(self._body.length)),)
        if self._wants_websocket:
            framing += _WEBSOCKET
        headers = head.end_to_end(leave_out=("host",)) + framing
        await self._to_server(
            write_request(head.method, request.path_and_query, request.host, headers)
        )

    @property
    def _wants_websocket(self) -> bool:
        head = self._request.head
        return head.wants_websocket and head.method == "GET" and self._body.is_empty

    async def _send_body(self) -> None:
        """Send the request's body while the response may already arrive."""
        try:
            async for piece in pieces_of(self._client.source, self._body):
                await self._to_server(chunk(piece) if self._body.chunked else piece)
            if self._body.chunked:
                await self._to_server(END_OF_CHUNKS)
        except ServerClosed:
            pass  # it may have answered before
        except (Refusal, PeerClosed, OSError) as error:
            # The server waits for the rest of a body that will not come.
            self._upload_failed = error
            self._server.writer.transport.abort()

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
                interim = write_response(response.status, response.reason, response.end_to_end())
                await self._to_client(interim)
        raise BadHead("too many interim responses", 502)

    async def _switch(self, response: ResponseHead) -> None:
        if not self._wants_websocket or not response.wants_websocket:
            raise BadHead("the server switched to a protocol that was not asked for", 502)
        headers = response.end_to_end() + _WEBSOCKET
        self.answered = True
        await self._to_client(write_response(101, response.reason, headers))
        await relay(self._client, self._server, self._counts, self._watch)

    async def _pass_response(self, response: ResponseHead) -> None:
        request = self._request.head
        body = body_of_response(response, request.method)
        as_chunks = body.chunked and not request.is_old
        self.keep_client = not (request.is_last or body == UNTIL_CLOSE)
        headers = response.end_to_end() + self._framing_for_client(response, body, as_chunks)
        self.answered = True
        head = write_response(response.status, response.reason, headers)
        await self._to_client(head)
        await self._pass_body(body, as_chunks)
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

    async def _pass_body(self, body: Body, as_chunks: bool) -> None:
        try:
            async for piece in pieces_of(self._server.source, body):
                await self._to_client(chunk(piece) if as_chunks else piece)
        except PeerClosed:
            raise ServerClosed("the server closed the connection within its answer") from None
        if as_chunks:
            await self._to_client(END_OF_CHUNKS)
