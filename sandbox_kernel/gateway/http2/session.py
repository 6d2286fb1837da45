"""A client's HTTP/2 connection: each of its requests is decided, and passed on to the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from sandbox_kernel.gateway.closing import close
from sandbox_kernel.gateway.http2 import heads
from sandbox_kernel.gateway.http2.exchange import Exchange, refuse
from sandbox_kernel.gateway.http2.peer import Block, Peer, Stream
from sandbox_kernel.gateway.names import Target
from sandbox_kernel.gateway.refusals import PeerClosed, Refusal
from sandbox_kernel.gateway.relay import Wire
from sandbox_kernel.gateway.service import Passage, Service
from sandbox_kernel.gateway.watch import Watch

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 4
"""To the server: one that takes requests, and others that finish theirs."""


class Session:
    """``connect`` gives connections to the target, on which HTTP/2 is spoken."""

    def __init__(
        self,
        service: Service,
        client: Wire,
        target: Target,
        connect: Callable[[Passage], Awaitable[Wire]],
    ) -> None:
        self._service = service
        self._target = target
        self._connect = connect
        self._client = Peer(client, service.budget, self._begin)
        self._server: tuple[Peer, Wire] | None = None
        self._connecting = asyncio.Lock()
        self._requests: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._watch: Watch | None = None

    async def serve(self) -> None:
        """Serve the client until it goes or is idle. The caller closes its connection."""
        try:
            async with Watch(self._service.limits.idle) as self._watch:
                await self._client.run()
        except PeerClosed:
            pass
        except TimeoutError:
            self._client.say_goodbye()
        except Refusal as refusal:
            self._service.failed(Passage(self._target), refusal)
        finally:
            # Those that send answers first; each of their streams is broken by now.
            for tasks in (self._requests, self._connections):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, stream: Stream, block: Block) -> None:
        self._moved()
        heads_kept = self._service.heads
        may_keep = not heads_kept.exceeded
        size = sum(len(name) + len(value) for name, value in block.headers) if may_keep else 0
        heads_kept.keep(size)
        task = asyncio.create_task(self._serve(stream, block, may_keep))
        self._requests.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._requests.discard(task)
            heads_kept.release(size)

        task.add_done_callback(done)

    def _moved(self) -> None:
        if self._watch is not None:
            self._watch.moved()

    async def _serve(self, stream: Stream, block: Block, may_keep: bool) -> None:
        passage = Passage(target=self._target)
        to_head = False
        try:
            if not may_keep:
                raise Refusal(503, "the gateway keeps the heads of as many requests as it may")
            request = heads.read_request(block.headers, self._target)
            to_head = request.method == "HEAD"
            passage.method, passage.path = request.method, request.path
            await self._decided(stream, request, block.ended, passage)
        except (Refusal, PeerClosed, OSError) as error:
            refusal = _as_refusal(error, self._target)
            self._service.failed(passage, refusal)
            await refuse(stream, refusal, self._service.limits.head, to_head=to_head)
        except asyncio.CancelledError:
            self._service.failed(passage, PeerClosed("the client's connection has ended"))
            raise
        except Exception as error:
            log.exception("Serving a request failed.")
            self._service.failed(passage, error)
        else:
            self._service.allowed(passage)
        finally:
            stream.on_broken = None
            stream.close()
            self._moved()

    async def _decided(
        self, stream: Stream, request: heads.Request, is_whole: bool, passage: Passage
    ) -> None:
        service, target = self._service, self._target
        decision = service.gate.request(target, target.port, request.method, request.path)
        passage.decision = decision
        if not decision.allowed:
            raise decision.refusal(target)
        rewritten = service.rewriting.request(
            target, request.method, request.path_and_query, request.headers, secure=True
        )
        passage.secrets = rewritten.secrets
        async with Watch(service.limits.idle) as watch:

            def moved() -> None:
                watch.moved()
                self._moved()

            with service.under_way(passage, watch):
                stream.on_broken = watch.end
                exchange = Exchange(
                    *(target, request, stream, is_whole, passage.counts, watch, moved),
                    service.rewriting,
                )
                async with contextlib.AsyncExitStack() as held:
                    if rewritten.sign is not None and not is_whole:
                        await held.enter_async_context(service.whole_bodies)
                    await exchange.run(rewritten, lambda: self._to_server(passage))

    async def _to_server(self, passage: Passage) -> Peer:
        """The connection to the server, a new one if there is none that takes requests, or if this
        one may not go to its address."""
        async with self._connecting:
            if self._server is not None:
                peer, wire = self._server
                if peer.accepts and self._service.may_use(passage, wire):
                    return peer
            if len(self._connections) >= _MOST_CONNECTIONS:
                raise Refusal(502, f"{self._target} ends its connections too often")
            wire = await self._connect(passage)
            peer = Peer(wire, self._service.budget)
            self._server = peer, wire
            task = asyncio.create_task(self._run(peer, wire))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            return peer

    async def _run(self, peer: Peer, wire: Wire) -> None:
        try:
            await peer.run()
        except (PeerClosed, OSError, Refusal) as error:
            log.debug("The connection to %s ended: %s", self._target, error)
        except Exception:
            log.exception("A connection to %s failed.", self._target)
        finally:
            peer.say_goodbye()
            await close(wire.writer, seconds=0.5)


def _as_refusal(error: Exception, target: Target) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, TimeoutError):
        return Refusal(504, f"{target} did not answer in time")
    return Refusal(502, f"the connection to {target} broke")
