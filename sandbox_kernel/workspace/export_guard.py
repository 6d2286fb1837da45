"""Which paths a sandbox must not write on the host, because programs there could obey them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sandbox_kernel.workspace.host_folder import HostFolder, own_folders
from sandbox_kernel.workspace.trees import Entry

_MOST_STEPS = 40
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta", "bin/python", "bin/python3")
_OF_AN_ENVIRONMENT = {
    *("bin", "sbin", "lib", "lib32", "lib64", "libexec", "include", "etc", "share", "ssl"),
    *("scripts", "conda-meta"),
}
_RUN_UNASKED = {"sitecustomize", "usercustomize"}
Lookup = Callable[[str], "list[str]"]
"""The targets that a path may have as a symlink; empty if it is not one."""


@dataclass
class Guard:
    """Guards an export of ``entries``; with ``hidden``, only this package's own folders."""

    folder: HostFolder
    entries: Mapping[str, Entry]
    store: str
    hidden: bool

    def __post_init__(self) -> None:
        top = self.folder.path
        self._own = own_folders(top, self.store)
        self._environments: dict[str, bool] = {}
        places = map(os.path.realpath, sys.path)
        self._imported_from = {
            place[len(top) + 1 :] for place in places if f"{place}/".startswith(f"{top}/")
        }

    def guarded(self, path: str) -> tuple[str, str] | None:
        """The path up to its guarded component, and what that is; None if it may be written."""
        for own in self._own:
            if path == own or path.startswith(f"{own}/"):
                return own, "a folder of sandbox-kernel"
        if self.hidden:
            return None
        if part := hidden_part(path):
            return part, "hidden"
        if part := self._new_module(path):
            return part, "a new module in a folder that this Python process imports from"
        if part := environment_part(path, self._is_environment):
            return part, "a part of a Python environment"
        return None

    def _new_module(self, path: str) -> str:
        """The path up to a module or package that is new here, and that this process would import.
        (``python -m jupyterlab`` imports from the folder in which it was started.)"""
        parts = path.split("/")
        for number in range(len(parts)) if self._imported_from else ():
            part = "/".join(parts[: number + 1])
            if "/".join(parts[:number]) in self._imported_from:
                entry = self.entries.get(part)
                is_folder = entry is not None and entry.kind == "d"
                module = f"{part}/__init__.py" in self.entries if is_folder else _module_name(part)
                if module and self.folder.signature(part) is None:
                    return part
        return ""

    def _is_environment(self, folder: str) -> bool:
        """Whether a folder is a Python environment, on the host or in the save."""
        if folder not in self._environments:
            marks = [f"{folder}/{mark}".lstrip("/") for mark in _ENVIRONMENT_MARKS]
            self._environments[folder] = any(
                mark in self.entries or self.folder.signature(mark) is not None for mark in marks
            )
        return self._environments[folder]


def hidden_part(path: str) -> str:
    """The path up to its first name that begins with a dot; empty if there is none."""
    parts = path.split("/")
    for number, part in enumerate(parts, 1):
        if part.startswith("."):
            return "/".join(parts[:number])
    return ""


def environment_part(path: str, is_environment: Callable[[str], bool]) -> str:
    """The path up to a part of a Python environment, or to a module that every interpreter imports;
    empty if there is none. ``is_environment`` is asked about each folder, "" being the first."""
    parts = path.split("/")
    for number, part in enumerate(part.lower() for part in parts):
        unasked = part == "pyvenv.cfg" or part.partition(".")[0] in _RUN_UNASKED
        if unasked or (part in _OF_AN_ENVIRONMENT and is_environment("/".join(parts[:number]))):
            return "/".join(parts[: number + 1])
    return ""


def _module_name(path: str) -> str:
    stem, _, suffix = os.path.basename(path).partition(".")
    return stem if suffix.rpartition(".")[2] in ("py", "pyc", "so") else ""


def stays_inside(path: str, target: str) -> bool:
    """Whether a symlink at ``path`` stays in its folder. ``..`` is allowed only at the beginning of
    the target: after a symlink it could lead anywhere."""
    if target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return up <= path.count("/") and ".." not in parts[up:]


def why_not_link(path: str, target: str, lookup: Lookup, guarded: Callable[[str], object]) -> str:
    """Why a symlink at ``path`` must not be made; empty if it may. Follows it through all symlinks
    that ``lookup`` knows; it must not lead out of the folder or to a ``guarded`` path."""
    left = _MOST_STEPS
    waiting = [(path, target)]
    while waiting:
        path, target = waiting.pop()
        left -= 1
        if left < 0:
            return "a symlink through too many others"
        if not stays_inside(path, target):
            return "a symlink out of the folder"
        place = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if place == ".":
            continue
        if guarded(place):
            return "a symlink to a hidden file or a Python environment"
        parts = place.split("/")
        for number in range(1, len(parts) + 1):
            here, rest = "/".join(parts[:number]), parts[number:]
            waiting += [(here, "/".join((to, *rest))) for to in lookup(here)]
    return ""
