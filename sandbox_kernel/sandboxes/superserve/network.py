"""The service's own network, and its rules for what a sandbox may reach in it.

They are two lists of hosts without an order, of which "allow" wins over "deny". A policy that they
cannot hold exactly goes through the gateway of this host, and the sandbox's own network is off.
"""

from __future__ import annotations

import ipaddress

from superserve import NetworkConfig

from sandbox_kernel.egress import ALLOW, EgressPolicy

OFF = NetworkConfig(allow_out=[], deny_out=["0.0.0.0/0"])
RESOLVERS = ("1.1.1.1", "8.8.8.8")
_PARTS = frozenset({"wildcard", "address", "deny", "default"})
_BLOCKED = ("10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16")


def beyond_own_rules(policy: EgressPolicy) -> str | None:
    """What of a policy they cannot hold exactly, and why; None if they hold all of it."""
    if beyond := policy.unenforceable(_PARTS):
        return f"{beyond}: they know hosts and networks only"
    opens = policy.default == ALLOW
    allowed = [rule.host for rule in policy.rules if rule.action == ALLOW]
    for number, rule in enumerate(policy.rules):
        action = f"egress[{number}].action={rule.action!r}"
        host = f"egress[{number}].host={rule.host!r}"
        if opens and rule.action == ALLOW:
            return f"{action}: what they allow by default, they cannot allow once more"
        if opens and not rule.is_address:
            return f"{host}: they can deny addresses and networks, not names"
        if not opens and allowed and rule.action != ALLOW:
            return f"{action}: what they allow wins over what they deny"
        if rule.is_address and "*" not in allowed and (why := _beyond_networks(rule.host)):
            return f"{host}: {why}"
    if opens or "*" in allowed:
        return None
    names = [rule.host for rule in policy.rules if rule.action == ALLOW and not rule.is_address]
    if names and not any(policy.decide(address, 53) == ALLOW for address in RESOLVERS):
        return (
            f"egress[0].host={names[0]!r}: a name can be looked up only in a sandbox that may "
            f"reach a resolver ({' or '.join(RESOLVERS)}), by which data could get out, too"
        )
    return None


def _beyond_networks(host: str) -> str:
    address = ipaddress.ip_network(host)
    if address.version == 6:
        return "they are documented for IPv4 only"
    if any(address.overlaps(ipaddress.ip_network(blocked)) for blocked in _BLOCKED):
        return "the service never lets a sandbox reach private networks"
    return ""


def rules(policy: EgressPolicy) -> NetworkConfig | None:
    """The same as a policy of which they hold all; None if everything is allowed."""
    allowed = [rule.host for rule in policy.rules if rule.action == ALLOW]
    denied = [rule.host for rule in policy.rules if rule.action != ALLOW]
    if policy.default == ALLOW or "*" in allowed:
        return NetworkConfig(allow_out=[], deny_out=denied) if denied else None
    return NetworkConfig(allow_out=allowed, deny_out=OFF.deny_out)


def is_off(network: NetworkConfig | None) -> bool:
    """Whether the service says that a sandbox has no network."""
    return network is not None and not network.allow_out and network.deny_out == OFF.deny_out
