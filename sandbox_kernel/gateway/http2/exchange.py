"""One HTTP/2 request and its response, passed on between two streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import h2.errors

from sandbox_kernel.gateway.http2 import heads
from sandbox_kernel.gateway.http2.peer import Block, Peer, Stream, StreamBroken
from sandbox_kernel.gateway.http_head import BadHead
from sandbox_kernel.gateway.names import Target
from sandbox_kernel.gateway.refusals import Refusal
from sandbox_kernel.gateway.relay import Counts
from sandbox_kernel.gateway.rewriting import (
    MOST_SIGNED,
    Filter,
    Follows,
    Rewriting,
    RewrittenRequest,
)
from sandbox_kernel.gateway.watch import Watch

_MOST_INTERIM = 16


class Exchange:
    """Passes on one request that was allowed, and its response. ``is_whole``: it has no body.
    ``moved`` is called whenever something passes."""

    def __init__(
        self,
        target: Target,
        request: heads.Request,
        client: Stream,
        is_whole: bool,
        counts: Counts,
        watch: Watch,
        moved: Callable[[], None],
        rewriting: Rewriting,
    ) -> None:
        self._target = target
        self._request = request
        self._client = client
        self._is_whole = is_whole
        self._counts = counts
        self._watch = watch
        self._moved = moved
        self._rewriting = rewriting

    async def run(
        self, rewritten: RewrittenRequest, connect: Callable[[], Awaitable[Peer]]
    ) -> None:
        """Refusal or OSError if it cannot be completed; the client's stream then says whether it
        was answered."""
        whole = await self._read_whole() if rewritten.sign is not None else None
        headers, length = rewritten.headers, self._request.length
        if whole is not None and rewritten.sign is not None:
            headers, length = rewritten.sign(whole), str(len(whole)) if whole else None
        elif rewritten.body is not None:
            length = None
        block = self._request.raw(self._target, rewritten.path_and_query, headers, length)
        ends = not whole if whole is not None else self._is_whole
        server = await (await connect()).open(block, end=ends)
        upload: asyncio.Task[None] | None = None
        try:
            if not ends:
                upload = asyncio.create_task(self._upload(server, rewritten.body, whole))
            await self._respond(server)
        finally:
            if upload is not None:
                upload.cancel()
                await asyncio.gather(upload, return_exceptions=True)
            server.close()

    async def _read_whole(self) -> bytes:
        """The request's body, which its head depends on. Refusal."""
        found = bytearray()
        while not self._is_whole and (item := await self._client.next()) is not None:
            if isinstance(item, Block):
                raise Refusal(501, "a request that is to be signed again has trailers")
            found += item.content
            self._client.took(item)
            self._moved()
            if len(found) > MOST_SIGNED:
                most = MOST_SIGNED // (1024 * 1024)
                raise Refusal(413, f"the body is to be signed again, and longer than {most} MiB")
            if item.ended:
                break
        return bytes(found)

    async def _upload(self, server: Stream, body: Filter | None, whole: bytes | None) -> None:
        try:
            if whole is not None:
                self._sent(len(whole))
                return await server.send(whole, end=True)
            await self._copy(self._client, server, body, 400, self._sent)
        except StreamBroken:
            pass  # the client's end is the watch's concern; the server may have answered before
        except Exception as error:  # noqa: BLE001  the watch raises it where it is handled
            self._watch.end(error)

    async def _respond(self, server: Stream) -> None:
        block = await self._head(server)
        response = heads.read_response(block.headers)
        seen = self._rewriting.response(self._target, response.headers, follows=Follows.HTTP_2_BODY)
        await self._client.send_block(response.raw(seen.headers), end=block.ended)
        self._moved()
        if not block.ended:
            await self._copy(server, self._client, seen.body, 502, self._received)

    async def _head(self, server: Stream) -> Block:
        """The response's. Interim ones are passed on."""
        for _ in range(_MOST_INTERIM):
            item = await server.next()
            if not isinstance(item, Block) or item.is_trailers:
                raise BadHead("the server's answer has no head", 502)
            self._moved()
            response = heads.read_response(item.headers)
            if response.status >= 200:
                return item
            seen = self._rewriting.response(self._target, response.headers)
            await self._client.send_block(response.raw(seen.headers))
        raise BadHead("too many interim responses", 502)

    async def _copy(
        self,
        source: Stream,
        sink: Stream,
        body: Filter | None,
        status: int,
        count: Callable[[int], None],
    ) -> None:
        while (item := await source.next()) is not None:
            self._moved()
            if isinstance(item, Block):
                if not item.is_trailers or not item.ended:
                    raise BadHead("headers within a body", status)
                trailers = heads.read_trailers(item.headers, status)
                if body is not None and (rest := body.end()):
                    await sink.send(rest)
                if status != 400:
                    trailers = self._rewriting.response(self._target, trailers).headers
                return await sink.send_block(heads.encoded(trailers), end=True)
            content = item.content if body is None else body.feed(item.content)
            if item.ended and body is not None:
                content += body.end()
            count(len(content))
            await sink.send(content, end=item.ended)
            source.took(item)
            self._moved()
            if item.ended:
                return
        await sink.send(body.end() if body is not None else b"", end=True)

    def _sent(self, size: int) -> None:
        self._counts.sent += size

    def _received(self, size: int) -> None:
        self._counts.received += size


async def refuse(client: Stream, refusal: Refusal, seconds: float, *, to_head: bool) -> None:
    """Answer a request that goes no further, or end the response that has begun."""
    if client.answered:
        code = h2.errors.ErrorCodes.INTERNAL_ERROR
        return client.close(refusal.code if isinstance(refusal, StreamBroken) else code)
    if isinstance(refusal, StreamBroken) and refusal.code == h2.errors.ErrorCodes.REFUSED_STREAM:
        return client.close(refusal.code)  # so that the client tries again
    text = b"" if to_head else f"{refusal}\n".encode("ascii")
    try:
        async with asyncio.timeout(seconds):
            await client.send_block(heads.refusal_block(refusal, len(text)), end=not text)
            if text:
                await client.send(text, end=True)
    except (Refusal, OSError):
        pass  # nobody is left to be told
    client.close(h2.errors.ErrorCodes.NO_ERROR)
