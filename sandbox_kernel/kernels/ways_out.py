"""What leads out of a kernel's sandbox: the secrets that it uses, and its gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from sandbox_kernel.audit import Trail
from sandbox_kernel.kernels.launched_process import Log
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.sandboxes.capabilities import EgressWay
from sandbox_kernel.sandboxes.egress_environment import PROXY_PORT, egress_variables_for_image
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks
from sandbox_kernel.tunnel.tunnel import Tunnel

if TYPE_CHECKING:  # lazy: start-up time, and most kernels have none
    from sandbox_kernel.kernels.secrets_in_use import SecretsInUse
    from sandbox_kernel.kernels.way_out import WayOut


class WaysOut:
    """Belongs to a SandboxedKernel. A sandbox without rules for egress has no gateway, and most
    have no secrets: then nothing happens here."""

    def __init__(
        self,
        client: SandboxClient,
        handle: SandboxHandle,
        log: Log,
        note: Callable[..., Awaitable[None]],
    ) -> None:
        self.gateway: WayOut | None = None
        """What the sandbox's connections pass through, once the tunnel has been given it."""
        self.secrets: SecretsInUse | None = None
        self._client = client
        self._handle = handle
        self._log = log
        self._note = note
        self._rules = OwnedTasks()

    async def prepare(self) -> WayOut | None:
        """The gateway, which may be made while the agent starts. SpecError."""
        await self._find_secrets()
        if not self._passes_gateway:
            return None
        # In a thread: most kernels have none, and the others need not wait for its modules.
        way_out = await asyncio.to_thread(import_module, "sandbox_kernel.kernels.way_out")
        found: WayOut = await way_out.gateway_for(self._handle, self.secrets)
        return found

    def serve(self, tunnel: Tunnel, gateway: WayOut | None) -> None:
        """From now on, what the sandbox opens over this tunnel is for the gateway."""
        self.gateway = tunnel.outlet.gateway = gateway

    async def open(self, tunnel: Tunnel) -> None:
        """Open the ways in the sandbox, whose agent answers now. Nothing changes if they are open,
        as in a copy of a running sandbox."""
        gateway, outlet = self.gateway, tunnel.outlet
        if gateway is None:
            return
        opened = await tunnel.control.call("ways_out", proxy=PROXY_PORT)
        by_name = isinstance(opened, dict) and opened.get("names") is True
        if not by_name and self._handle.python:
            self._log.warning(
                "Sandbox %s: only programs that use a proxy find a way out (HTTPS_PROXY is set in "
                "it): its agent may not serve names at port 53, or not write /etc/resolv.conf.",
                self._handle.name,
            )
        await self._rules.cancel()
        self._rules.start(gateway.follow(self._note, lambda: outlet.gateway is gateway))

    async def close(self) -> None:
        """The sandbox is removed, or left to others."""
        await self._rules.cancel()

    def exposed_variables(self) -> Mapping[str, str]:
        """Secrets that the kernel itself may see, for its environment. Each use is audited."""
        if self.secrets is None or not self.secrets.exposes:
            return {}
        return self.secrets.expose(Trail.of(self._handle), self._handle.name)

    @property
    def _passes_gateway(self) -> bool:
        way = self._client.capabilities.egress_way(self._handle.spec.egress)
        return way is EgressWay.GATEWAY

    async def _find_secrets(self) -> None:
        """Those of a sandbox that another process made."""
        spec = self._handle.spec
        if self.secrets is not None or not self._client.capabilities.puts_in_secrets(spec):
            return
        from sandbox_kernel.kernels.secrets_in_use import found_again  # lazy: most have none

        self.secrets = await found_again(spec)
        for problem in self.secrets.problems:
            self._log.warning("Sandbox %s: %s", self._handle.name, problem)


async def with_placeholders(
    client: SandboxClient, spec: SandboxSpec
) -> tuple[SandboxSpec, SecretsInUse | None]:
    """The spec of a new sandbox with what stands for its secrets there. SpecError."""
    if not client.capabilities.puts_in_secrets(spec):
        return spec, None
    from sandbox_kernel.kernels.secrets_in_use import prepared  # lazy: most have none

    client.check(spec)  # before anything is asked for values
    return await prepared(spec)


async def with_egress_variables(client: SandboxClient, spec: SandboxSpec) -> SandboxSpec:
    """The spec of a sandbox with files of its own, whose programs must be shown the gateway."""
    way = client.capabilities.egress_way(spec.egress)
    if way is not EgressWay.GATEWAY or not client.capabilities.image:
        return spec
    reads = client.capabilities.puts_in_secrets(spec)
    found = await asyncio.to_thread(egress_variables_for_image, spec.egress, reads=reads)
    return replace(spec, env={**found, **spec.env})
