"""Egress rules: which hosts a sandbox may reach, and how.

``SandboxSpec.egress`` is an EgressPolicy: ordered rules, of which the first match decides, and a
default action. An empty policy denies everything. A backend that cannot enforce a part of a policy
exactly refuses it by name (``unenforceable``); others translate it. ``EgressPolicy.decide`` defines
what a policy means; translations are tested against it.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sandbox_kernel.errors import SpecError
from sandbox_kernel.suggestions import check_keys, did_you_mean

ALLOW, DENY = "allow", "deny"
PRESETS = ("@pip", "@npm", "@conda")
"""Words for the hosts of a package manager, as the host is set up for it. A rule for one matches
nothing until ``gateway.presets.expand`` has replaced it."""
PARTS = {
    "preset": "a preset such as @pip",
    "wildcard": "a host pattern such as *.data.example",
    "address": "an address or a network in place of a host name",
    "ports": "ports",
    "methods": "HTTP methods",
    "path": "a path pattern",
    "rate_limit_rpm": "a rate limit",
    "deny": "a rule that denies",
    "default": "the default action allow",
    "within": "rules within other rules",
}
"""What rules may ask for beyond "allow this host". Capabilities.egress_parts: what is enforced."""

_FIELD_OF = {"preset": "host", "wildcard": "host", "address": "host", "deny": "action"}
"""The field that asks for a part, where it has another name."""
MAX_RULES = 256
MOST_RATE = 1_000_000
"""Requests a minute: the highest limit."""
MAX_LEVELS = 4
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")
_PATH = re.compile(r"/[\x21-\x7e]{0,1023}")
_SHORT = re.compile(r"(?P<deny>!)?(?P<host>\[[^\]]+\]|[^:\s]+|[0-9a-fA-F:./]+?)(:(?P<port>\d+))?")
_ACTIONS = (ALLOW, DENY)
_MOST_SHOWN = 300


@dataclass(frozen=True)
class EgressRule:
    """Allows or denies requests to some hosts. Empty ports, methods and path match all."""

    host: str
    """A host name, ``*.name`` for all names below it (not itself), ``*`` for every host, an address
    or network (``192.0.2.0/24``), or one of ``PRESETS``."""
    action: str = ALLOW
    ports: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()
    path: str = ""
    """Pattern of the path without the query; ``*`` stands for any characters."""
    rate_limit_rpm: int | None = None
    """Most requests per minute that this rule allows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", _host(self.host))
        if self.action not in _ACTIONS:
            raise _wrong(self, "action", "is 'allow' or 'deny'", self.action)
        object.__setattr__(self, "ports", _ports(self))
        object.__setattr__(self, "methods", _methods(self))
        if self.path and (not isinstance(self.path, str) or not _PATH.fullmatch(self.path)):
            raise _wrong(self, "path", "is a pattern that begins with /, such as /v1/*", self.path)
        limit = self.rate_limit_rpm
        if limit is not None:
            if type(limit) is not int or not 0 < limit <= MOST_RATE:
                raise _wrong(self, "rate_limit_rpm", "is a whole number from 1", limit)
            if self.action == DENY:
                raise _wrong(self, "rate_limit_rpm", "is for rules that allow", limit)

    @property
    def is_address(self) -> bool:
        return _network(self.host) is not None

    @property
    def is_preset(self) -> bool:
        return self.host.startswith("@")

    @property
    def is_partial(self) -> bool:
        """Whether the rule is about some requests only, so that one must read them."""
        return bool(self.methods or self.path)

    @property
    def counts_requests(self) -> bool:
        """Whether the rule is about single requests: some of them, or so many."""
        return self.is_partial or self.rate_limit_rpm is not None

    def matches(self, host: str, port: int, method: str, path: str) -> bool:
        """Whether the rule applies to this request. A host name never matches an address."""
        return (
            self.concerns(host, port)
            and (not self.methods or method.upper() in self.methods)
            and (not self.path or _fits(self.path, path))
        )

    def concerns(self, host: str, port: int) -> bool:
        """Whether the rule applies to some request to this host and port."""
        return self._matches_host(host) and (not self.ports or port in self.ports)

    def _matches_host(self, host: str) -> bool:
        if self.is_preset:
            return False
        if self.host == "*":
            return True
        network, address = _network(self.host), _network(host)
        if network is not None:
            return address is not None and address.network_address in network
        host = host.lower().rstrip(".")
        if self.host.startswith("*."):
            return address is None and host.endswith(self.host[1:]) and host != self.host[2:]
        return host == self.host

    def parts(self) -> Iterator[str]:
        """Which of ``PARTS`` this rule asks for."""
        if self.is_preset:
            yield "preset"
        if "*" in self.host:
            yield "wildcard"
        if self.is_address:
            yield "address"
        for name in ("ports", "methods", "path", "rate_limit_rpm"):
            if getattr(self, name):
                yield name
        if self.action == DENY:
            yield "deny"

    def to_json(self) -> str | dict[str, Any]:
        """The shortest form that ``EgressPolicy.read`` takes: a string where that is enough."""
        plain: dict[str, Any] = {"host": self.host}
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            if value != item.default:
                plain[item.name] = list(value) if isinstance(value, tuple) else value
        return self.host if len(plain) == 1 else plain


@dataclass(frozen=True)
class EgressPolicy:
    """Ordered rules, of which the first match decides, and a default action."""

    rules: tuple[EgressRule, ...] = ()
    default: str = DENY
    within: EgressPolicy | None = None
    """A request passes only if this policy allows it as well."""

    def __post_init__(self) -> None:
        if self.default not in _ACTIONS:
            raise SpecError(f"egress: default is 'allow' or 'deny', not {self.default!r}.")
        if len(self.rules) > MAX_RULES:
            raise SpecError(f"egress has {len(self.rules)} rules; the limit is {MAX_RULES}.")
        if len(self.levels) > MAX_LEVELS:
            raise SpecError(f"egress has rules within rules, {MAX_LEVELS} levels deep at most.")

    @property
    def levels(self) -> tuple[EgressPolicy, ...]:
        """This policy and those that it is within, from the innermost out. Each decides by its own
        rules and default; what one of them denies is denied."""
        return (self,) if self.within is None else (self, *self.within.levels)

    @property
    def all_rules(self) -> tuple[EgressRule, ...]:
        """The rules of all levels."""
        return tuple(rule for level in self.levels for rule in level.rules)

    def __bool__(self) -> bool:
        """False if no request can pass, so that the sandbox needs no network."""
        return all(
            level.default == ALLOW or any(rule.action == ALLOW for rule in level.rules)
            for level in self.levels
        )

    @property
    def counts_requests(self) -> bool:
        """Whether a rule is about single requests, so that one must read them where one can."""
        return any(rule.counts_requests for rule in self.all_rules)

    def decide(self, host: str, port: int, method: str = "GET", path: str = "/") -> str:
        """``allow`` or ``deny`` for one request, rate limits aside."""
        request = (host, port, method, path)
        denied = any(level._decide_alone(*request) == DENY for level in self.levels)
        return DENY if denied else ALLOW

    def _decide_alone(self, host: str, port: int, method: str, path: str) -> str:
        for rule in self.rules:
            if rule.matches(host, port, method, path):
                return rule.action
        return self.default

    def unenforceable(self, parts: Collection[str]) -> str | None:
        """The first request that needs more than ``parts`` (of ``PARTS``), as
        ``egress[1].ports=[8443]``; None if all can be enforced."""
        for number, rule in enumerate(self.rules):
            for part in rule.parts():
                if part not in parts:
                    where = _FIELD_OF.get(part, part)
                    value = getattr(rule, where)
                    value = list(value) if isinstance(value, tuple) else value
                    return f"egress[{number}].{where}={value!r} ({PARTS[part]})"
        if self.default == ALLOW and "default" not in parts:
            return f"egress.default='allow' ({PARTS['default']})"
        if self.within is None:
            return None
        if "within" not in parts:
            return f"egress.within={self.within.to_json()!r} ({PARTS['within']})"
        return self.within.unenforceable(parts)

    def to_json(self) -> list[Any] | dict[str, Any]:
        """Plain JSON types; ``read`` reads them back."""
        rules = [rule.to_json() for rule in self.rules]
        if self.within is not None:
            return {"default": self.default, "rules": rules, "within": self.within.to_json()}
        return rules if self.default == DENY else {"default": self.default, "rules": rules}

    @classmethod
    def of(
        cls,
        *rules: str | EgressRule | Mapping[str, Any],
        default: str = DENY,
        within: EgressPolicy | None = None,
    ) -> EgressPolicy:
        """A policy from hosts and rules, for use in Python."""
        return cls(tuple(map(_rule, rules)), default, within)

    @classmethod
    def read(cls, value: Any) -> EgressPolicy:
        """A policy from configuration: a list of hosts and rules, or ``{"default", "rules"}``; as
        JSON types, as JSON text, or as words with commas or spaces between them (``HOST``,
        ``HOST:PORT``, ``!HOST``, ``@pip``, ``default=allow``). SpecError."""
        if isinstance(value, EgressPolicy):
            return value
        if value is None:
            return cls()
        if isinstance(value, str):
            value = _parsed(value) if value.lstrip()[:1] in ("[", "{") else _words(value)
        if isinstance(value, Mapping) and not value.keys() & {"host"}:
            unknown = value.keys() - {"default", "rules", "within"}
            if unknown or not isinstance(value.get("rules", []), (list, tuple)):
                raise SpecError(
                    f"egress takes a list of hosts and rules, or an object with the keys default "
                    f"and rules, not {value!r}."
                )
            within = None if value.get("within") is None else cls._outer(value["within"])
            return cls.of(
                *value.get("rules", ()), default=value.get("default", DENY), within=within
            )
        if isinstance(value, (Mapping, EgressRule)):
            value = [value]
        if not isinstance(value, (list, tuple)):
            raise SpecError(f"egress takes a list of hosts and rules, not {value!r}.")
        default, rules = DENY, []
        for item in _lines(value):
            if isinstance(item, str) and item.startswith("default="):
                default = item.removeprefix("default=")
            elif isinstance(item, str) and item.lstrip()[:1] == "{":
                rules.append(_parsed(item))  # from a command line
            else:
                rules.append(item)
        return cls.of(*rules, default=default)

    @classmethod
    def _outer(cls, value: Any) -> EgressPolicy:
        """What a policy is within, as ``read`` takes it."""
        level, depth = value, 2
        while isinstance(level, Mapping) and (level := level.get("within")) is not None:
            depth += 1
        if depth > MAX_LEVELS:
            raise SpecError(f"egress has rules within rules, {MAX_LEVELS} levels deep at most.")
        return cls.read(value)


def _lines(items: Iterable[Any]) -> Iterator[Any]:
    """An item may be a policy file's text, from a command line."""
    for item in items:
        if isinstance(item, str) and "\n" in item and item.lstrip()[:1] not in ("[", "{"):
            yield from _words(item)
        else:
            yield item


def _words(text: str) -> list[str]:
    """Words between spaces and commas. As in a policy file, # begins a comment, and a rule as JSON
    has a line for itself."""
    words: list[str] = []
    for line in text.splitlines():
        plain = line.partition("#")[0].strip()
        words += [plain] if plain[:1] == "{" else re.split(r"[,\s]+", plain)
    return [word for word in words if word]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # "[2001:db8::1]:443" begins like JSON, too.
        if text.lstrip().startswith("[") and '"' not in text:
            return _words(text)
        raise SpecError(f"egress is not valid JSON: {_shown(text)}.") from None


def _shown(text: str) -> str:
    """For an error: what was written may be long, and no rule at all."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def _rule(item: Any) -> EgressRule:
    if isinstance(item, EgressRule):
        return item
    if isinstance(item, str):
        if _network(item.removeprefix("!")) is not None:  # its colons begin no port
            return EgressRule(item.removeprefix("!"), DENY if item.startswith("!") else ALLOW)
        found = _SHORT.fullmatch(item)
        if found is None:
            raise SpecError(f"egress: {_shown(item)} is not a host; give HOST, HOST:PORT or !HOST.")
        port = found["port"]
        return EgressRule(
            host=found["host"].strip("[]"),
            action=DENY if found["deny"] else ALLOW,
            ports=(int(port),) if port else (),
        )
    if not isinstance(item, Mapping):
        raise SpecError(f"egress takes a list of hosts and rules; {item!r} is neither.")
    check_keys(item, [f.name for f in fields(EgressRule)], "egress: a rule")
    if "host" not in item:
        raise SpecError(f"egress: a rule needs a host, '*' for all; {dict(item)!r} has none.")
    return EgressRule(**item)


def _host(host: Any) -> str:
    if not isinstance(host, str):
        raise SpecError(f"egress: a host is a string, not {host!r}.")
    network = _network(host)
    if network is not None:
        single = network.prefixlen == network.max_prefixlen
        return str(network.network_address) if single else str(network)
    plain = host.lower().rstrip(".")
    if plain == "*" or plain in PRESETS:
        return plain
    if plain.startswith("@"):
        raise SpecError(f"egress: there is no preset {host!r}. {did_you_mean(plain, PRESETS)}")
    # An invalid address (1.2.3, 300.1.1.1) is a mistake, not a name.
    numeric = plain.rsplit(".", 1)[-1].isdigit()
    if len(plain) > 253 or numeric or not _HOST.fullmatch(plain):
        raise SpecError(
            f"egress: {_shown(host)} is not a host. A host is a name in ASCII (data.example), "
            f"*.name for the names below it, * for all, or an address or network; no scheme, no "
            f"path."
        )
    return plain


def _fits(pattern: str, path: str) -> bool:
    """Whether a path fits a pattern, in which ``*`` stands for any characters. Not by a regular
    expression: with several stars, a long path could take it minutes."""
    first, *middle = pattern.split("*")
    if not middle:
        return path == pattern
    last, at = middle.pop(), len(first)
    if not path.startswith(first):
        return False
    for part in middle:
        at = path.find(part, at) + len(part)
        if at < len(part):
            return False
    return path.endswith(last) and len(path) - len(last) >= at


def _network(host: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(host)
    except ValueError:
        return None


def _ports(rule: EgressRule) -> tuple[int, ...]:
    ports = rule.ports if isinstance(rule.ports, (list, tuple)) else [rule.ports]
    for port in ports:
        if type(port) is not int or not 0 < port < 65536:
            raise _wrong(rule, "ports", "are whole numbers from 1 to 65535", rule.ports)
    return tuple(sorted(set(ports)))


def _methods(rule: EgressRule) -> tuple[str, ...]:
    given: Any = rule.methods
    names = given.split(",") if isinstance(given, str) else given
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
        names = tuple(dict.fromkeys(name.strip().upper() for name in names if name.strip()))
        if all(map(_METHOD.fullmatch, names)):
            return names
    raise _wrong(rule, "methods", "is a list such as ['GET', 'HEAD']", given)


def _wrong(rule: EgressRule, key: str, takes: str, value: object) -> SpecError:
    return SpecError(f"egress: {key} of the rule for {rule.host!r} {takes}, not {value!r}.")
