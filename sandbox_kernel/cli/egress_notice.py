"""Which way the rules for egress take, in words: for ``install``."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sandbox_kernel.cli.formatting import table
from sandbox_kernel.egress import EgressPolicy, EgressRule
from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.sandboxes.capabilities import EgressWay


def egress_notice(client: SandboxClient, policy: EgressPolicy) -> str:
    """A line for each rule, and why; empty if there are no rules."""
    way = client.capabilities.egress_way(policy)
    if way is EgressWay.CLOSED:
        return ""
    return f"What leaves its sandboxes:\n{table(list(_rows(client, policy, way)))}"


def _rows(client: SandboxClient, policy: EgressPolicy, way: EgressWay) -> Iterator[tuple[str, str]]:
    ways = {
        EgressWay.GATEWAY: "through the gateway on this machine",
        EgressWay.BACKEND: f"by rules of {client.backend}'s own",
    }
    for rule in policy.rules:
        yield f"  {_short(rule)}", ways[way]
    yield "  anything else", ways[way] if policy.default == "allow" else "refused"
    beyond = client.capabilities.why_gateway(policy)
    if way is EgressWay.GATEWAY:
        why = f": {client.backend}'s own rules cannot hold {beyond}" if beyond else ""
        yield "  their own network", f"off{why}"


def _short(rule: EgressRule) -> str:
    """As one would write it: a word, if that is enough."""
    plain = rule.to_json()
    if isinstance(plain, str):
        return plain
    if plain.keys() == {"host", "ports"} and len(rule.ports) == 1:
        return f"{rule.host}:{rule.ports[0]}"
    return f"!{rule.host}" if plain.keys() == {"host", "action"} else json.dumps(plain)
