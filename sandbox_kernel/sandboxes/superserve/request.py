"""A SandboxSpec as a request to the service. What cannot be mapped exactly is refused."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from typing import Any

from superserve import NetworkConfig

from sandbox_kernel.egress import ALLOW
from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.sandboxes.capabilities import Capabilities, refusal
from sandbox_kernel.sandboxes.hosted import label
from sandbox_kernel.spec import SandboxSpec

BACKEND = "superserve"
LABEL, NAME, REQUEST = "sandbox_kernel", "sandbox_kernel_name", "sandbox_kernel_request"
"""Tags of our sandboxes: whose they are, their name, and the one request that made them."""
DEFAULT_DELETE_AFTER = 7 * 24 * 3600.0
SLACK = 5.0
"""Seconds that the service waits beyond a lease: it counts whole ones, and renewing takes time."""
RESOLVERS = ("1.1.1.1", "8.8.8.8")
_BLOCKED = ("10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16")
_SNAPSHOT = "snapshot:"
_OWN_MACHINE = "The sandbox is root of its own machine, so this could not be held."
_HOSTS_ONLY = "Superserve's rules know hosts and networks only."
_BY_TEMPLATE = "A sandbox has the size of its template; choose one by image."

CAPABILITIES = Capabilities(
    *("image", "secrets", "egress", "delete_after_seconds", "hosted"),
    *("byte_exact_streams", "reattach", "pause", "restart", "snapshot", "memory", "fork"),
    egress_parts=frozenset({"wildcard", "address", "deny", "default"}),
    notes={
        "memory_mib": _BY_TEMPLATE,
        "cpus": _BY_TEMPLATE,
        "disk_mib": _BY_TEMPLATE,
        "processes": _OWN_MACHINE,
        "open_files": _OWN_MACHINE,
        "volume": "No folder of this host is shown to a hosted sandbox; copy files in and out.",
        "readable": "No folder of this host is shown to a hosted sandbox; copy files in.",
        "python": "The sandbox runs its template's own Python; choose a template by image.",
        **dict.fromkeys(("egress.ports", "egress.methods", "egress.path"), _HOSTS_ONLY),
        "egress.rate_limit_rpm": "Superserve's rules know no rates.",
    },
)


def arguments(spec: SandboxSpec, request: str) -> dict[str, Any]:
    """The arguments of the SDK's ``create``. SpecRefused for what cannot be said in them."""
    CAPABILITIES.check(spec, BACKEND)
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
        "network": network(spec),
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


def network(spec: SandboxSpec) -> NetworkConfig | None:
    """The rules for ``spec.egress``; None if everything is allowed. The service's lists have no
    order: what is allowed wins over what is denied."""
    policy, opens = spec.egress, spec.egress.default == ALLOW
    allowed = [rule.host for rule in policy.rules if rule.action == ALLOW]
    denied = [rule.host for rule in policy.rules if rule.action != ALLOW]
    for number, rule in enumerate(policy.rules):
        action = f"egress[{number}].action={rule.action!r}"
        host = f"egress[{number}].host={rule.host!r}"
        if opens and rule.action == ALLOW:
            raise _refused(spec, action, "Everything is allowed by default; leave the rule out.")
        if opens and not rule.is_address:
            why = "Superserve can deny addresses and networks, not names."
            raise _refused(spec, host, why)
        if not opens and allowed and rule.action != ALLOW:
            why = "What Superserve allows wins over what it denies; allow only what is wanted."
            raise _refused(spec, action, why)
        if rule.is_address and "*" not in allowed:
            _check_address(spec, host, rule.host)
    if opens or "*" in allowed:
        return NetworkConfig(allow_out=[], deny_out=denied) if denied else None
    names = [rule.host for rule in policy.rules if rule.action == ALLOW and not rule.is_address]
    if names and not any(policy.decide(address, 53) == ALLOW for address in RESOLVERS):
        raise _refused(
            spec,
            f"egress[0].host={names[0]!r}",
            "A name can be looked up only if the sandbox may reach its resolver, by which data can "
            f"get out, too. If that is acceptable, allow {' or '.join(RESOLVERS)} as well; else "
            "allow addresses.",
        )
    return NetworkConfig(allow_out=allowed, deny_out=["0.0.0.0/0"])


def _check_address(spec: SandboxSpec, what: str, host: str) -> None:
    address = ipaddress.ip_network(host)
    if address.version == 6:
        raise _refused(spec, what, "Superserve's rules are documented for IPv4 only.")
    if any(address.overlaps(ipaddress.ip_network(blocked)) for blocked in _BLOCKED):
        raise _refused(spec, what, "Superserve never lets a sandbox reach private networks.")


def _refused(spec: SandboxSpec, what: str, why: str) -> SpecRefused:
    return refusal(spec.name, BACKEND, what, why)


def limits(spec: SandboxSpec) -> Mapping[str, str]:
    """What the service holds a sandbox to, for ``ps``."""
    return {
        "lease_seconds": f"{spec.lease_seconds:g} s (paused then)",
        "delete_after_seconds": f"{spec.delete_after_seconds or DEFAULT_DELETE_AFTER:g} s (paused)",
    }
