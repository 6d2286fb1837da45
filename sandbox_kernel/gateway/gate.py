"""The live policy of one sandbox: what it says now, rate limits, and changes at run time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from sandbox_kernel.egress import DENY, EgressPolicy, EgressRule
from sandbox_kernel.gateway import decisions
from sandbox_kernel.gateway.decisions import Decision
from sandbox_kernel.gateway.names import Target, read_target

_MINUTE = 60.0


class Gate:
    """Answers for one policy, which may be replaced. Belongs to one thread.

    A rate limit counts requests where they can be read, and connections where they cannot.
    """

    def __init__(
        self, policy: EgressPolicy, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._allowed: dict[EgressRule, deque[float]] = {}
        self._watchers: dict[object, Callable[[], None]] = {}

    @property
    def policy(self) -> EgressPolicy:
        return self._policy

    def set_policy(self, policy: EgressPolicy) -> None:
        """Replace the rules. Who has asked to be told (``on_changed``) looks at open connections
        again before this returns. Rules that stay go on counting."""
        self._policy = policy
        self._allowed = {r: t for r, t in self._allowed.items() if r in policy.all_rules}
        for watcher in list(self._watchers.values()):
            watcher()

    def on_changed(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call this after each change of rules; the result ends that."""
        key = object()
        self._watchers[key] = call

        def forget() -> None:
            self._watchers.pop(key, None)

        return forget

    def connection(
        self, host: str | Target, port: int = 0, *, why_unread: str = decisions.NEEDS_EXTRA
    ) -> Decision:
        """Decide for a connection of which nothing but the target is known, and count it.
        NameRefused for a host that is none."""
        target = _target(host, port)
        found = decisions.connection_decisions(self._policy, target, why_unread)
        return self._counted(found)

    def some(self, target: Target) -> Decision:
        """Decide whether a connection makes sense in which each request is decided."""
        return decisions.judge_some(self._policy, target)

    def reads_requests(self, target: Target) -> bool:
        """Whether a rule that counts for this target looks at single requests."""
        return decisions.reads_requests(self._policy, target)

    def is_partial(self, target: Target) -> bool:
        """Whether requests to the target differ by method or path."""
        return decisions.is_partial(self._policy, target)

    def request(self, host: str | Target, port: int, method: str, path: str) -> Decision:
        """Decide for an HTTP request that can be read (path without query), and count it."""
        target = _target(host, port)
        return self._counted(decisions.request_decisions(self._policy, target, method, path))

    def judge(self, target: Target, request: tuple[str, str] | None = None) -> Decision:
        """Decide again for what is under way (with method and path, where known). Not counted."""
        if request is None:
            return decisions.judge_connection(self._policy, target)
        return decisions.judge_request(self._policy, target, *request)

    def may_allow_some(self, target: Target) -> bool:
        """Whether some request to the target can be allowed."""
        return decisions.may_allow_some(self._policy, target)

    def ports_for(self, name: str) -> tuple[int, ...]:
        """The ports on which a name may be allowed; none: a DNS server refuses the name."""
        return decisions.ports_for(self._policy, name)

    def _counted(self, levels: Sequence[Decision]) -> Decision:
        """Count a request in the limits of all levels, if none of them denies it."""
        found = decisions.strictest(levels)
        if not found.allowed:
            return found
        now, counters = self._clock(), []
        for rule, decision in {level.rule: level for level in levels}.items():
            if rule is None or rule.rate_limit_rpm is None:
                continue
            times = self._allowed.setdefault(rule, deque())
            while times and times[0] <= now - _MINUTE:
                times.popleft()
            if len(times) >= rule.rate_limit_rpm:
                return _too_many(decision, rule.rate_limit_rpm, times[0] + _MINUTE - now)
            counters.append(times)
        for times in counters:
            times.append(now)
        return found


def _too_many(decision: Decision, most: int, left: float) -> Decision:
    wait = max(1, math.ceil(left))
    reason = f"rule {decision.number} allows {most} requests a minute"
    hint = f"try again in {wait} s"
    return replace(decision, action=DENY, reason=reason, hint=hint, status=429, wait=wait)


def _target(host: str | Target, port: int) -> Target:
    return host if isinstance(host, Target) else read_target(host, port)
