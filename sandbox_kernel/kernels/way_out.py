"""The gateway of a sandbox: its rules, and where its decisions are recorded."""

from __future__ import annotations

import asyncio

from sandbox_kernel.audit import Trail
from sandbox_kernel.egress import DENY
from sandbox_kernel.gateway.audit import egress_event
from sandbox_kernel.gateway.gate import Gate
from sandbox_kernel.gateway.gateway import Gateway
from sandbox_kernel.gateway.presets import expand
from sandbox_kernel.kernels.cells import Cells
from sandbox_kernel.kernels.secrets_in_use import SecretsInUse
from sandbox_kernel.sandboxes.base import SandboxHandle


async def gateway_for(handle: SandboxHandle, secrets: SecretsInUse | None = None) -> WayOut:
    """For a sandbox with rules for egress. SpecError if a preset in them cannot be resolved."""
    found = await asyncio.to_thread(expand, handle.spec.egress)
    gate = Gate(found.policy)
    cells = Cells(Trail.of(handle))
    names = found.private_names
    rewriting = secrets.rewriting(cells, handle.name) if secrets is not None else None
    gateway = Gateway(
        gate, audit=cells, private_names=names, sandbox=handle.name, rewriting=rewriting
    )
    return WayOut(gate, gateway, cells, handle.name)


class WayOut:
    """What the tunnel's outlet needs of a gateway and its gate."""

    def __init__(self, gate: Gate, gateway: Gateway, cells: Cells, sandbox: str) -> None:
        self._gate = gate
        self.cells = cells
        self._sandbox = sandbox
        self.serve = gateway.serve
        self.serve_transparent = gateway.serve_transparent

    def ports_for(self, name: str) -> tuple[int, ...]:
        """A name that no rule can permit is refused by its resolver, and that is recorded."""
        ports = self._gate.ports_for(name)
        if not ports:
            reason = f"egress denied: {name} (no rule can permit this name)"
            self.cells(egress_event(DENY, sandbox=self._sandbox, host=name, reason=reason))
        return ports
