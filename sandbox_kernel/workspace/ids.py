"""Ids of saves: they sort by time."""

from __future__ import annotations

import calendar
import re
import secrets
import time

_ID = re.compile(r"[0-9]{8}t[0-9]{6}-[0-9]{9}-[0-9a-f]{6}")


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def new_id(after: str) -> str:
    """An id that sorts behind another one, even if the clock went back."""
    now = time.time_ns()
    made = _format_id(now)
    if after and made[:25] <= after[:25]:
        then = time.strptime(after[:15], "%Y%m%dt%H%M%S")
        now = calendar.timegm(then) * 10**9 + int(after[16:25]) + 1
        made = _format_id(now)
    return made


def _format_id(now: int) -> str:
    seconds, rest = divmod(now, 10**9)
    stamp = time.strftime("%Y%m%dt%H%M%S", time.gmtime(seconds))
    return f"{stamp}-{rest:09d}-{secrets.token_hex(3)}"
