"""Presets in rules: ``@pip``, ``@npm`` and ``@conda`` stand for the hosts from which the package
manager of this machine fetches packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from sandbox_kernel.egress import EgressPolicy, EgressRule
from sandbox_kernel.errors import SpecError
from sandbox_kernel.gateway.index_logins import Login
from sandbox_kernel.gateway.names import NameRefused, Target, read_url


@dataclass
class Source:
    """Where packages come from, as one package manager is set up."""

    targets: list[Target] = field(default_factory=list)
    private_names: set[str] = field(default_factory=set)
    env: dict[str, str] = field(default_factory=dict)
    """What the same package manager needs in a sandbox. No credentials."""
    logins: dict[Target, Login] = field(default_factory=dict)
    """They stay on this machine."""

    def add(self, url: str) -> str:
        """Add the host of a URL; gives the URL without credentials. The package manager on this
        machine dials whatever address its name has, so that may be a private one. NameRefused."""
        plain, login = without_credentials(url)
        scheme, target, _ = read_url(plain.partition("#")[0])
        if target not in self.targets:
            self.targets.append(target)
        if login is not None:
            self.logins[target] = Login(*login, over_tls=scheme == "https")
        if target.address is None:
            self.private_names.add(target.host)
            if is_loopback_name(target.host):
                self.private_names.add(str(target))
        return plain


@dataclass(frozen=True)
class Expansion:
    """A policy without presets, and what goes with it."""

    policy: EgressPolicy
    private_names: frozenset[str] = frozenset()
    """For the gateway: names that may have private addresses."""
    env: dict[str, str] = field(default_factory=dict)
    """For the sandbox's environment."""
    logins: dict[Target, Login] = field(default_factory=dict)
    """For the gateway alone."""


def expand(policy: EgressPolicy) -> Expansion:
    """Replace presets by rules for real hosts, in their place. Reads files, and may start a
    process: call it in a thread. SpecError if a package manager is not set up here."""
    presets = {rule.host for rule in policy.all_rules if rule.is_preset}
    sources = {preset: _source(preset) for preset in sorted(presets)}
    # Rules within others are those of a notebook: they give it no trust that it was not granted.
    granted = [sources[rule.host] for rule in policy.levels[-1].rules if rule.is_preset]
    return Expansion(
        _expanded(policy, sources),
        frozenset(name for source in granted for name in source.private_names),
        {key: value for source in sources.values() for key, value in source.env.items()},
        {target: login for source in granted for target, login in source.logins.items()},
    )


def _expanded(policy: EgressPolicy, sources: Mapping[str, Source]) -> EgressPolicy:
    rules: list[EgressRule] = []
    for rule in policy.rules:
        rules += _rules(rule, sources[rule.host].targets) if rule.is_preset else [rule]
    within = None if policy.within is None else _expanded(policy.within, sources)
    return EgressPolicy(tuple(rules), policy.default, within)


def _source(preset: str) -> Source:
    from sandbox_kernel.gateway import conda_channels, npm_registry, pip_index

    read = {"@pip": pip_index.read, "@npm": npm_registry.read, "@conda": conda_channels.read}
    try:
        source = read[preset]()
    except NameRefused as error:
        raise SpecError(f"egress: {preset} cannot be used: {error}.") from None
    if not source.targets:
        raise SpecError(f"egress: {preset} has no index here that is reached over http or https.")
    return source


def _rules(rule: EgressRule, targets: Iterable[Target]) -> list[EgressRule]:
    return [
        replace(rule, host=target.host, ports=rule.ports or (target.port,)) for target in targets
    ]


def is_loopback_name(host: str) -> bool:
    """Whether a name means the machine that looks it up."""
    return host == "localhost" or host.endswith(".localhost")


def is_web(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def without_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """A URL without user and password, and these."""
    scheme, separator, rest = url.partition("://")
    end = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
    login, at, host = rest[:end].rpartition("@")
    if not at:
        return url, None
    user, _, password = login.partition(":")
    return f"{scheme}{separator}{host}{rest[end:]}", (unquote(user), unquote(password))
