"""What the gateway of a sandbox has decided of late, for those who show it to a person."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sandbox_kernel.egress import DENY
from sandbox_kernel.gateway.audit import Event, Sink

LATELY = 60.0
"""Seconds."""
_MOST_KEPT = 200
_MOST_HOSTS = 100
_MOST_TOLD = 60
_MOST_TAIL = 256 * 1024
_WEB_PORTS = (80, 443)
_KEPT = {
    **{"time": 40, "kind": 20, "action": 20, "host": 253, "method": 32, "path": 200, "reason": 500},
    **dict.fromkeys(("port", "rule", "sent", "received", "seconds"), 0),
}
"""What is kept of an event, and how much of a text. The hosts and paths are the sandbox's words."""


@dataclass(frozen=True)
class Denial:
    """What was denied to one host."""

    host: str
    port: int | None
    """None if the name alone was refused."""
    reason: str
    rule: int | None
    last: float
    """Seconds since 1970."""
    count: int = 1

    @property
    def target(self) -> str:
        return self.host if self.port is None else f"{self._written}:{self.port}"

    @property
    def _written(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def why(self) -> str:
        """The gateway's reason, without the target and without its own hint."""
        text = self.reason.removeprefix(f"egress denied: {self.target} (").removesuffix(")")
        return text.removeprefix("egress denied: ").partition("; allow it with ")[0]

    @property
    def by_a_rule(self) -> bool:
        """Whether another rule would allow it; not what no rule can allow, and no rate limit."""
        reason = self.why.removeprefix("the notebook's own rules: ")
        return reason.startswith(_BY_RULES) and "requests a minute" not in reason

    def command(self, sandbox: str) -> str:
        """The command that allows it, or an empty string."""
        if not self.by_a_rule:
            return ""
        return f"sandbox-kernel policy set {sandbox} {shlex.quote('+' + self.word)}"

    @property
    def word(self) -> str:
        """A rule that allows it."""
        return self.host if self.port in (None, *_WEB_PORTS) else self.target


_BY_RULES = ("no rule ", "it is an address", *(f"rule {digit}" for digit in range(1, 10)))


class DecisionLog:
    """Passes events on to the audit, and keeps the latest. Written on the background loop, read in
    any thread."""

    def __init__(self, audit: Sink) -> None:
        self._audit = audit
        self._events: deque[Event] = deque(maxlen=_MOST_KEPT)
        self._unseen: dict[str, Denial] = {}
        self._told: dict[str, float] = {}
        self._lock = threading.Lock()
        self.on_denied: Callable[[Denial], object] = lambda denial: None
        """Called on the background loop, once a minute for each host, and not more often than that
        for 60 hosts."""

    def __call__(self, event: Event) -> None:
        self._audit(event)
        denial = denial_of(event)
        with self._lock:
            self._events.append(_shortened(event))
            if denial is not None:
                _add(self._unseen, denial)
        if denial is not None and self._is_news(denial):
            self.on_denied(denial)

    def _is_news(self, denial: Denial) -> bool:
        now = time.monotonic()
        self._told = {host: told for host, told in self._told.items() if told > now - LATELY}
        if denial.host in self._told or len(self._told) >= _MOST_TOLD:
            return False
        self._told[denial.host] = now
        return True

    def events(self) -> list[Event]:
        """The latest, oldest first."""
        with self._lock:
            return list(self._events)

    def denied_lately(self) -> list[Denial]:
        """The denials of the last minute, as far as they are kept."""
        since = time.time() - LATELY
        found = filter(None, map(denial_of, self.events()))
        return by_host(denial for denial in found if denial.last >= since)

    @property
    def unseen(self) -> list[Denial]:
        """Denials that nobody has taken or seen yet, one for each host."""
        with self._lock:
            return list(self._unseen.values())

    @property
    def has_unseen(self) -> bool:
        return bool(self._unseen)

    def seen(self, hosts: Iterable[str]) -> None:
        """The denials of these hosts have been shown."""
        with self._lock:
            for host in hosts:
                self._unseen.pop(host, None)


def denial_of(event: Mapping[str, Any]) -> Denial | None:
    """The denial that an event of the audit tells of, if any."""
    host, port, rule = event.get("host"), event.get("port"), event.get("rule")
    if event.get("kind") != "egress" or event.get("action") != DENY or not isinstance(host, str):
        return None
    try:
        when = datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None
    return Denial(
        host=host[: _KEPT["host"]],
        port=port if isinstance(port, int) else None,
        reason=str(event.get("reason", ""))[: _KEPT["reason"]],
        rule=rule if isinstance(rule, int) else None,
        last=when,
    )


def by_host(denials: Iterable[Denial]) -> list[Denial]:
    """One for each host, the latest of it, with their number."""
    found: dict[str, Denial] = {}
    for denial in denials:
        _add(found, denial)
    return list(found.values())


def denied_in(path: Path) -> list[Denial]:
    """The denials of the last minute in an audit, as far as its last 256 KiB tell. Blocks."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MOST_TAIL))
            lines = file.read(_MOST_TAIL).splitlines()
    except OSError:
        return []
    since, found = time.time() - LATELY, []
    for line in reversed(lines[1:] if size > _MOST_TAIL else lines):
        try:
            event = json.loads(line)
            when = datetime.fromisoformat(event["time"]).timestamp()
        except (ValueError, TypeError, KeyError):
            continue
        if when < since:
            break
        if isinstance(event, dict) and (denial := denial_of(event)) is not None:
            found.append(denial)
    return by_host(reversed(found))


def _add(found: dict[str, Denial], denial: Denial) -> None:
    before = found.get(denial.host)
    if before is not None:
        # A name that is refused says less than a connection to it.
        newest = before if denial.port is None else denial
        found[denial.host] = replace(newest, count=before.count + 1, last=denial.last)
    elif len(found) < _MOST_HOSTS:
        found[denial.host] = denial


def _shortened(event: Event) -> Event:
    cut = {k: v[: _KEPT[k]] for k, v in event.items() if k in _KEPT and isinstance(v, str)}
    return {**{k: v for k, v in event.items() if k in _KEPT}, **cut}
