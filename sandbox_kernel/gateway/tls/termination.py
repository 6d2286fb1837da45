"""Ends TLS where a rule or a secret needs requests to be read: towards the client with a
certificate of the sandbox's authority, towards the server with full verification."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Sequence

from sandbox_kernel.gateway import tls_hello
from sandbox_kernel.gateway.closing import close, close_after_answer, reset
from sandbox_kernel.gateway.http2.session import Session
from sandbox_kernel.gateway.http_forward import HttpForwarder
from sandbox_kernel.gateway.names import Target
from sandbox_kernel.gateway.proxy_protocol import Speaks, look_at_first
from sandbox_kernel.gateway.refusals import PeerClosed, Refusal
from sandbox_kernel.gateway.relay import Wire
from sandbox_kernel.gateway.service import Passage, Service
from sandbox_kernel.gateway.tls import roots
from sandbox_kernel.gateway.tls.authority import Authority
from sandbox_kernel.gateway.tls.stream import TlsStream

log = logging.getLogger(__name__)

H2, HTTP_1 = "h2", "http/1.1"
_TRUST_AGAIN = 300.0
Trust = Callable[[], ssl.SSLContext]


class Terminator:
    """Belongs to one gateway. ``trust`` makes contexts for connections to servers."""

    def __init__(self, service: Service, authority: Authority, trust: Trust | None = None) -> None:
        self._service = service
        self._authority = authority
        self._trust = _Trusted(trust or roots.for_servers)

    def concerns(self, target: Target) -> bool:
        """Whether connections to this target must be read."""
        service = self._service
        return service.gate.reads_requests(target) or service.rewriting.concerns(target)

    async def serve(
        self,
        client: Wire,
        server: Wire,
        target: Target,
        check: Callable[[tls_hello.FirstBytes], None],
    ) -> bool:
        """Serve a client of the target, to which ``server`` is connected, if what it speaks can be
        read. False: it cannot, or nobody reads it, and nothing was taken. ``check`` raises for a
        client that asks for another host. Refusal; PeerClosed and OSError if a side broke."""
        partial = self._service.gate.is_partial(target)
        reads = partial or self._service.rewriting.concerns(target)
        if not await self._client_begins(client, server, patient=not partial):
            return False
        first = await client.source.take(tls_hello.look_at, seconds=self._service.limits.head)
        if first.is_tls:
            check(first)
            await self._serve_tls(client, server, target, first)
        elif reads and look_at_first(client.source.buffer) is Speaks.HTTP:
            dial = _Dial(self._service, server)
            await HttpForwarder(self._service, client, target, dial=dial).serve()
            await close_after_answer(client)
        else:
            return False
        return True

    async def _client_begins(self, client: Wire, server: Wire, *, patient: bool) -> bool:
        """Wait until one of them says something. Whether it is the client."""
        limits = self._service.limits
        waiting = [asyncio.create_task(side.source.wait()) for side in (client, server)]
        try:
            seconds = limits.idle if patient else limits.head
            done, _ = await asyncio.wait(
                waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not done:
            raise Refusal(408, f"nothing was said within {seconds:g} s")
        return bool(client.source.buffer)

    async def _serve_tls(
        self, client: Wire, server: Wire, target: Target, hello: tls_hello.FirstBytes
    ) -> None:
        offered = [name.decode("latin-1") for name in hello.protocols]
        usable = [name for name in (H2, HTTP_1) if name in offered]
        if offered and not usable:
            raise Refusal(403, f"egress denied: {target} (the client offers no HTTP inside TLS)")
        upstream = _Upstream(self._service, target, self._trust, server)
        try:
            protocol = await upstream.begin(usable or [HTTP_1])
            inside = await self._greet(client, target, protocol if offered else None)
            try:
                await self._serve_inside(inside, target, protocol, upstream)
            except (PeerClosed, OSError) as error:
                log.debug("A client's connection to %s ended: %s", target, error)
                reset(inside.writer)
        finally:
            await upstream.close()

    async def _greet(self, client: Wire, target: Target, protocol: str | None) -> Wire:
        context = self._authority.for_clients(target, protocol)
        stream = TlsStream(client, context, server_side=True, strict_end=False)
        try:
            await stream.handshake(self._service.limits.head)
        except (ssl.SSLError, TimeoutError) as error:
            why = getattr(error, "reason", None) or "it took too long"
            raise Refusal(
                525,
                f"the client does not accept the gateway's certificate for {target} ({why}); it "
                f"must trust the bundle that SSL_CERT_FILE names",
            ) from None
        return stream.wire

    async def _serve_inside(
        self, client: Wire, target: Target, protocol: str, upstream: _Upstream
    ) -> None:
        if protocol == H2:
            await Session(self._service, client, target, upstream).serve()
            await close(client.writer)
        else:
            forwarder = HttpForwarder(self._service, client, target, scheme="https", dial=upstream)
            await forwarder.serve()
            await close_after_answer(client)


class _Trusted:
    """What this machine trusts, read again now and then: that may change."""

    def __init__(self, make: Trust) -> None:
        self._make = make
        self._context: ssl.SSLContext | None = None
        self._made = 0.0

    async def __call__(self) -> ssl.SSLContext:
        if self._context is None or time.monotonic() > self._made + _TRUST_AGAIN:
            self._context = await asyncio.to_thread(self._make)
            self._made = time.monotonic()
        return self._context


class _Dial:
    """Connections to a target, of which there is one already."""

    def __init__(self, service: Service, first: Wire) -> None:
        self._service = service
        self._first: Wire | None = first

    async def __call__(self, passage: Passage) -> Wire:
        first, self._first = self._first, None
        if first is not None and self._service.may_use(passage, first):
            return first
        return await self._service.dial(passage)


class _Upstream:
    """Connections with TLS to the target of one client's connection."""

    def __init__(self, service: Service, target: Target, trust: _Trusted, first: Wire) -> None:
        self._service = service
        self._target = target
        self._trust = trust
        self._raw: Wire | None = first
        self._protocol = HTTP_1
        self._ready: Wire | None = None
        self._failure: Refusal | None = None

    async def begin(self, protocols: Sequence[str]) -> str:
        """Make the first connection; what to speak with the client. A failure is kept for the
        requests, so that each is answered with it."""
        self._protocol = HTTP_1 if HTTP_1 in protocols else H2
        try:
            assert self._raw is not None
            stream = await self._secured(self._raw, protocols)
            agreed = stream.protocol or HTTP_1
            if agreed not in protocols:
                raise Refusal(502, f"{self._target} speaks no HTTP/2, and the client nothing else")
            self._ready, self._protocol = stream.wire, agreed
        except Refusal as refusal:
            self._failure = refusal
        return self._protocol

    async def __call__(self, passage: Passage) -> Wire:
        """A connection for a request that was allowed. Refusal."""
        if self._failure is not None:
            raise self._failure
        ready, self._ready = self._ready, None
        if ready is not None:
            if self._service.may_use(passage, ready):
                return ready
            reset(ready.writer)
        raw = await self._service.dial(passage)
        try:
            stream = await self._secured(raw, [self._protocol])
        except BaseException:
            reset(raw.writer)
            raise
        if (stream.protocol or HTTP_1) != self._protocol:
            reset(raw.writer)
            raise Refusal(502, f"{self._target} does not speak {self._protocol} any more")
        return stream.wire

    async def close(self) -> None:
        """Close what no request has used."""
        if self._ready is not None:
            await close(self._ready.writer, seconds=0.5)

    async def _secured(self, raw: Wire, protocols: Sequence[str]) -> TlsStream:
        target = self._target
        try:
            context = await self._trust()
            context.set_alpn_protocols(list(protocols))
            stream = TlsStream(raw, context, server_side=False, server_hostname=target.host)
            await stream.handshake(self._service.limits.head)
        except ssl.SSLCertVerificationError as error:
            why = error.verify_message
            raise Refusal(
                502, f"the certificate of {target} is not trusted by this machine: {why}"
            ) from None
        except TimeoutError:
            raise Refusal(504, f"{target} did not begin TLS in time") from None
        except OSError as error:
            why = getattr(error, "reason", None) or error.strerror or str(error)
            raise Refusal(502, f"TLS with {target} failed: {why}") from None
        return stream
