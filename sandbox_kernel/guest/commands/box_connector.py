"""The connector of a box: BoxLite runs it in the box for each link to ``box.py``."""

from __future__ import annotations

from ...wire.codec import BASE64
from ..connector import hand_over

ADDRESS = "\0sandbox-kernel-box"
_TIMEOUT = 120.0
"""Seconds for process 1 of a box that has just been started to listen."""


def main() -> int:
    return hand_over(ADDRESS, BASE64, _TIMEOUT)
