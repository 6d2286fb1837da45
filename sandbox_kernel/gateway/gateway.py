"""The gateway: serves connections, one at a time or many at once, under one live policy."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

from sandbox_kernel.gateway import socks, tls_hello
from sandbox_kernel.gateway.addresses import Dialler, Resolve
from sandbox_kernel.gateway.answers import ESTABLISHED, error_answer
from sandbox_kernel.gateway.audit import Sink
from sandbox_kernel.gateway.closing import close, close_after_answer, reset
from sandbox_kernel.gateway.decisions import NEEDS_EXTRA, UNREADABLE, Decision
from sandbox_kernel.gateway.gate import Gate
from sandbox_kernel.gateway.http_forward import HttpForwarder
from sandbox_kernel.gateway.http_head import RequestHead, take_request
from sandbox_kernel.gateway.names import Address, NameRefused, Target, read_target
from sandbox_kernel.gateway.proxy_protocol import Speaks, connect_target, look_at_first
from sandbox_kernel.gateway.refusals import PeerClosed, Refusal
from sandbox_kernel.gateway.relay import Wire, relay
from sandbox_kernel.gateway.rewriting import Rewriting
from sandbox_kernel.gateway.service import Limits, Passage, Service
from sandbox_kernel.gateway.watch import Watch

if TYPE_CHECKING:
    from sandbox_kernel.gateway.tls.authority import Authority
    from sandbox_kernel.gateway.tls.termination import Terminator

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
_HTTP_PORT = 80
_FULL = Refusal(503, "the gateway serves as many connections as it may")


class Gateway:
    """Lets connections out of one sandbox, as its gate decides.

    ``audit`` gets an event for each connection or request (audit.egress_event). ``private_names``
    are hosts that the owner of this machine has set up, such as a package index: they may have
    private addresses, and as ``name:port`` also this machine's. Belongs to one event loop.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        audit: Sink,
        resolve: Resolve | None = None,
        private_names: Collection[str] = (),
        max_connections: int = MAX_CONNECTIONS,
        limits: Limits | None = None,
        sandbox: str | None = None,
        is_own: Callable[[Address], bool] | None = None,
        rewriting: Rewriting | None = None,
    ) -> None:
        self._dialler = Dialler(resolve=resolve, private_names=private_names, is_own=is_own)
        self._service = Service(gate, self._dialler, audit, limits or Limits(), sandbox, rewriting)
        self._terminator: Terminator | None = None
        self._max_connections = max_connections
        self._connections = 0

    def end_tls(
        self, authority: Authority, trust: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        """From now on, end TLS where a rule or a secret needs requests to be read. The clients must
        trust the authority. ``trust`` makes contexts for connections to servers (default: what
        this machine trusts). Needs the extra ``gateway``."""
        from sandbox_kernel.gateway.tls.termination import Terminator  # lazy: the extra

        self._terminator = Terminator(self._service, authority, trust)

    @property
    def ends_tls(self) -> bool:
        return self._terminator is not None

    @property
    def private_names(self) -> Collection[str]:
        return self._dialler.private_names

    @private_names.setter
    def private_names(self, names: Collection[str]) -> None:
        self._dialler.private_names = names

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._connections

    def close(self) -> None:
        """End what is under way; the gate no longer knows this gateway."""
        self._service.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client of the proxy port, HTTP or SOCKS, to its end. Raises nothing but
        CancelledError, and closes the connection in any case."""
        wire = Wire.of(reader, writer)
        await self._guarded(wire, Passage(), lambda: self._serve_proxy(wire))

    async def serve_transparent(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, port: int
    ) -> None:
        """Serve a client that believes to be connected to this name and port. As ``serve``."""
        wire = Wire.of(reader, writer)
        try:
            target = read_target(name, port)
        except NameRefused as refusal:
            self._service.failed(Passage(), refusal)
            return reset(writer)
        await self._guarded(wire, Passage(target), lambda: self._serve_target(wire, target))

    async def _guarded(
        self, wire: Wire, passage: Passage, serve: Callable[[], Awaitable[None]]
    ) -> None:
        if self._connections >= self._max_connections:
            self._service.failed(passage, _FULL)
            return await _turn_away(wire, passage.target)
        self._connections += 1
        try:
            await serve()
            await close(wire.writer)
        except (Refusal, PeerClosed, OSError) as error:
            # The client's own connection broke: nobody is left to be told.
            log.debug("A client's connection ended: %s", error)
        except Exception as error:
            log.exception("Serving a connection failed.")
            self._service.failed(passage, error)
        finally:
            self._connections -= 1
            if not wire.writer.is_closing():
                reset(wire.writer)

    async def _serve_proxy(self, wire: Wire) -> None:
        limit = self._service.limits.head
        try:
            speaks = await wire.source.take(look_at_first, seconds=limit)
            if speaks is Speaks.SOCKS5:
                return await self._serve_socks(wire)
            if speaks is Speaks.SOCKS4:
                refusal = Refusal(400, "SOCKS4 is not served; use SOCKS5 (socks5h://)")
                return await self._answer(wire, Passage(), refusal, socks.SOCKS4_REJECTED)
            if speaks is Speaks.UNKNOWN:
                raise Refusal(400, "this is neither HTTP nor SOCKS5")
            head = await wire.source.take(take_request, seconds=limit)
        except Refusal as refusal:
            return await self._answer(wire, Passage(), refusal, error_answer(refusal))
        if head.method == "CONNECT":
            await self._serve_connect(wire, head)
        else:
            await HttpForwarder(self._service, wire).serve(head)
            await close_after_answer(wire)

    async def _serve_connect(self, wire: Wire, head: RequestHead) -> None:
        passage = Passage(method="CONNECT")
        try:
            passage.target = connect_target(head)
        except Refusal as refusal:
            return await self._answer(wire, passage, refusal, error_answer(refusal))
        passage.method = None  # of the requests inside nothing is known
        await self._tunnel(wire, passage, ESTABLISHED, error_answer)

    async def _serve_socks(self, wire: Wire) -> None:
        limit = self._service.limits.head
        passage = Passage()
        try:
            if not await wire.source.take(socks.take_greeting, seconds=limit):
                refusal = Refusal(400, "a SOCKS client that wants to log in")
                return await self._answer(wire, passage, refusal, socks.NO_METHOD)
            wire.writer.write(socks.NO_AUTHENTICATION)
            passage.target = await wire.source.take(socks.take_request, seconds=limit)
        except Refusal as refusal:
            return await self._answer(wire, passage, refusal, socks.reply_to(refusal))
        await self._tunnel(wire, passage, socks.reply(socks.Reply.SUCCEEDED), socks.reply_to)

    async def _answer(self, wire: Wire, passage: Passage, refusal: Refusal, answer: bytes) -> None:
        self._service.failed(passage, refusal)
        wire.writer.write(answer)
        await close_after_answer(wire)

    async def _tunnel(
        self,
        wire: Wire,
        passage: Passage,
        welcome: bytes,
        answer: Callable[[Refusal], bytes],
    ) -> None:
        """Connect a client to the target that it has named."""
        target = passage.target
        assert target is not None
        if target.port == _HTTP_PORT and self._service.gate.may_allow_some(target):
            # Plain HTTP can be read, so each request is decided.
            wire.writer.write(welcome)
            await HttpForwarder(self._service, wire, target).serve()
            return await close_after_answer(wire)
        try:
            await self._opaque(wire, passage, welcome)
        except Refusal as refusal:
            if passage.established:
                return reset(wire.writer)
            wire.writer.write(answer(refusal))
            await close_after_answer(wire)

    async def _serve_target(self, wire: Wire, target: Target) -> None:
        if target.port == _HTTP_PORT:
            await HttpForwarder(self._service, wire, target).serve()
            return await close_after_answer(wire)
        try:
            await self._opaque(wire, Passage(target), b"")
        except Refusal:
            reset(wire.writer)

    async def _opaque(self, wire: Wire, passage: Passage, welcome: bytes) -> None:
        """Pass on a connection whose content nobody reads, or have it read where a rule or a
        secret needs that. Refusal, which is recorded."""
        target = passage.target
        assert target is not None
        server: Wire | None = None

        def establish() -> None:
            passage.established = True
            wire.writer.write(welcome)

        try:
            reads = self._terminator is not None and self._terminator.concerns(target)
            if self._terminator is not None and reads:
                _decide(passage, target, self._service.gate.some(target))
                server = await self._service.dial(passage)
                establish()
                if await self._terminator.serve(wire, server, target, _check_hello(target)):
                    return
            why_unread = UNREADABLE if reads else NEEDS_EXTRA
            _decide(passage, target, self._service.gate.connection(target, why_unread=why_unread))
            async with Watch(self._service.limits.opaque) as watch:
                with self._service.under_way(passage, watch):
                    if server is None:
                        server = await self._service.dial(passage)
                        establish()
                    else:
                        self._service.use(passage, server)

                    async def first() -> None:
                        if await wire.source.wait():
                            limit = self._service.limits.head
                            _check_hello(target)(
                                await wire.source.take(tls_hello.look_at, seconds=limit)
                            )

                    await relay(wire, server, passage.counts, watch, first=first)
        except Refusal as refusal:
            self._service.failed(passage, refusal)
            raise
        except (PeerClosed, OSError) as error:  # TimeoutError: idle
            self._service.failed(passage, error)
            idle = isinstance(error, TimeoutError)
            raise Refusal(504 if idle else 502, f"the connection to {target} broke") from None
        else:
            self._service.allowed(passage)
            await close(server.writer)
        finally:
            if server is not None and not server.writer.is_closing():
                reset(server.writer)


def _decide(passage: Passage, target: Target, decision: Decision) -> None:
    passage.decision = decision
    if not decision.allowed:
        raise decision.refusal(target)


def _check_hello(target: Target) -> Callable[[tls_hello.FirstBytes], None]:
    """Refuses a client that may talk with this target and begins TLS with another."""

    def check(found: tls_hello.FirstBytes) -> None:
        if found.server_name is None or target.address is not None:
            return
        if read_target(found.server_name, target.port) != target:
            name = found.server_name[:80].decode("latin-1")
            raise Refusal(421, f"egress denied: TLS for {name!a} on a connection for {target}")

    return check


async def _turn_away(wire: Wire, target: Target | None) -> None:
    if target is not None and target.port != _HTTP_PORT:
        return reset(wire.writer)
    wire.writer.write(error_answer(_FULL))
    await close_after_answer(wire)
