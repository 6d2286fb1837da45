"""The events of a gateway, one for each connection or request.

Any callable that takes an event can be the sink of a gateway; the audit's are in
``sandbox_kernel.audit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sandbox_kernel.audit.event_log import AuditLog, Event, Sink, line_of, now
from sandbox_kernel.audit.reading import read

__all__ = ["AuditLog", "Event", "Sink", "egress_event", "line_of", "read", "secret_event"]


def egress_event(
    action: str,
    *,
    sandbox: str | None = None,
    host: str | None = None,
    port: int | None = None,
    method: str | None = None,
    path: str | None = None,
    rule: int | None = None,
    reason: str = "",
    sent: int = 0,
    received: int = 0,
    seconds: float = 0.0,
    secrets: Sequence[str] = (),
) -> Event:
    """The event of one connection or request. ``path`` loses its query, which may hold secrets;
    ``secrets`` are the names of those that were put in."""
    return {
        "time": now(),
        "kind": "egress",
        "sandbox": sandbox,
        "action": action,
        "host": host,
        "port": port,
        "method": method,
        "path": None if path is None else path.partition("?")[0],
        "rule": rule,
        "reason": reason,
        "sent": sent,
        "received": received,
        "seconds": round(seconds, 3),
        **({"secrets": list(secrets)} if secrets else {}),
    }


def secret_event(action: str, name: str, *, sandbox: str | None = None, **facts: Any) -> Event:
    """What happened to a secret, by its name: ``exposed`` to the sandbox, or ``kept`` from a
    request that had its placeholder."""
    return {
        "time": now(),
        "kind": "secret",
        "sandbox": sandbox,
        "action": action,
        "secret": name,
        **facts,
    }
