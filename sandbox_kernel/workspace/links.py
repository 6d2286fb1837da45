"""What a sandbox must not write on the host unless that is asked for, and symlinks to it."""

from __future__ import annotations

import os
from collections.abc import Callable

_MOST_STEPS = 40
Lookup = Callable[[str], "list[str]"]
"""The targets that a path may have as a symlink; empty if it is none."""

_OF_AN_ENVIRONMENT = {
    *("bin", "sbin", "lib", "lib32", "lib64", "libexec", "include", "etc", "share", "ssl"),
    *("scripts", "conda-meta"),
}
_RUN_UNASKED = {"sitecustomize", "usercustomize"}


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


def environment_part(path: str, is_environment: Callable[[str], bool]) -> str:
    """The path up to what makes a Python environment of a folder, or to a module that interpreters
    import unasked, wherever they find it; empty if it is neither. ``is_environment`` is asked about
    the folders on the way, "" being the first."""
    parts = path.split("/")
    for number, part in enumerate(part.lower() for part in parts):
        unasked = part == "pyvenv.cfg" or part.partition(".")[0] in _RUN_UNASKED
        if unasked or (part in _OF_AN_ENVIRONMENT and is_environment("/".join(parts[:number]))):
            return "/".join(parts[: number + 1])
    return ""


def module_name(path: str) -> str:
    """The name under which a file can be imported; empty if it cannot."""
    stem, _, suffix = os.path.basename(path).partition(".")
    return stem if suffix.rpartition(".")[2] in ("py", "pyc", "so") else ""


def why_not(path: str, target: str, lookup: Lookup, guarded: Callable[[str], str]) -> str:
    """Why a symlink at ``path`` must not be made; empty if it may. It is followed through all that
    ``lookup`` says is a symlink; it may not lead to what is ``guarded``."""
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
        if guarded(place):
            return "a symlink to what is hidden, or to a Python environment"
        parts = place.split("/")
        for number in range(1, len(parts) + 1):
            here, rest = "/".join(parts[:number]), parts[number:]
            waiting += [(here, "/".join((to, *rest))) for to in lookup(here)]
    return ""
