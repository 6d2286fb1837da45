"""The gateway of a sandbox: its rules, as they are now, and where its decisions are recorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sandbox_kernel.audit import Trail
from sandbox_kernel.audit.trail import by
from sandbox_kernel.egress import DENY, EgressPolicy
from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.gateway.audit import egress_event
from sandbox_kernel.gateway.gate import Gate
from sandbox_kernel.gateway.gateway import Gateway
from sandbox_kernel.gateway.index_logins import IndexLogins
from sandbox_kernel.gateway.presets import expand
from sandbox_kernel.gateway.tls import extra
from sandbox_kernel.kernels.cells import Cells
from sandbox_kernel.kernels.decision_log import DecisionLog
from sandbox_kernel.kernels.live_policy import IN_FORCE, Change, ChangeWatch
from sandbox_kernel.kernels.secrets_in_use import SecretsInUse
from sandbox_kernel.sandboxes.base import SandboxHandle

LOOK_EVERY = 1.0
"""Seconds between two looks for changed rules."""

log = logging.getLogger(__name__)


async def gateway_for(handle: SandboxHandle, secrets: SecretsInUse | None = None) -> WayOut:
    """For a sandbox with rules for egress. SpecError if a preset in them cannot be resolved."""
    cells = Cells(Trail.of(handle))
    decisions = DecisionLog(cells)
    gate = Gate(EgressPolicy())
    rewriting = secrets.rewriting(decisions, handle.name) if secrets is not None else None
    logins = IndexLogins(rewriting)
    gateway = Gateway(gate, audit=decisions, sandbox=handle.name, rewriting=logins)
    way_out = WayOut(gate, gateway, logins, cells, decisions, handle)
    await way_out.begin(reads=secrets is not None)
    return way_out


class WayOut:
    """What the tunnel's outlet needs of a gateway and its gate."""

    def __init__(
        self,
        gate: Gate,
        gateway: Gateway,
        logins: IndexLogins,
        cells: Cells,
        decisions: DecisionLog,
        handle: SandboxHandle,
    ) -> None:
        self.cells = cells
        self.decisions = decisions
        self.policy = EgressPolicy()
        """The rules in force, as they were written: presets stand for themselves."""
        self.changed = False
        """They are other rules than those that the sandbox was made with."""
        self._gate = gate
        self._gateway = gateway
        self._logins = logins
        self._sandbox = handle.name
        self._handle = handle
        self._made_with = handle.spec.egress
        self._changes = ChangeWatch(handle.backend, handle.name, handle.id)
        self._noted: dict[str, str] | None = None
        """What the record should say of the last change."""
        self.serve = gateway.serve
        self.serve_transparent = gateway.serve_transparent

    def ports_for(self, name: str) -> tuple[int, ...]:
        """A name that no rule can permit is refused by its resolver, and that is recorded."""
        ports = self._gate.ports_for(name)
        if not ports:
            reason = f"egress denied: {name} (no rule can permit this name)"
            self.decisions(egress_event(DENY, sandbox=self._sandbox, host=name, reason=reason))
        return ports

    # --- the rules

    async def begin(self, *, reads: bool = False) -> None:
        """Use the rules that the sandbox was made with, or a change since then. ``reads``: whatever
        the rules are, encrypted requests must be read."""
        if reads:
            await self._end_tls()
        if self._changes.is_due():
            await self._carry_out()
        else:
            await self._use(self._made_with)

    async def follow(
        self, note: Callable[..., Awaitable[None]], in_use: Callable[[], bool]
    ) -> None:
        """Carry out changes of the rules as long as this is in use; ``note`` writes facts to the
        sandbox's record."""
        while in_use():
            if self._changes.is_due():
                await self._carry_out()
            if self._noted is not None:
                noted, self._noted = self._noted, None
                await note(**{IN_FORCE: noted})
            await asyncio.sleep(LOOK_EVERY)

    async def _carry_out(self) -> None:
        change: Change | None = None
        try:
            change = await asyncio.to_thread(self._changes.read)
            wanted = None if change is None else change.policy
            await self._use(self._made_with if wanted is None else wanted)
            self.changed = wanted is not None
            error = ""
        except Exception as problem:  # noqa: BLE001  whatever it is, nothing passes then
            error = f"{problem} Until that is mended, everything is denied."
            log.warning("Sandbox %s: %s", self._sandbox, error)
            self._gate.set_policy(EgressPolicy())
            self.policy, self.changed = EgressPolicy(), True
        revision = change.revision if change is not None else ""
        self._noted = {"revision": revision, "error": error}
        event = egress_event("failed" if error else "in force", sandbox=self._sandbox, reason=error)
        facts = {"kind": "policy", "egress": self.policy.to_json(), "by": by()}
        self.decisions({**event, **facts})

    async def _use(self, policy: EgressPolicy) -> None:
        """Use these rules from now on, for open connections as well. SpecError; SandboxError."""
        found = await asyncio.to_thread(expand, policy)
        if found.policy.counts_requests or found.logins:
            partial = any(rule.is_partial for rule in found.policy.all_rules)
            if partial and not extra.installed():
                raise SpecError(f"Rules with methods or paths are not used: {extra.MISSING}")
            await self._end_tls(may_fail=not partial)
        self._logins.logins = found.logins
        self._gateway.private_names = found.private_names
        self._gate.set_policy(found.policy)
        self.policy = policy

    async def _end_tls(self, *, may_fail: bool = False) -> None:
        """Be able to read encrypted requests: with an authority that the sandbox trusts, and whose
        key is in this process only. ``may_fail``: a rate can also count connections."""
        if self._gateway.ends_tls or not extra.installed():
            return
        from sandbox_kernel.gateway.tls.authority import Authority  # lazy: most need none

        authority = await asyncio.to_thread(Authority, self._sandbox)
        try:
            await self._handle.trust(authority.certificate)
        except SandboxError as error:
            if not may_fail:
                raise
            log.warning("Rates of sandbox %s count connections: %s", self._sandbox, error)
            return
        self._gateway.end_tls(authority)
