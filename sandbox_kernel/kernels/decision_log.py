"""What a sandbox's gateway has decided of late, for those who show it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sandbox_kernel.egress import DENY
from sandbox_kernel.gateway.audit import Event, Sink

MOST_KEPT = 200
_MOST_HOSTS = 100


@dataclass(frozen=True)
class Denial:
    """What was denied to one host, by one reason."""

    host: str
    port: int | None
    """None if the name alone was refused."""
    reason: str
    rule: int | None
    count: int = 1
    last: float = 0.0
    """Seconds since 1970."""

    @property
    def target(self) -> str:
        return self.host if self.port is None else f"{self.host}:{self.port}"


class DecisionLog:
    """Passes events on to the audit, and keeps the latest. Written on the background loop, read in
    any thread."""

    def __init__(self, audit: Sink) -> None:
        self._audit = audit
        self._events: deque[Event] = deque(maxlen=MOST_KEPT)
        self._unseen: dict[str, Denial] = {}
        self._lock = threading.Lock()
        self.on_denied: Callable[[Denial], object] = lambda denial: None
        """Called on the background loop, for each denial."""

    def __call__(self, event: Event) -> None:
        self._audit(event)
        denial = denial_of(event)
        with self._lock:
            self._events.append(dict(event))
            if denial is not None:
                add(self._unseen, denial, _MOST_HOSTS)
        if denial is not None:
            self.on_denied(denial)

    def events(self) -> list[Event]:
        """The latest, oldest first."""
        with self._lock:
            return list(self._events)

    @property
    def has_unseen(self) -> bool:
        return bool(self._unseen)

    def take_unseen(self) -> list[Denial]:
        """The denials since this was called last, one for each host."""
        with self._lock:
            found, self._unseen = self._unseen, {}
        return list(found.values())

    def forget_unseen(self, hosts: set[str]) -> None:
        """Somebody has seen the denials of these hosts."""
        with self._lock:
            for host in hosts:
                self._unseen.pop(host, None)

    def unseen_hosts(self) -> list[str]:
        with self._lock:
            return list(self._unseen)


def denial_of(event: Mapping[str, Any]) -> Denial | None:
    """The denial that an event of the audit tells of, if any. Its host comes from the sandbox."""
    host, port, rule = event.get("host"), event.get("port"), event.get("rule")
    if event.get("kind") != "egress" or event.get("action") != DENY or not isinstance(host, str):
        return None
    return Denial(
        host=host[:253],
        port=port if isinstance(port, int) else None,
        reason=str(event.get("reason", ""))[:500],
        rule=rule if isinstance(rule, int) else None,
        last=time.time(),
    )


def add(found: dict[str, Denial], denial: Denial, most: int) -> None:
    """Add a denial to those by host; beyond ``most`` hosts, they are one more."""
    before = found.get(denial.host)
    if before is not None:
        found[denial.host] = replace(denial, count=before.count + 1)
    elif len(found) < most:
        found[denial.host] = denial
