"""What a policy says of one connection or one request, and the words for it. No state, no I/O.

``EgressPolicy.decide`` defines what a policy means. Here it is asked with less knowledge: of an
opaque connection (TLS, or any other protocol) only host and port are known, and a rule about
methods or paths cannot be held. So an opaque connection passes only if every request in it would.

One thing is stricter than the policy: an address in place of a name passes only by a rule for
addresses, not by ``*`` or a default, because rules for names would otherwise mean little.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote

from sandbox_kernel.egress import ALLOW, DENY, EgressPolicy, EgressRule
from sandbox_kernel.gateway.names import NameRefused, Target, read_target
from sandbox_kernel.gateway.refusals import Refusal

_WEB_PORTS = (80, 443)
NEEDS_EXTRA = "reading encrypted requests needs the extra 'gateway'"
UNREADABLE = "it is neither TLS nor HTTP, so its requests cannot be read"
_ENCODED = re.compile(r"%([0-9A-Fa-f]{2})?")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
_STRUCTURE = frozenset("/\\.%;?#")
_NEVER_ENCODED = frozenset("/\\%\x7f")


@dataclass(frozen=True)
class Decision:
    """``allow`` or ``deny``, and why. ``number`` counts rules from 1; None: the default decided."""

    action: str
    rule: EgressRule | None
    number: int | None
    reason: str
    hint: str = ""
    status: int = 403
    """What an HTTP client is told if this denies."""
    wait: int = 0
    """Seconds after which the same request would be allowed; 0: never."""
    outer: tuple[EgressRule | None, ...] = ()
    """What decided in the other sets of rules, if there are several. An address that is not public
    must be named by all of them."""
    not_at: tuple[EgressRule, ...] = ()
    """Rules that deny addresses and come before what has decided for a name, in any set: the name
    is not reached at such an address."""

    @property
    def allowed(self) -> bool:
        return self.action == ALLOW

    def denial(self, target: Target) -> str:
        """The one line that a person sees."""
        why = f"{self.reason}; {self.hint}" if self.hint else self.reason
        return f"egress denied: {target} ({why})"

    def refusal(self, target: Target) -> Refusal:
        return Refusal(self.status, self.denial(target), wait=self.wait)


def judge_connection(
    policy: EgressPolicy, target: Target, why_unread: str = NEEDS_EXTRA
) -> Decision:
    """The decision for a connection of which only the target is known, and why nothing else is."""
    return strictest(connection_decisions(policy, target, why_unread))


def judge_request(policy: EgressPolicy, target: Target, method: str, path: str) -> Decision:
    """The decision for an HTTP request that can be read. ``path`` is without the query."""
    return strictest(request_decisions(policy, target, method, path))


def connection_decisions(
    policy: EgressPolicy, target: Target, why_unread: str = NEEDS_EXTRA
) -> list[Decision]:
    """What each level of the policy says of a connection."""
    found = [_judge_connection(level, target, why_unread) for level in policy.levels]
    return _named(policy, found)


def request_decisions(
    policy: EgressPolicy, target: Target, method: str, path: str
) -> list[Decision]:
    """What each level of the policy says of a request."""
    found = [_judge_request(level, target, method, path) for level in policy.levels]
    return _named(policy, found)


def strictest(levels: Sequence[Decision]) -> Decision:
    """The first that denies; if none does, the first, with the rules of the others."""
    inner, *outer = levels
    not_at = tuple(rule for decision in levels for rule in decision.not_at)
    allowed = replace(inner, outer=tuple(decision.rule for decision in outer), not_at=not_at)
    return next((decision for decision in levels if not decision.allowed), allowed)


def _named(policy: EgressPolicy, levels: list[Decision]) -> list[Decision]:
    """Say which rules are meant, where there are several sets."""
    if policy.within is None:
        return levels
    inner, *outer = levels
    hint = f"{inner.hint} in the notebook's metadata" if inner.hint else ""
    return [replace(inner, reason=f"the notebook's own rules: {inner.reason}", hint=hint), *outer]


def _judge_connection(policy: EgressPolicy, target: Target, why_unread: str) -> Decision:
    unread: tuple[int, EgressRule] | None = None
    for number, rule in enumerate(policy.rules, 1):
        if not rule.concerns(target.host, target.port):
            continue
        if not rule.is_partial:
            decision = _decided(policy, target, number, rule)
            break
        if rule.action == DENY or rule.rate_limit_rpm is not None:
            verb = "denies" if rule.action == DENY else "limits"
            reason = f"rule {number} {verb} some requests to {rule.host}; {why_unread}"
            return Decision(DENY, rule, number, reason)
        unread = unread or (number, rule)
    else:
        decision = _decided(policy, target, None, None)
    if decision.allowed or unread is None:
        return decision
    number, rule = unread
    reason = f"rule {number} allows only some requests to {rule.host}; {why_unread}"
    return Decision(DENY, rule, number, reason)


def _judge_request(policy: EgressPolicy, target: Target, method: str, path: str) -> Decision:
    if any(rule.path and rule.concerns(target.host, target.port) for rule in policy.rules):
        ambiguity = ambiguous(path)
        if ambiguity:
            reason = f"rules for {target.host} look at paths, and this one has {ambiguity}"
            return Decision(DENY, None, None, reason)
    for number, rule in enumerate(policy.rules, 1):
        if rule.matches(target.host, target.port, method, path):
            return _decided(policy, target, number, rule)
    return _decided(policy, target, None, None)


def judge_some(policy: EgressPolicy, target: Target) -> Decision:
    """The decision for a connection in which each request is going to be decided: it is denied if
    none could be allowed."""
    return strictest(_named(policy, [_judge_some(level, target) for level in policy.levels]))


def _judge_some(policy: EgressPolicy, target: Target) -> Decision:
    for number, rule in enumerate(policy.rules, 1):
        if rule.concerns(target.host, target.port):
            if rule.action == ALLOW and (target.address is None or rule.is_address):
                return _decided(policy, target, number, rule)
            if not rule.is_partial:
                return _decided(policy, target, number, rule)
    return _decided(policy, target, None, None)


def reads_requests(policy: EgressPolicy, target: Target) -> bool:
    """Whether a rule that counts for this target looks at single requests."""
    return any(rule.counts_requests for rule in _counting(policy, target))


def is_partial(policy: EgressPolicy, target: Target) -> bool:
    """Whether requests to the target differ by method or path, so that one must read them."""
    return any(rule.is_partial for rule in _counting(policy, target))


def _counting(policy: EgressPolicy, target: Target) -> Iterator[EgressRule]:
    """The first rule of each level that is about this target: it is about all requests to it, or
    they must be read."""
    for level in policy.levels:
        concerned = (rule for rule in level.rules if rule.concerns(target.host, target.port))
        yield from itertools.islice(concerned, 1)


def may_allow_some(policy: EgressPolicy, target: Target) -> bool:
    """Whether some request to the target can be allowed."""
    return judge_some(policy, target).allowed


def ports_for(policy: EgressPolicy, name: str) -> tuple[int, ...]:
    """The ports on which some request to a name can be allowed; 80 and 443 for rules without ports.
    Empty: nothing can permit the name."""
    try:
        host = read_target(name, 1)
    except NameRefused:
        return ()
    named = {
        port for rule in policy.all_rules for port in rule.ports if rule.concerns(host.host, port)
    }
    ports = sorted({*_WEB_PORTS, *named})
    return tuple(
        port for port in ports if may_allow_some(policy, Target(host.host, port, host.address))
    )


def ambiguous(path: str) -> str | None:
    """What in a path two servers could read in two ways, so that a pattern would not hold."""
    if not path.isascii():
        return "a character beyond ASCII"
    for found in _ENCODED.finditer(path):
        if found[1] is None:
            return "a broken percent escape"
        meant = chr(int(found[1], 16))
        if meant in _NEVER_ENCODED or _UNRESERVED.fullmatch(meant) or meant < " ":
            return f"the escape {found[0]}"
    try:
        plain = unquote(path, errors="strict")
    except UnicodeDecodeError:
        return "an escape that is not UTF-8"
    if any(set(unicodedata.normalize("NFKC", one)) & _STRUCTURE for one in plain if one > "~"):
        return "a character that some servers take for a slash, a dot or the like"
    if "\\" in path:
        return "a backslash"
    if "//" in path:
        return "an empty segment"
    for segment in path.split("/"):
        if segment.partition(";")[0] in (".", ".."):
            return f"the segment {segment}"
    return None


def _decided(
    policy: EgressPolicy, target: Target, number: int | None, rule: EgressRule | None
) -> Decision:
    action = policy.default if rule is None else rule.action
    if action == ALLOW and target.address is not None and (rule is None or not rule.is_address):
        reason = "it is an address, and no rule for addresses allows it"
        return Decision(DENY, rule, number, reason, _how_to_allow(target))
    before = policy.rules if number is None else policy.rules[: number - 1]
    not_at = tuple(rule for rule in before if rule.action == DENY and rule.is_address)
    if rule is None:
        if action == ALLOW:
            return Decision(ALLOW, None, None, "the default is allow", not_at=not_at)
        return Decision(DENY, None, None, "no rule allows it", _how_to_allow(target))
    verb = "allows" if action == ALLOW else "denies"
    reason = f"rule {number} {verb} {rule.host}"
    return Decision(action, rule, number, reason, not_at=not_at)


def _how_to_allow(target: Target) -> str:
    word = target.host if target.port in _WEB_PORTS else str(target)
    return f'allow it with egress=["{word}"]'
