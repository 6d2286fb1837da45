"""Secrets that a sandbox may use, as they are declared: named, never valued.

``SandboxSpec.secrets`` is a tuple of SecretDeclaration. A value is found on the host when a sandbox
is made (``gateway.secret_sources``); in the sandbox there is only a placeholder, which the gateway
replaces in requests to the hosts that a secret is bound to. Errors here never repeat what was
given: somebody may have put a value where a source belongs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sandbox_kernel.egress import ALLOW, EgressPolicy, EgressRule
from sandbox_kernel.errors import SpecError
from sandbox_kernel.suggestions import closest

PLACES = ("header", "basic", "query", "body", "path")
"""Where in a request a placeholder may be replaced: header values, inside ``Authorization: Basic``,
the query, the body, the path."""
DEFAULT_PLACES = ("header", "basic")
PUBLIC_PREFIXES = (
    *("sk-ant-", "sk-proj-", "sk-", "sk_live_", "sk_test_", "pk_live_", "pk_test_", "rk_live_"),
    *("github_pat_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "glpat-", "hf_", "npm_", "pypi-"),
    *("xoxb-", "xoxp-", "xapp-", "AKIA", "ASIA", "AIza", "ya29.", "SG.", "dop_v1_", "r8_", "gsk_"),
)
"""How values of well-known kinds begin. A placeholder begins like its value, so that a program that
checks the form accepts it; nothing else of a value is in its placeholder."""
MAX_SECRETS = 32
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SHORT = re.compile(r"([^=@]*)(?:=(.*?))?(?:@([^@]*))?", re.DOTALL)
_NATIVE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SOURCES = {
    "env": re.compile(r"[A-Za-z_][A-Za-z0-9_]*"),
    "file": re.compile(r"/[^\0]+"),
    "command": re.compile(r"[^\0\n]*\S[^\0\n]*"),
    "keyring": re.compile(r"[^\0]+/[^\0/]+"),
}
_HOW = (
    "says where the value is: env:VARIABLE, file:/PATH, command:PROGRAM ARGS or "
    "keyring:SERVICE/USER. The value itself is never given here"
)
_KEYS = {"name": "name", "from": "source", "hosts": "hosts", "in": "places"}


@dataclass(frozen=True)
class SecretDeclaration:
    """One secret: its name, where its value is on the host, and where it may be sent."""

    name: str
    """The environment variable of the sandbox that holds its placeholder."""
    source: str | tuple[str, ...] = ""
    """``env:VARIABLE``, ``file:/path``, ``command:...`` or the words of a command, or
    ``keyring:SERVICE/USER``. Without hosts: the name of a secret that the backend itself keeps."""
    hosts: tuple[str, ...] = ()
    """``host``, ``*.host`` or ``host:port``. Without a port, 443 (and 80 with ``insecure``)."""
    places: tuple[str, ...] = DEFAULT_PLACES
    expose: bool = False
    """The sandbox gets the value itself. Bound to no host then."""
    insecure: bool = False
    """It may also be sent over plain http."""
    sigv4: str = ""
    """It is the secret key of an AWS key pair, which signs and is never sent: the name of the
    secret with the access key id."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise SpecError("secrets: a name is an environment variable's, such as OPENAI_API_KEY.")
        object.__setattr__(self, "hosts", self._checked_hosts())
        object.__setattr__(self, "places", self._checked_places())
        for key in ("expose", "insecure"):
            if type(getattr(self, key)) is not bool:
                raise self._wrong(key, "is true or false")
        if not isinstance(self.sigv4, str) or (self.sigv4 and not _NAME.fullmatch(self.sigv4)):
            raise self._wrong("sigv4", "is the name of the secret with the access key id")
        self._check_combination()

    def _check_combination(self) -> None:
        if self.is_native:
            if self.source and (self.insecure or self.sigv4 or self.places != DEFAULT_PLACES):
                raise self._wrong("hosts", "is missing: name the hosts that it may be sent to")
            if self.source and not self._names_native_secret():
                raise self._wrong(
                    "hosts",
                    "is missing: name the hosts that it may be sent to (NAME@api.example). Without "
                    "hosts, what follows = is the name of a secret that the backend keeps",
                )
            return
        if not self.source:
            object.__setattr__(self, "source", f"env:{self.name}")
        if isinstance(self.source, str):
            scheme, _, rest = self.source.partition(":")
            if scheme not in _SOURCES or not _SOURCES[scheme].fullmatch(rest):
                raise self._wrong("from", _HOW)
        elif not self.source or not all(isinstance(w, str) and w for w in self.source):
            raise self._wrong("from", f"is a text, or the words of a command. It {_HOW}")
        if self.sigv4 and self.places != DEFAULT_PLACES:
            raise self._wrong("in", "is not for a key that signs (sigv4): it is never sent")
        if self.expose and self.hosts:
            raise self._wrong("expose", "gives the value to the sandbox, so leave hosts out")

    def _names_native_secret(self) -> bool:
        return (
            isinstance(self.source, str)
            and _NATIVE.fullmatch(self.source) is not None
            and not self.source.startswith(PUBLIC_PREFIXES)
        )

    @property
    def is_native(self) -> bool:
        """It names a secret that a hosted backend keeps itself."""
        return not self.hosts and not self.expose

    @property
    def native_name(self) -> str:
        return str(self.source or self.name)

    def rules(self) -> list[EgressRule]:
        """The hosts and ports that it is bound to, as rules."""
        return [
            EgressRule(rule.host, ports=rule.ports or ((443, 80) if self.insecure else (443,)))
            for host in self.hosts
            for rule in EgressPolicy.of(host).rules
        ]

    def is_bound_to(self, host: str, port: int) -> bool:
        return any(rule.concerns(host, port) for rule in self.rules())

    def is_sent_in(self, place: str) -> bool:
        """Whether its value takes the place of its placeholder there."""
        return place in self.places and not self.sigv4

    def knows(self, host: str) -> bool:
        """Whether it is bound to the host, at any port."""
        return any(rule.concerns(host, port) for rule in self.rules() for port in rule.ports)

    def _checked_hosts(self) -> tuple[str, ...]:
        value: Any = self.hosts
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, (list, tuple)) or not all(isinstance(h, str) for h in given):
            raise self._wrong("hosts", "is a list of hosts, such as api.example")
        for host in given:
            try:
                rules = EgressPolicy.of(host).rules
            except SpecError:
                raise self._wrong(
                    "hosts", "has an entry that is not HOST, *.HOST or HOST:PORT"
                ) from None
            for rule in rules:
                if rule.host == "*" or rule.is_preset or rule.is_address or rule.action != ALLOW:
                    raise self._wrong("hosts", "takes names: no address, no preset, not * alone")
        return tuple(dict.fromkeys(host.lower() for host in given))

    def _checked_places(self) -> tuple[str, ...]:
        value: Any = self.places
        given = value.split(",") if isinstance(value, str) else value
        if not isinstance(given, (list, tuple)) or not given or not set(given) <= set(PLACES):
            raise self._wrong("in", f"is a list of {', '.join(PLACES)}")
        return tuple(place for place in PLACES if place in given)

    def _wrong(self, key: str, takes: str) -> SpecError:
        return SpecError(f"secrets: {key} of the secret {self.name!r} {takes}.")

    def to_json(self) -> str | dict[str, Any]:
        """The shortest form that ``read_secrets`` takes."""
        plain: dict[str, Any] = {}
        keys = {field: key for key, field in _KEYS.items()}
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                plain[keys.get(item.name, item.name)] = (
                    list(value) if isinstance(value, tuple) else value
                )
        if plain.get("from") == f"env:{self.name}":
            del plain["from"]
        if plain.keys() == {"name", "hosts"} and len(self.hosts) == 1:
            return f"{self.name}@{self.hosts[0]}"
        if plain.keys() <= {"name", "from"} and self.is_native:
            return f"{self.name}={self.source}" if self.source else self.name
        return plain


def read_secrets(value: Any) -> tuple[SecretDeclaration, ...]:
    """Declarations from configuration: objects, JSON text, or words ``NAME@HOST``,
    ``NAME=SOURCE@HOST``; ``NAME`` and ``NAME=STORED`` for what the backend keeps. SpecError."""
    if isinstance(value, str):
        value = _parsed(value) if value.lstrip()[:1] in ("[", "{") else _words(value)
    if isinstance(value, (Mapping, SecretDeclaration)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise SpecError("secrets takes a list of names and objects.")
    found = tuple(map(_declaration, value))
    names = [one.name for one in found]
    if len(names) > MAX_SECRETS:
        raise SpecError(f"secrets names {len(names)} secrets; the limit is {MAX_SECRETS}.")
    for one in found:
        if names.count(one.name) > 1:
            raise SpecError(f"secrets names {one.name!r} twice.")
        if one.sigv4 and one.sigv4 not in names:
            raise SpecError(
                f"secrets: sigv4 of the secret {one.name!r} names no other secret. Declare the "
                f"access key id as a secret, too."
            )
    return found


def unreachable(secrets: Iterable[SecretDeclaration], policy: EgressPolicy) -> str | None:
    """What is wrong if no rule can permit a host that a secret is bound to: a secret opens no way
    out. Presets are not looked into. A notebook's own rules may leave the host out."""
    policy = policy.levels[-1]
    if any(rule.is_preset for rule in policy.rules):
        return None
    for secret in secrets:
        for rule in secret.rules():
            if not any(_permits_some(policy, rule.host, port) for port in rule.ports):
                return (
                    f"The secret {secret.name!r} is bound to {rule.host}, which no egress rule "
                    f"allows, and a secret opens no way out. Add {rule.host!r} to egress."
                )
    return None


def _permits_some(policy: EgressPolicy, host: str, port: int) -> bool:
    if not host.startswith("*."):
        for rule in policy.rules:
            if rule.concerns(host, port):
                if rule.action == ALLOW:
                    return True
                if not rule.is_partial:
                    return False
        return policy.default == ALLOW
    for rule in policy.rules:
        wide = rule.host == "*" or rule.concerns(host.replace("*", "x", 1), port)
        if rule.action == ALLOW and (wide or rule.host.endswith(host[1:])):
            return True
        if wide and not rule.is_partial:
            return False
    return policy.default == ALLOW


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise SpecError("secrets is not valid JSON.") from None


def _declaration(item: Any) -> SecretDeclaration:
    if isinstance(item, SecretDeclaration):
        return item
    if isinstance(item, str):
        item = _parsed(item) if item.lstrip()[:1] == "{" else _from_short(item)
    if not isinstance(item, Mapping):
        raise SpecError("secrets takes a list of names and objects; an entry is neither.")
    known = [*_KEYS, "expose", "insecure", "sigv4"]
    for key in item:
        if key not in known:
            near = closest(str(key), known)
            hint = f"Did you mean {near!r}?" if near else f"It has {', '.join(known)}."
            raise SpecError(f"secrets: an entry has a key that is unknown. {hint}")
    given: dict[str, Any] = {"name": ""}
    for key, value in item.items():
        if value is not None:
            given[_KEYS.get(str(key), str(key))] = (
                tuple(value) if isinstance(value, list) else value
            )
    return SecretDeclaration(**given)


def _from_short(text: str) -> dict[str, Any]:
    found = _SHORT.fullmatch(text)
    if found is None or not _NAME.fullmatch(found[1]) or found[2] == "" or found[3] == "":
        raise SpecError(
            "secrets: an entry is none of NAME@HOST, NAME=SOURCE@HOST, and for backends that keep "
            "secrets themselves NAME (a variable's name) or VARIABLE=secret-name."
        )
    item: dict[str, Any] = {"name": found[1], "from": found[2]}
    return {**item, "hosts": [found[3]]} if found[3] else item
