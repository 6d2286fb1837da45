"""Where symlinks of a sandbox would lead on the host."""

from __future__ import annotations

import os
from collections.abc import Callable

_MOST_STEPS = 40
Lookup = Callable[[str], "list[str]"]
"""The targets that a path may have as a symlink; empty if it is none."""


def stays_inside(path: str, target: str) -> bool:
    """Whether a symlink at ``path`` leads to somewhere in the same folder. ``..`` counts only at
    the beginning of its target: behind a name that is a symlink itself, it would lead anywhere."""
    if target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return up <= path.count("/") and ".." not in parts[up:]


def hidden_part(path: str) -> str:
    """The path up to its first name that begins with a dot; empty if there is none."""
    parts = path.split("/")
    for number, part in enumerate(parts, 1):
        if part.startswith("."):
            return "/".join(parts[:number])
    return ""


def why_not(path: str, target: str, lookup: Lookup, *, hidden: bool) -> str:
    """Why a symlink at ``path`` must not be made; empty if it may. It is followed through all that
    ``lookup`` says is a symlink; to what is hidden it may lead only if ``hidden`` says so."""
    left = _MOST_STEPS
    waiting = [(path, target)]
    while waiting:
        path, target = waiting.pop()
        left -= 1
        if left < 0:
            return "a symlink through too many others"
        if not stays_inside(path, target):
            return "a symlink that leads out of the folder"
        place = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if place == ".":
            continue
        if not hidden and hidden_part(place):
            return "a symlink to what is hidden"
        parts = place.split("/")
        for number in range(1, len(parts) + 1):
            here, rest = "/".join(parts[:number]), parts[number:]
            waiting += [(here, "/".join((to, *rest))) for to in lookup(here)]
    return ""
