"""The secrets of one sandbox: found on this host, and placeholders for them in the sandbox.

Placeholders are variables of the sandbox's spec, and so in its record: another process that takes
the sandbox over finds them there, and the values again on its own. Values are never written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sandbox_kernel.errors import SpecError
from sandbox_kernel.gateway.audit import Sink, secret_event
from sandbox_kernel.gateway.placeholders import is_placeholder, placeholder_for
from sandbox_kernel.gateway.secret_rewriting import HeldSecret, SecretRewriting
from sandbox_kernel.gateway.secret_sources import NoValue, find_value
from sandbox_kernel.spec import SandboxSpec


class SecretsInUse:
    """What this process holds of a sandbox's secrets."""

    def __init__(self, held: Iterable[HeldSecret]) -> None:
        self._held = tuple(held)

    @property
    def problems(self) -> Sequence[str]:
        """Why secrets have no value, one line each. Requests that need them are refused."""
        return [one.problem for one in self._held if one.problem]

    @property
    def exposes(self) -> bool:
        return any(one.declared.expose for one in self._held)

    def expose(self, audit: Sink, sandbox: str) -> dict[str, str]:
        """The variables with values that the sandbox itself may have, for its processes only."""
        found = {}
        for one in self._held:
            if one.declared.expose and one.value is not None:
                audit(secret_event("exposed", one.name, sandbox=sandbox))
                found[one.name] = one.value.reveal()
        return found

    def rewriting(self, audit: Sink, sandbox: str) -> SecretRewriting:
        """For the sandbox's gateway."""
        return SecretRewriting(self._held, audit, sandbox)


async def prepared(spec: SandboxSpec) -> tuple[SandboxSpec, SecretsInUse]:
    """The spec of a new sandbox with placeholders, and what they stand for. SpecError."""
    given = [one.name for one in spec.secrets if one.name in spec.env]
    if given:
        raise SpecError(
            f"Sandbox {spec.name!r} was not created: env sets {given[0]!r}, and so does secrets. "
            f"Leave one out."
        )
    held = []
    for one in spec.secrets:
        value = await find_value(one)
        held.append(HeldSecret(one, placeholder_for(value.reveal()), value))
    variables = {one.name: one.placeholder for one in held if not one.declared.expose}
    return replace(spec, env={**spec.env, **variables}), SecretsInUse(held)


async def found_again(spec: SandboxSpec) -> SecretsInUse:
    """For a sandbox that was made earlier, perhaps by another process. A secret that has no value
    now is left as a placeholder."""
    held = []
    for one in spec.secrets:
        placeholder = spec.env.get(one.name)
        if not one.expose and not is_placeholder(placeholder):
            problem = f"the secret {one.name!r} has no placeholder in the sandbox's record"
            held.append(HeldSecret(one, placeholder_for(""), None, problem))
            continue
        try:
            held.append(HeldSecret(one, placeholder or "", await find_value(one)))
        except NoValue as error:
            held.append(HeldSecret(one, placeholder or "", None, str(error)))
    return SecretsInUse(held)
