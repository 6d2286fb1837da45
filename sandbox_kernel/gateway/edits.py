"""Changes to a policy, in words: ``+data.example`` and ``-data.example``, or rules in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sandbox_kernel.egress import EgressPolicy, EgressRule
from sandbox_kernel.errors import SpecError


def edited(policy: EgressPolicy, words: Sequence[str]) -> EgressPolicy:
    """The policy that these words make of this one. All of them begin with + or -, or none does;
    then they are the new rules. SpecError."""
    signs = {word[:1] if word[:1] in ("+", "-") else "" for word in words}
    if not words:
        raise SpecError("egress: give rules, such as data.example, or +data.example to add one.")
    if signs == {""}:
        return EgressPolicy.read(list(words))
    if "" in signs:
        plain = next(word for word in words if word[:1] not in ("+", "-"))
        raise SpecError(
            f"egress: {plain!r} has neither + nor -, but another word has. Give only rules to add "
            f"(+) and to remove (-), or only the rules that are to stand in place of all."
        )
    added: list[EgressRule] = []
    for word in words:
        wanted = _one_rule(word[1:])
        if word[0] == "+":
            added.append(wanted)
        else:
            policy = _without(policy, wanted)
    return _with(policy, tuple(added))


def _one_rule(word: str) -> EgressRule:
    found = EgressPolicy.read([word]).rules
    if not found:
        raise SpecError(f"egress: {word!r} is no rule that can be added or removed.")
    return found[0]


def _with(policy: EgressPolicy, added: tuple[EgressRule, ...]) -> EgressPolicy:
    """With these rules in front, where nothing comes before them; at each level, since all of them
    must allow a request."""
    within = None if policy.within is None else _with(policy.within, added)
    kept = tuple(rule for rule in policy.rules if rule not in added)
    return replace(policy, rules=added + kept, within=within)


def _without(policy: EgressPolicy, wanted: EgressRule) -> EgressPolicy:
    """Without the rules for a host, or for its ports if the word names some."""

    def is_meant(rule: EgressRule) -> bool:
        same = (rule.host, rule.action) == (wanted.host, wanted.action)
        return same and (not wanted.ports or rule.ports == wanted.ports)

    if not any(map(is_meant, policy.all_rules)):
        rules = ", ".join(str(rule.to_json()) for rule in policy.all_rules) or "none"
        raise SpecError(f"egress: no rule for {wanted.host} to remove; the rules are: {rules}.")
    levels = [tuple(r for r in level.rules if not is_meant(r)) for level in policy.levels]
    return _replaced(policy, levels)


def _replaced(policy: EgressPolicy, levels: list[tuple[EgressRule, ...]]) -> EgressPolicy:
    within = None if policy.within is None else _replaced(policy.within, levels[1:])
    return replace(policy, rules=levels[0], within=within)
