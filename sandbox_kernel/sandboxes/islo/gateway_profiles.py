"""Gateway profiles: what Islo lets out of a sandbox.

Every sandbox gets a profile of its own, made before it and deleted after it, unless the user names
one that exists: without any, the account's default would decide, which may let everything out.
A policy of ours is translated only if the result means the same whichever way Islo orders rules;
the SDK does not say whether low or high priorities come first. With any other policy a sandbox has
the profile that lets nothing out, and the gateway of this host holds the rules.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from islo.gateway_profiles import GatewayProfileCreateIntegrationPolicy_Custom
from islo.types import GatewayAction

from sandbox_kernel.egress import ALLOW, DENY, EgressPolicy, EgressRule
from sandbox_kernel.errors import SandboxError, SandboxNotFound, SpecError
from sandbox_kernel.sandboxes.islo.api import Api, Unsure
from sandbox_kernel.suggestions import check_keys

log = logging.getLogger(__name__)

_PARTS = frozenset({"wildcard", "methods", "path", "rate_limit_rpm", "deny", "default"})
"""Of our rules; a gateway profile has words for them."""
_ACTIONS = (ALLOW, DENY)
_LISTED = "the gateway profiles were listed"
_NO_INTEGRATIONS = GatewayProfileCreateIntegrationPolicy_Custom(keys=[])
"""The account's integrations may reach hosts and add credentials that nobody asked for."""


@dataclass(frozen=True)
class Rule:
    """One rule of a profile, in Islo's own words."""

    host_pattern: str
    path_pattern: str | None = None
    methods: tuple[str, ...] | None = None
    rate_limit_rpm: int | None = None
    action: str = ALLOW
    priority: int | None = None

    @classmethod
    def read(cls, values: Any) -> Rule:
        taken = _known(cls, values, "a rule of the gateway profile")
        if not isinstance(taken.get("host_pattern"), str) or not taken["host_pattern"]:
            raise SpecError("options: a rule of the gateway profile needs a host_pattern.")
        methods = taken.get("methods")
        if methods is not None:
            words = methods if isinstance(methods, (list, tuple)) else [None]
            if not all(isinstance(word, str) for word in words):
                raise SpecError(f"options: methods is a list of HTTP methods, not {methods!r}.")
            taken["methods"] = tuple(method.upper() for method in methods)
        for key in ("rate_limit_rpm", "priority"):
            if taken.get(key) is not None and type(taken[key]) is not int:
                raise SpecError(f"options: {key} is a whole number, not {taken[key]!r}.")
        _check_action(taken.get("action", ALLOW), "action")
        return cls(**taken)


@dataclass(frozen=True)
class Profile:
    """A profile to be made for one sandbox. ``internet_enabled`` lets traffic past the gateway."""

    default_action: str = DENY
    internet_enabled: bool = False
    rules: tuple[Rule, ...] = ()

    @classmethod
    def read(cls, values: Any) -> Profile:
        """From configuration. SpecError."""
        taken = _known(cls, values, "the gateway profile")
        _check_action(taken.get("default_action", DENY), "default_action")
        if not isinstance(taken.get("internet_enabled", False), bool):
            raise SpecError("options: internet_enabled is true or false.")
        rules = taken.get("rules", ())
        if not isinstance(rules, (list, tuple)):
            raise SpecError("options: the rules of the gateway profile are a list.")
        taken["rules"] = tuple(map(Rule.read, rules))
        return cls(**taken)

    @classmethod
    def of(cls, policy: EgressPolicy) -> Profile:
        """The same as a policy that is not ``beyond_own_rules``."""
        rules = tuple(
            Rule(
                host_pattern=rule.host,
                path_pattern=rule.path or None,
                methods=rule.methods or None,
                rate_limit_rpm=rule.rate_limit_rpm,
                action=rule.action,
                priority=number,
            )
            for number, rule in enumerate(policy.rules)
        )
        return cls(default_action=policy.default, rules=rules)


def _known(kind: type, values: Any, where: str) -> dict[str, Any]:
    known = [field.name for field in fields(kind)]
    if not isinstance(values, Mapping):
        raise SpecError(f"options: {where} is an object with the keys {', '.join(known)}.")
    check_keys(values, known, f"options: {where}")
    return dict(values)


def _check_action(action: Any, key: str) -> None:
    if action not in _ACTIONS:
        raise SpecError(f"options: {key} is 'allow' or 'deny', not {action!r}.")


# --- translation


def beyond_own_rules(policy: EgressPolicy) -> str | None:
    """What of a policy a profile cannot hold exactly, and why; None if it holds all of it."""
    if beyond := policy.unenforceable(_PARTS):
        return f"{beyond}: they know names of hosts, methods and paths"
    for number, rule in enumerate(policy.rules):
        for other_number, other in enumerate(policy.rules[:number]):
            same = (rule.action, rule.rate_limit_rpm) == (other.action, other.rate_limit_rpm)
            if not same and _may_overlap(rule, other):
                return (
                    f"egress[{number}].action={rule.action!r} beside egress[{other_number}]: both "
                    f"match some requests, and Islo does not say which of two rules comes first"
                )
    return None


def _may_overlap(one: EgressRule, other: EgressRule) -> bool:
    """Whether some request may match both. In doubt, yes."""
    if not _hosts_overlap(one.host, other.host):
        return False
    if one.methods and other.methods and not set(one.methods) & set(other.methods):
        return False
    if one.path and other.path:
        if "*" not in one.path + other.path:
            return one.path == other.path
        first, second = one.path.partition("*")[0], other.path.partition("*")[0]
        return first.startswith(second) or second.startswith(first)
    return True


def _hosts_overlap(one: str, other: str) -> bool:
    if "*" in (one, other):
        return True
    for pattern, host in ((one, other), (other, one)):
        if pattern.startswith("*.") and host.removeprefix("*").endswith(pattern[1:]):
            return True
    return one == other


# --- making and deleting


async def provision(api: Api, profile: Profile, name: str) -> str:
    """Make a profile with its rules; its id. On any failure nothing is left of it."""
    made = None
    try:
        made = await _create(api, profile, name)
        for rule in profile.rules:
            values = {k: v for k, v in asdict(rule).items() if v is not None}
            values["action"] = GatewayAction(rule.action)
            await api.call(
                api.profiles.create_gateway_rule,
                made,
                doing=f"a rule for {rule.host_pattern!r} was made",
                again=False,
                **values,
            )
        await _verify(api, profile, made)
    except BaseException:
        await tear_down(api, made, re.escape(name))
        raise
    return made


async def _create(api: Api, profile: Profile, name: str) -> str:
    try:
        answer = await api.call(
            api.profiles.create_gateway_profile,
            name=name,
            description="made by sandbox-kernel for one sandbox; goes with it",
            default_action=GatewayAction(profile.default_action),
            internet_enabled=profile.internet_enabled,
            is_default=False,
            integration_policy=_NO_INTEGRATIONS,
            doing=f"the gateway profile {name!r} was made",
            again=False,
        )
    except Unsure:
        found = await _find(api, re.escape(name))  # its name is of this sandbox only
        if found is None:
            raise
        return found
    return str(answer.id)


async def _verify(api: Api, profile: Profile, identity: str) -> None:
    """The profile as Islo has it must be the one that was asked for."""
    found = await api.call(
        api.profiles.get_gateway_profile, identity, doing="the gateway profile was read"
    )
    rules = list(getattr(found, "rules", None) or [])
    same = sorted(map(_comparable, rules)) == sorted(map(_comparable, profile.rules))
    plain = (str(found.default_action), bool(found.internet_enabled))
    if not same or plain != (profile.default_action, profile.internet_enabled):
        raise SandboxError(
            f"Islo's gateway profile {identity} is not the one that was asked for: it has "
            f"{len(rules)} rules of {len(profile.rules)}, default {found.default_action}."
        )


def _comparable(rule: Any) -> tuple[str, ...]:
    keys = ("host_pattern", "path_pattern", "rate_limit_rpm", "action")
    methods = ",".join(sorted(getattr(rule, "methods", None) or ()))
    return (*(str(getattr(rule, key, None) or "") for key in keys), methods)


async def _find(api: Api, pattern: str) -> str | None:
    """The profile whose whole name matches."""
    try:
        profiles = await api.call(api.profiles.list_gateway_profiles, doing=_LISTED)
    except SandboxError as error:
        log.warning("The gateway profile %s may be left: %s", pattern, error)
        return None
    found = (profile for profile in profiles if re.fullmatch(pattern, str(profile.name)))
    return next((str(profile.id) for profile in found), None)


async def existing(api: Api, wanted: str) -> str:
    """The id of a profile that the user names, or SpecError."""
    profiles = await api.call(api.profiles.list_gateway_profiles, doing=_LISTED)
    for profile in profiles:
        if wanted in (profile.id, profile.name):
            return str(profile.id)
    raise SpecError(
        f"There is no gateway profile {wanted!r} in this Islo account. "
        f"It has: {', '.join(sorted(p.name for p in profiles)) or 'none'}."
    )


async def tear_down(api: Api, identity: str | None, pattern: str) -> None:
    """Delete a profile of ours, after its sandbox; by its name if its id is not known. One that is
    gone is no error, and one that cannot be deleted is logged: unused, it lets nothing out."""
    identity = identity or await _find(api, pattern)
    if identity is None:
        return
    try:
        await api.call(
            api.profiles.delete_gateway_profile, identity, doing="the gateway profile was deleted"
        )
    except SandboxNotFound:
        pass
    except SandboxError as error:
        log.warning("The gateway profile %s is left in the Islo account: %s", identity, error)
