"""Forwards HTTP/1: each request of a connection is decided on its own."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sandbox_kernel.gateway.answers import error_answer
from sandbox_kernel.gateway.closing import close, reset
from sandbox_kernel.gateway.http_exchange import Exchange, ServerClosed
from sandbox_kernel.gateway.http_head import (
    BadHead,
    Body,
    RequestHead,
    body_of_request,
    take_request,
)
from sandbox_kernel.gateway.names import Target
from sandbox_kernel.gateway.proxy_protocol import Request, direct_request, proxied_request
from sandbox_kernel.gateway.refusals import PeerClosed, Refusal
from sandbox_kernel.gateway.relay import Wire
from sandbox_kernel.gateway.rewriting import RewrittenRequest
from sandbox_kernel.gateway.service import Passage, Service
from sandbox_kernel.gateway.watch import Watch

_SENT_AGAIN = ("GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE")
"""Methods of which a second time does what the first has done."""


@dataclass
class _Server:
    """The connection that the last request used."""

    target: Target
    wire: Wire


class HttpForwarder:
    """Serves the requests of one client's connection, one after the other.

    With a ``target``, the connection is for that one alone, and requests name only a path; without,
    they are those of a proxy's client, with whole URLs. ``scheme`` is https where TLS was ended;
    ``dial`` connects to the server of a request.
    """

    def __init__(
        self,
        service: Service,
        client: Wire,
        target: Target | None = None,
        *,
        scheme: str = "http",
        dial: Callable[[Passage], Awaitable[Wire]] | None = None,
    ) -> None:
        self._service = service
        self._client = client
        self._target = target
        self._scheme = scheme
        self._dial = dial or service.dial
        self._server: _Server | None = None

    async def serve(self, first: RequestHead | None = None) -> None:
        """Serve until the client has no more requests, or one of them broke the connection. The
        caller closes the client's. ``first`` is a head that was already read."""
        try:
            goes_on = True
            if first is not None:
                goes_on = await self._serve_head(first)
            while goes_on and await self._client.source.wait(seconds=self._service.limits.idle):
                goes_on = await self._serve_one()
        finally:
            await self._drop_server()

    async def _serve_one(self) -> bool:
        try:
            head = await self._client.source.take(take_request, seconds=self._service.limits.head)
        except Refusal as refusal:
            passage = Passage(target=self._target)
            return await self._refuse(passage, refusal, to_head=False)
        except PeerClosed:
            return False
        return await self._serve_head(head)

    async def _serve_head(self, head: RequestHead) -> bool:
        """Serve one request; whether the connection can go on."""
        passage = Passage(target=self._target, method=head.method)
        to_head = head.method == "HEAD"
        try:
            request, body = self._read(head), body_of_request(head)
            passage.target, passage.path = request.target, request.path
            decision = self._service.gate.request(
                request.target, request.target.port, head.method, request.path
            )
            passage.decision = decision
            if not decision.allowed:
                refusal = decision.refusal(request.target)
                keep = body.is_empty and not head.is_last
                return await self._refuse(passage, refusal, to_head=to_head, keep=keep)
            rewritten = self._rewritten(request)
            passage.secrets = rewritten.secrets
        except Refusal as refusal:
            return await self._refuse(passage, refusal, to_head=to_head)
        return await self._pass_on(request, rewritten, body, passage)

    def _rewritten(self, request: Request) -> RewrittenRequest:
        head = request.head
        headers = head.end_to_end(leave_out=("host",))
        return self._service.rewriting.request(
            *(request.target, head.method, request.path_and_query, headers),
            secure=request.scheme == "https",
        )

    def _read(self, head: RequestHead) -> Request:
        if self._target is not None:
            return direct_request(head, self._target, self._scheme)
        if head.method == "CONNECT":
            raise BadHead("CONNECT after another request")
        return proxied_request(head)

    async def _pass_on(
        self, request: Request, rewritten: RewrittenRequest, body: Body, passage: Passage
    ) -> bool:
        exchange: Exchange | None = None
        try:
            async with contextlib.AsyncExitStack() as held:
                watch = await held.enter_async_context(Watch(self._service.limits.idle))
                held.enter_context(self._service.under_way(passage, watch))
                if rewritten.sign is not None and not body.is_empty:
                    await held.enter_async_context(self._service.whole_bodies)
                reused = await self._connect(request, body, passage)
                exchange = self._exchange(request, rewritten, body, passage, watch)
                try:
                    await exchange.run()
                except ServerClosed:
                    if not reused or exchange.answered:
                        raise
                    # An idle connection that the server had closed by now.
                    await self._drop_server()
                    await self._connect(request, body, passage)
                    exchange = self._exchange(request, rewritten, body, passage, watch)
                    await exchange.run()
        except (Refusal, TimeoutError, PeerClosed, OSError) as error:
            await self._drop_server()
            refusal = _as_refusal(error, request.target)
            if exchange is not None and exchange.answered:
                # An orderly end could be taken for the end of the response.
                self._service.failed(passage, refusal)
                reset(self._client.writer)
                return False
            to_head = request.head.method == "HEAD"
            return await self._refuse(passage, refusal, to_head=to_head)
        self._service.allowed(passage)
        if not exchange.keep_server:
            await self._drop_server()
        return exchange.keep_client

    async def _connect(self, request: Request, body: Body, passage: Passage) -> bool:
        """Make sure that there is a connection to the request's target. True: it is a used one,
        which is taken only for requests that can be sent again and that may go to its address, and
        if the server has said nothing since: that would be taken for the answer to this one."""
        server = self._server
        again = body.is_empty and request.head.method in _SENT_AGAIN
        if server is not None and server.target == request.target and again:
            unasked = await server.wire.source.wait(seconds=0)
            if not unasked and self._service.may_use(passage, server.wire):
                return True
        await self._drop_server()
        self._server = _Server(request.target, await self._dial(passage))
        return False

    def _exchange(
        self,
        request: Request,
        rewritten: RewrittenRequest,
        body: Body,
        passage: Passage,
        watch: Watch,
    ) -> Exchange:
        assert self._server is not None
        return Exchange(
            *(request, body, self._client, self._server.wire, passage.counts, watch),
            *(self._service.rewriting, rewritten),
        )

    async def _refuse(
        self, passage: Passage, refusal: Refusal, *, to_head: bool, keep: bool = False
    ) -> bool:
        self._service.failed(passage, refusal)
        self._client.writer.write(error_answer(refusal, to_head=to_head, close=not keep))
        await self._client.writer.drain()
        return keep

    async def _drop_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await close(server.wire.writer, seconds=0.5)


def _as_refusal(error: Exception, target: Target) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, TimeoutError):
        return Refusal(504, f"{target} did not answer in time")
    if isinstance(error, PeerClosed):
        return Refusal(400, "the request's body was cut short")
    return Refusal(502, f"the connection to {target} broke")
