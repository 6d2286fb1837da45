"""Policies in files, and the watch over one that is in use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SpecError

_MOST_BYTES = 1 << 20


def read_policy_file(path: str | Path) -> EgressPolicy:
    """A policy from a file: JSON that ``EgressPolicy.read`` takes, or one rule a line, with # for
    comments. An empty file denies everything. SpecError if it cannot be read or understood."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise SpecError(f"The policy {path} cannot be read: {why}.") from None
    if len(data) > _MOST_BYTES:
        raise SpecError(f"The policy {path} is larger than {_MOST_BYTES >> 20} MiB.")
    try:
        return EgressPolicy.read(_parsed(text))
    except SpecError as error:
        raise SpecError(f"The policy {path} is wrong: {error}") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return [line for line in lines if line]


class WatchedPolicy:
    """A policy file in use. ``use`` gets each new policy; a file that can no longer be read or
    understood is a policy that denies everything, and ``tell`` says so."""

    def __init__(
        self,
        path: str | Path,
        use: Callable[[EgressPolicy], None],
        tell: Callable[[str], None],
    ) -> None:
        self._path = path
        self._use = use
        self._tell = tell
        self._seen = self._signature()

    def check(self) -> None:
        """Read the file again if it has changed."""
        if self._signature() != self._seen:
            self.reload()

    def reload(self) -> None:
        """Read the file again."""
        self._seen = self._signature()
        try:
            self._use(read_policy_file(self._path))
        except Exception as error:  # noqa: BLE001  whatever it is, nothing passes then
            self._use(EgressPolicy())
            self._tell(f"{error} Until that is mended, everything is denied.")
        else:
            self._tell(f"The policy {self._path} was read again.")

    def _signature(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
