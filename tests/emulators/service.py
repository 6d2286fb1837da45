"""What emulated services have in common."""

from __future__ import annotations

from datetime import datetime, timezone


class Refused(Exception):
    """A request that is answered with an error, as the service words it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def when(moment: float) -> str:
    """A time in an answer."""
    return datetime.fromtimestamp(moment, timezone.utc).isoformat().replace("+00:00", "Z")
