"""The smallest policy under which what an audit has seen pass would pass again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox_kernel.egress import ALLOW, DENY, MOST_RATE, PRESETS, EgressPolicy, EgressRule
from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.gateway.decisions import ambiguous
from sandbox_kernel.gateway.names import NameRefused, read_target
from sandbox_kernel.gateway.presets import expand

DATABASE_PORTS = (22, 1433, 1521, 3306, 5432, 5672, 6379, 8080, 8443, 9000, 9092, 9200, 27017)
"""Under a default of allow, a program that dials a name by itself finds these ports, too."""
NOTHING = "nothing.invalid:1"
"""A host that does not exist: with a rule for it alone, which only the gateway can hold, nothing
passes, and the gateway sees what is tried."""
_WEB_PORTS = frozenset((80, 443))
_MOST_PATHS = 16
_MOST_HOSTS = 1000

Place = tuple[str, int]


@dataclass
class Learned:
    """What became of a run."""

    policy: EgressPolicy
    denied: dict[str, str] = field(default_factory=dict)
    """What was refused, as ``HOST:PORT`` or a name, and why."""
    private: dict[str, str] = field(default_factory=dict)
    """What was let out to a private network, as the owner of this machine has set it up, and which
    no rule by name allows; and the preset that did."""


@dataclass(frozen=True)
class KnownPreset:
    """What a preset stands for on this machine."""

    word: str
    places: frozenset[Place]
    private_names: frozenset[str]


def known_presets() -> list[KnownPreset]:
    """Those that are set up here. May start processes: blocks."""
    found = []
    for word in PRESETS:
        try:
            meant = expand(EgressPolicy.of(word))
        except SandboxError:
            continue  # that package manager is not set up here
        places = frozenset((r.host, port) for r in meant.policy.rules for port in r.ports)
        found.append(KnownPreset(word, places, meant.private_names))
    return found


def policy_to_learn_under(
    default: str, presets: Iterable[KnownPreset], *, paths: bool = False
) -> EgressPolicy:
    """The rules of the sandbox in which something is tried out. For ``paths``, the gateway reads
    encrypted requests, too, if it can."""
    if default == DENY:
        return EgressPolicy.of(NOTHING)
    rules: list[Any] = [preset.word for preset in presets]
    rules.append({"host": "*", "ports": DATABASE_PORTS})
    if paths:
        # Requests that are counted are read.
        rules.append({"host": "*", "rate_limit_rpm": MOST_RATE})
    return EgressPolicy.of(*rules, default=ALLOW)


@dataclass
class _Host:
    ports: set[int] = field(default_factory=set)
    requests: set[tuple[str, str]] = field(default_factory=set)
    """Method and path."""
    unread: bool = False
    """Some of what went there could not be read."""


def learn(
    events: Iterable[Mapping[str, Any]], presets: Sequence[KnownPreset], *, paths: bool = False
) -> Learned:
    """Nothing in ``events`` is trusted to be a name. With ``paths``, rules name methods and paths
    where all requests to a host could be read."""
    hosts: dict[str, _Host] = {}
    denied: dict[str, str] = {}
    for event in events:
        place = _place(event)
        if event.get("kind") != "egress" or place is None:
            continue
        host, port = place
        if _has_connected(event) and port:
            if host in hosts or len(hosts) < _MOST_HOSTS:
                _add(hosts.setdefault(host, _Host()), port, event)
        elif event.get("action") == DENY and len(denied) < _MOST_HOSTS:
            denied.setdefault(f"{host}:{port}" if port else host, _why(event))
    rules, private = _rules(hosts, presets, paths=paths)
    allowed = {f"{host}:{port}" for host, found in hosts.items() for port in found.ports}
    refused = {what: why for what, why in denied.items() if what not in allowed}
    return Learned(EgressPolicy(tuple(rules)), refused, private)


def _place(event: Mapping[str, Any]) -> tuple[str, int | None] | None:
    host, port = event.get("host"), event.get("port")
    if not isinstance(host, str) or not (port is None or type(port) is int):
        return None
    try:
        return read_target(host, port or 1).host, port
    except NameRefused:
        return None


def _has_connected(event: Mapping[str, Any]) -> bool:
    """Also one that broke later, as those do that the end of the kernel interrupts."""
    received = event.get("received")
    broke = event.get("action") == "error" and isinstance(received, int) and received > 0
    return event.get("action") == ALLOW or broke


def _why(event: Mapping[str, Any]) -> str:
    """The part of the reason in brackets, without how to allow it."""
    reason = str(event.get("reason", ""))
    _, bracket, inner = reason.partition(" (")
    return (inner.removesuffix(")") if bracket else reason).partition("; allow it with")[0]


def _add(host: _Host, port: int, event: Mapping[str, Any]) -> None:
    host.ports.add(port)
    method, path = event.get("method"), event.get("path")
    if isinstance(method, str) and isinstance(path, str) and not ambiguous(path):
        host.requests.add((method, path))
    else:
        host.unread = True


def _rules(
    hosts: Mapping[str, _Host], presets: Sequence[KnownPreset], *, paths: bool
) -> tuple[list[EgressRule], dict[str, str]]:
    rules: list[EgressRule] = []
    private: dict[str, str] = {}
    left = {(host, port) for host, found in hosts.items() for port in found.ports}
    for preset in presets:
        if left & preset.places:
            rules.append(EgressRule(preset.word))
            left -= preset.places
    for host, found in sorted(hosts.items()):
        ports = {port for name, port in left if name == host}
        owner = next((p.word for p in presets if _is_private(p, host, ports)), None)
        if owner is not None and ports:
            private |= {f"{host}:{port}": owner for port in sorted(ports)}
        elif ports:
            rules += _rules_for(host, ports, found, paths=paths)
    return rules, private


def _is_private(preset: KnownPreset, host: str, ports: Collection[int]) -> bool:
    return any(name in preset.private_names for name in (host, *(f"{host}:{p}" for p in ports)))


def _rules_for(host: str, ports: Collection[int], found: _Host, *, paths: bool) -> list[EgressRule]:
    only = () if _WEB_PORTS.issuperset(ports) else tuple(sorted(ports))
    try:
        if not paths or found.unread or len({path for _, path in found.requests}) > _MOST_PATHS:
            return [EgressRule(host, ports=only)]
        methods: dict[str, set[str]] = {}
        for method, path in found.requests:
            methods.setdefault(path, set()).add(method)
        return [
            EgressRule(host, ports=only, methods=tuple(sorted(used)), path=path)
            for path, used in sorted(methods.items())
        ]
    except SpecError:  # a path or a method that no rule can have
        return [EgressRule(host, ports=only)]
