"""Capabilities: what a backend can do and enforce, and the refusal of everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sandbox_kernel.egress import PARTS, EgressPolicy
from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.gateway.tls import extra
from sandbox_kernel.secret_declarations import unreachable
from sandbox_kernel.settings import settings_of
from sandbox_kernel.spec import KernelConfiguration, SandboxSpec
from sandbox_kernel.suggestions import check_keys

ENFORCED = tuple(
    setting.name for setting in settings_of(SandboxSpec).values() if setting.capability
)
"""The settings that a backend must enforce or refuse."""

GATEWAY_PARTS = frozenset(PARTS)
"""What the gateway enforces, with any backend whose sandboxes have no other network; some of it
only with the extra ``gateway``."""
_WITH_EXTRA = frozenset({"methods", "path"})


class EgressWay(Enum):
    """Which way all that leaves a sandbox takes: one for all rules, since their order counts."""

    CLOSED = "closed"
    """Nothing leaves it."""
    BACKEND = "backend"
    """The backend's own network, under rules of the backend's own."""
    GATEWAY = "gateway"
    """The wire, to the gateway on this host. The sandbox's own network is off."""


@dataclass(frozen=True, init=False)
class Capabilities:
    """What a backend can do: ``Capabilities("memory_mib", "pause")``, or ``memory_mib=True``.

    Each setting of SandboxSpec that needs a capability is a word, an argument and an attribute.
    ``check`` turns a missing one into SpecRefused. ``egress`` alone means rules that allow single
    hosts by name; ``egress_parts`` says what else is enforced.
    """

    enforced: frozenset[str] = frozenset()
    """Names of the settings that it enforces."""
    egress_parts: frozenset[str] = frozenset()
    """Which of ``sandbox_kernel.egress.PARTS`` are enforced as well: with ``gateway``, by that."""
    gateway: bool = False
    """Its sandboxes can be without a network of their own: then rules are enforced by the gateway
    on this host, over the wire, and only in sandboxes with an agent."""
    beyond_own_rules: Callable[[EgressPolicy], str | None] | None = None
    """For a backend with ``gateway`` and rules of its own: the first request of a policy that its
    own rules cannot hold exactly, and why; None if they hold the whole policy."""
    own_secrets: bool = False
    """It keeps the values of secrets itself, and ``secrets`` are names of those."""
    hosted: bool = False
    """It runs elsewhere and costs money: it is never replaced unless the user asks for that."""
    byte_exact_streams: bool = False
    reattach: bool = False
    pause: bool = False
    """``pause`` freezes the sandbox with its memory; ``resume`` lets it continue."""
    restart: bool = False
    """``resume`` starts a stopped sandbox again, with its files."""
    snapshot: bool = False
    """``snapshot`` keeps the files; with ``memory``, the running processes, too."""
    memory: bool = False
    fork: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)
    """Field name (``egress.ports`` for a rule's) -> why it is refused and what to do instead."""

    def __init__(self, *words: str, **given: Any) -> None:
        given.update(dict.fromkeys(words, True))
        abilities = {key: value for key, value in given.items() if key not in ENFORCED}
        check_keys(abilities, {*self.__dataclass_fields__, *ENFORCED}, "Capabilities")
        enforced = given.get("enforced", frozenset()) | {k for k in ENFORCED if given.get(k)}
        self.__dict__.update({"notes": {}, **abilities, "enforced": enforced})

    def __getattr__(self, name: str) -> bool:
        if name not in ENFORCED:
            raise AttributeError(name)
        return name in self.enforced

    def check(self, spec: SandboxSpec, backend: str) -> None:
        """Refuse a spec that asks for more than this backend enforces (invariant: no silent
        downgrade). ``create`` calls it before anything exists."""
        for name in ENFORCED:
            value = getattr(spec, name)
            if value and name not in self.enforced:
                raise self._refused(spec, backend, f"{name}={_shown(name, value)!r}", name)
        self._check_egress(spec, backend)
        if self.puts_in_secrets(spec):
            self._check_secrets(spec, backend)

    def puts_in_secrets(self, spec: SandboxSpec) -> bool:
        """Whether the gateway has secrets to put in, which the backend does not keep itself."""
        return bool(spec.secrets) and self.gateway and not self.own_secrets

    @staticmethod
    def _check_secrets(spec: SandboxSpec, backend: str) -> None:
        for secret in spec.secrets:
            if secret.is_native:
                why = (
                    f"It keeps no secrets itself. Bind the secret to a host: {secret.name}@HOST; "
                    f"the value comes from this machine."
                )
                raise refusal(spec.name, backend, f"secrets={secret.name!r}", why)
        what = f"secrets={_shown('secrets', spec.secrets)!r}"
        if not extra.installed():
            why = f"They need the extra 'gateway': {extra.INSTALL}."
            raise refusal(spec.name, backend, what, why)
        if problem := unreachable(spec.secrets, spec.egress):
            raise refusal(spec.name, backend, what, problem)

    def _check_egress(self, spec: SandboxSpec, backend: str) -> None:
        own_rules = self.egress_way(spec.egress) is EgressWay.BACKEND and self.gateway
        if not spec.egress or own_rules:
            return
        if beyond := spec.egress.unenforceable(self.egress_parts):
            field_name = beyond.partition("=")[0].partition(".")[2]
            raise self._refused(spec, backend, beyond, f"egress.{field_name}")
        without_extra = self.egress_parts - _WITH_EXTRA
        if not self.gateway or extra.installed():
            return
        if beyond := spec.egress.unenforceable(without_extra):
            why = f"Encrypted requests are read with the extra 'gateway': {extra.INSTALL}."
            raise refusal(spec.name, backend, beyond, why)

    def egress_way(self, policy: EgressPolicy) -> EgressWay:
        """Which way a policy takes that this backend does not refuse: its own rules if they hold
        all of it exactly, else the gateway."""
        if not policy:
            return EgressWay.CLOSED
        if not self.gateway:
            return EgressWay.BACKEND
        if self.beyond_own_rules is None or self.why_gateway(policy):
            return EgressWay.GATEWAY
        return EgressWay.BACKEND

    def why_gateway(self, policy: EgressPolicy) -> str | None:
        """What of a policy the backend's own rules cannot hold; None if it has none, or they hold
        the whole policy."""
        return None if self.beyond_own_rules is None else self.beyond_own_rules(policy)

    def check_kernel(self, configuration: KernelConfiguration, backend: str) -> None:
        """The same for the settings of a kernel, such as those that pause its sandbox."""
        for one in settings_of(KernelConfiguration).values():
            needed = one.capability and getattr(configuration, one.name)
            if needed and not getattr(self, one.capability):
                raise SpecRefused(
                    f"The kernel was not started: the backend {backend!r} cannot {one.capability} "
                    f"a sandbox, so {one.name} must be left out."
                )

    def _refused(self, spec: SandboxSpec, backend: str, what: str, note: str) -> SpecRefused:
        why = self.notes.get(note, "Leave it out, or choose a backend that has it.")
        if note.startswith("egress.") and (beyond := self.why_gateway(spec.egress)):
            why += f" The backend's own rules cannot hold {beyond}."
        return refusal(spec.name, backend, what, why)


def _shown(name: str, value: Any) -> Any:
    """A setting in an error. Of secrets only names: somebody may have given a value."""
    if name == "secrets":
        return [secret.name for secret in value]
    return value.to_json() if hasattr(value, "to_json") else value


def whole(spec: SandboxSpec, backend: str, field: str, unit: int, what: str) -> int | None:
    """A size of a spec in whole units; None if it is not set. SpecRefused if that is a fraction:
    nothing is rounded. ``what`` begins the reason."""
    value = getattr(spec, field)
    if value is None:
        return None
    if value % unit:
        why = f"{what}; ask for {(int(value // unit) + 1) * unit}."
        raise refusal(spec.name, backend, f"{field}={value!r}", why)
    return int(value // unit)


def refusal(sandbox: str, backend: str, what: str, why: str) -> SpecRefused:
    """The error for a setting that a backend cannot enforce; ``why`` also says what to do."""
    return SpecRefused(
        f"Sandbox {sandbox!r} was not created: the backend {backend!r} cannot enforce {what}. {why}"
    )
