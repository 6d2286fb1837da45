"""A SandboxSpec as a request to the service. What cannot be mapped exactly is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.sandboxes.capabilities import (
    GATEWAY_PARTS,
    Capabilities,
    EgressWay,
    refusal,
)
from sandbox_kernel.sandboxes.hosted import label
from sandbox_kernel.sandboxes.superserve import network
from sandbox_kernel.spec import SandboxSpec

BACKEND = "superserve"
LABEL, NAME, REQUEST = "sandbox_kernel", "sandbox_kernel_name", "sandbox_kernel_request"
"""Tags of our sandboxes: whose they are, their name, and the one request that made them."""
DEFAULT_DELETE_AFTER = 7 * 24 * 3600.0
SLACK = 5.0
"""Seconds that the service waits beyond a lease: it counts whole ones, and renewing takes time."""
_SNAPSHOT = "snapshot:"
_OWN_MACHINE = "The sandbox is root of its own machine, so this could not be held."
_BY_TEMPLATE = "A sandbox has the size of its template; choose one by image."


CAPABILITIES = Capabilities(
    *("image", "secrets", "own_secrets", "egress", "gateway", "delete_after_seconds", "hosted"),
    *("byte_exact_streams", "reattach", "pause", "restart", "snapshot", "memory", "fork"),
    egress_parts=GATEWAY_PARTS,
    beyond_own_rules=network.beyond_own_rules,
    notes={
        "memory_mib": _BY_TEMPLATE,
        "cpus": _BY_TEMPLATE,
        "disk_mib": _BY_TEMPLATE,
        "processes": _OWN_MACHINE,
        "open_files": _OWN_MACHINE,
        "volume": "No folder of this host is shown to a hosted sandbox; copy files in and out.",
        "readable": "No folder of this host is shown to a hosted sandbox; copy files in.",
        "python": "The sandbox runs its template's own Python; choose a template by image.",
    },
)


def arguments(spec: SandboxSpec, request: str) -> dict[str, Any]:
    """The arguments of the SDK's ``create``. SpecRefused for what cannot be said in them."""
    CAPABILITIES.check(spec, BACKEND)
    way = CAPABILITIES.egress_way(spec.egress)
    if spec.secrets and way is EgressWay.GATEWAY:
        raise _refused(
            spec,
            f"secrets={[secret.name for secret in spec.secrets]!r} beside these egress rules",
            "Superserve replaces secrets only in what leaves by its own network, whose rules "
            f"cannot hold {CAPABILITIES.why_gateway(spec.egress)}.",
        )
    source = {"from_template": spec.image} if spec.image else {}
    if spec.image and spec.image.startswith(_SNAPSHOT):
        source = {"from_snapshot": spec.image.removeprefix(_SNAPSHOT)}
    return {
        "name": spec.name,
        **source,
        "timeout_seconds": lease_seconds(spec),
        "auto_delete_seconds": math.ceil(spec.delete_after_seconds or DEFAULT_DELETE_AFTER),
        "metadata": {**spec.labels, LABEL: label(), NAME: spec.name, REQUEST: request},
        "env_vars": dict(spec.env) or None,
        "secrets": _secrets(spec) or None,
        "network": network.rules(spec.egress) if way is EgressWay.BACKEND else network.OFF,
        "preview_access": "private",
    }


def lease_seconds(spec: SandboxSpec, active: float = 0.0) -> int:
    """The service's limit on active time, for a sandbox that has been active for ``active``
    seconds: it is paused when its lease, counted from now, is over."""
    return math.ceil(active + spec.lease_seconds + SLACK)


def _secrets(spec: SandboxSpec) -> dict[str, str]:
    """Variable -> name of a secret of the team; ``NAME`` is short for ``NAME=NAME``."""
    for secret in spec.secrets:
        if not secret.is_native:
            raise _refused(
                spec,
                f"secrets={secret.name!r}",
                "Superserve keeps secrets itself, and binds them to hosts. Give the name of a "
                "secret of the team that is a variable's name, too, or VARIABLE=secret-name.",
            )
    return {secret.name: secret.native_name for secret in spec.secrets}


def _refused(spec: SandboxSpec, what: str, why: str) -> SpecRefused:
    return refusal(spec.name, BACKEND, what, why)


def limits(spec: SandboxSpec) -> Mapping[str, str]:
    """What the service holds a sandbox to, for ``ps``."""
    return {
        "lease_seconds": f"{spec.lease_seconds:g} s (paused then)",
        "delete_after_seconds": f"{spec.delete_after_seconds or DEFAULT_DELETE_AFTER:g} s (paused)",
    }
