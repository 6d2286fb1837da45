"""What serving one connection needs, whatever it speaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sandbox_kernel.egress import ALLOW, DENY, EgressRule
from sandbox_kernel.gateway.addresses import Dialler
from sandbox_kernel.gateway.audit import Sink, egress_event
from sandbox_kernel.gateway.closing import reset
from sandbox_kernel.gateway.decisions import Decision
from sandbox_kernel.gateway.gate import Gate
from sandbox_kernel.gateway.http2.budget import Budget
from sandbox_kernel.gateway.names import Address, Target
from sandbox_kernel.gateway.refusals import Refusal
from sandbox_kernel.gateway.relay import Counts, Wire
from sandbox_kernel.gateway.rewriting import Rewriting, Unchanged
from sandbox_kernel.gateway.watch import Watch

log = logging.getLogger(__name__)

ERROR = "error"
_MOST_WHOLE_BODIES = 16
_MOST_HEADS = 16 << 20


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    head: float = 30.0
    """For the head of a request, a SOCKS request, a ClientHello."""
    idle: float = 600.0
    """For an HTTP request on which nothing moves, and between two."""
    opaque: float = math.inf
    """For a connection that nobody reads and on which nothing moves: a database session may be idle
    all night. One whose server has gone is found out by TCP (addresses.KEEPALIVE)."""


@dataclass
class Passage:
    """One connection or request under way; becomes one event of the audit."""

    target: Target | None = None
    method: str | None = None
    path: str | None = None
    decision: Decision | None = None
    address: Address | None = None
    """Of the server that it is connected to."""
    counts: Counts = field(default_factory=Counts)
    started: float = field(default_factory=time.monotonic)
    secrets: Sequence[str] = ()
    """Names of those that were put in; may grow as long as it lasts."""
    established: bool = False
    """The client was told that it is connected."""


class Service:
    """The live policy, the dialler and the audit of one gateway, and what is under way in it."""

    def __init__(
        self,
        gate: Gate,
        dialler: Dialler,
        audit: Sink,
        limits: Limits,
        sandbox: str | None,
        rewriting: Rewriting | None = None,
    ) -> None:
        self.gate = gate
        self.dialler = dialler
        self.limits = limits
        self.rewriting = rewriting or Unchanged()
        self.budget = Budget()
        self.heads = Budget(_MOST_HEADS)
        """For the heads of requests by HTTP/2 that are under way, of which there may be many."""
        self.whole_bodies = asyncio.Semaphore(_MOST_WHOLE_BODIES)
        """For requests whose body is in memory before they are sent."""
        self._audit = audit
        self._sandbox = sandbox
        self._under_way: dict[Watch, Passage] = {}
        self._forget = gate.on_changed(self._look_again)

    def close(self) -> None:
        """End everything under way."""
        self._forget()
        for watch in list(self._under_way):
            watch.end(Refusal(503, "the gateway is closed"))

    async def dial(self, passage: Passage) -> Wire:
        """A connection to the passage's target, which its decision has allowed. Refusal."""
        assert passage.target is not None
        before, (rules, not_at) = self.gate.policy, _allowed_by(passage.decision)
        reader, writer, address = await self.dialler.dial(passage.target, *rules, not_at=not_at)
        passage.address = address
        if self.gate.policy is not before and passage in self._under_way.values():
            try:
                self._check_again(passage)
            except Refusal:
                reset(writer)
                raise
        return Wire.of(reader, writer).at(address)

    def use(self, passage: Passage, server: Wire) -> None:
        """Let a passage, which its decision has allowed, have a connection to its target that was
        made for another one. Refusal if it may not be to that address."""
        assert passage.target is not None
        if server.address is not None:
            rules, not_at = _allowed_by(passage.decision)
            self.dialler.check([server.address], passage.target, *rules, not_at=not_at)
        passage.address = server.address

    def may_use(self, passage: Passage, server: Wire) -> bool:
        """As ``use``, without a reason."""
        with contextlib.suppress(Refusal):
            self.use(passage, server)
            return True
        return False

    @contextlib.contextmanager
    def under_way(self, passage: Passage, watch: Watch) -> Iterator[None]:
        """While this lasts, a change of rules that forbids the passage ends it."""
        self._under_way[watch] = passage
        try:
            yield
        finally:
            del self._under_way[watch]

    def _look_again(self) -> None:
        for watch, passage in list(self._under_way.items()):
            try:
                self._check_again(passage)
            except Refusal as refusal:
                watch.end(refusal)

    def _check_again(self, passage: Passage) -> None:
        """Refusal if the rules of now forbid a passage, or the address that it is connected to."""
        target, found = passage.target, passage.address
        if target is None:
            return
        read = None if passage.method is None else (passage.method, passage.path or "/")
        decision = self.gate.judge(target, read)
        allowed = decision.allowed
        if allowed and found is not None:
            rules, not_at = _allowed_by(decision)
            try:
                self.dialler.check([found], target, *rules, not_at=not_at)
            except Refusal:
                allowed = False
        if not allowed:
            raise Refusal(403, f"egress denied: {target} (the rules have changed)")

    def allowed(self, passage: Passage) -> None:
        """Record that a passage ended as it should."""
        reason = passage.decision.reason if passage.decision else ""
        self._record(ALLOW, passage, reason)

    def failed(self, passage: Passage, error: Exception) -> None:
        """Record that a passage was refused or broke."""
        denied = isinstance(error, Refusal) and error.is_denial
        self._record(DENY if denied else ERROR, passage, str(error) or type(error).__name__)

    def _record(self, action: str, passage: Passage, reason: str) -> None:
        target = passage.target
        event = egress_event(
            action,
            sandbox=self._sandbox,
            host=target.host if target else None,
            port=target.port if target else None,
            method=passage.method,
            path=passage.path,
            rule=passage.decision.number if passage.decision else None,
            reason=reason,
            sent=passage.counts.sent,
            received=passage.counts.received,
            seconds=time.monotonic() - passage.started,
            secrets=passage.secrets,
        )
        try:
            self._audit(event)
        except Exception:
            log.exception("The audit failed.")


def _allowed_by(
    decision: Decision | None,
) -> tuple[tuple[EgressRule | None, ...], tuple[EgressRule, ...]]:
    """What the dialler must know of a decision."""
    if decision is None:
        return (None,), ()
    return (decision.rule, *decision.outer), decision.not_at
