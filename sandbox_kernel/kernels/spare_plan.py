"""Spares: sandboxes that are made ahead, with an agent and a warm interpreter, each for one kernel.

A spare fits a kernel if both have the same plan, and the backend's likeness has not changed since
the spare was made: a sandbox for the same spec would be the same if it were made now. Files of a
notebook or a workspace, and the variables of a single kernel, come in when it is taken.

Whoever holds a spare is attached to it. If that process dies, the spare ends within
``UNUSED_LEASE`` seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from sandbox_kernel.kernels.launched_process import Log
from sandbox_kernel.kernels.sandboxed_kernel import SandboxedKernel
from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.sandboxes.unattended import SPARE
from sandbox_kernel.spec import SandboxSpec

LEAST_MEMORY = 0.25
"""No spare is made without being asked for unless this share of the memory is available; spares are
given up when half of it is left."""


@dataclass(frozen=True)
class SparePlan:
    """What a spare is made for."""

    backend: str
    spec: dict[str, Any]
    """``SandboxSpec.to_dict``, without a name."""
    argv: tuple[str, ...]
    """The command line of the kernel to come; empty if it may not be made ready."""

    @classmethod
    def of(cls, backend: str, spec: SandboxSpec, argv: tuple[str, ...]) -> SparePlan:
        return cls(backend, {**spec.to_dict(), "name": ""}, argv)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SparePlan:
        return cls(values["backend"], values["spec"], tuple(values["argv"]))

    def key(self, *more: object) -> str:
        """A digest of the plan, and of what else must be the same."""
        text = json.dumps([self.to_dict(), more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def sandbox_spec(self) -> SandboxSpec:
        """With a name of its own."""
        return SandboxSpec.from_mapping(self.spec, where="the plan of a spare sandbox")

    async def likeness(self, client: SandboxClient) -> str:
        """What a sandbox that was made now would be like; the same for any name."""
        return await client.likeness(replace(self.sandbox_spec(), name="spare"))


@dataclass(frozen=True)
class SpareSandbox:
    """A sandbox that waits for a kernel, and what it was like when it was made."""

    kernel: SandboxedKernel
    likeness: str

    @property
    def usable(self) -> bool:
        """Whether its sandbox is there, and this process holds it."""
        tunnel = self.kernel.tunnel
        return tunnel.failure is None and tunnel.connected


async def make_spare(client: SandboxClient, plan: SparePlan, log: Log) -> SpareSandbox:
    """On any failure, and on cancel, nothing is left."""
    likeness = await plan.likeness(client)  # before the rest: what changes meanwhile makes it stale
    kernel = await SandboxedKernel.create(
        client, plan.sandbox_spec(), log, warm_argv=plan.argv, keep_unused=False
    )
    kernel.expect_exit()  # somebody may remove it or take it over, and no kernel is lost
    try:
        await kernel.note(**{SPARE: True})
    except BaseException:
        await asyncio.shield(kernel.remove())
        raise
    return SpareSandbox(kernel, likeness)
