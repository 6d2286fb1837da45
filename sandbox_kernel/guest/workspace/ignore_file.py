"""The ignore file of a folder, and the rules that the host compiles from it."""

import hashlib
import os
import re
import stat
from codecs import BOM_UTF8
from typing import Sequence, Tuple

from .nofollow import READ, pread_exactly

IGNORE_FILE = ".sandboxignore"
MAX_IGNORE = 64 * 1024


class Rules:
    """Regular expressions, and whether a matching path is ignored. The last match decides."""

    def __init__(self, rules: "Sequence[Tuple[str, bool]]") -> None:
        # A name may hold a line feed.
        self._rules = [
            (re.compile(pattern, re.DOTALL).match, ignored) for pattern, ignored in rules
        ]

    def ignored(self, path: str) -> bool:
        for matches, ignored in reversed(self._rules):
            if matches(path):
                return ignored
        return False


class IgnoreRefused(Exception):
    """The ignore file is unreadable or invalid. Saving without it would save excluded files."""

    def __init__(self, path: str, why: object) -> None:
        super().__init__(
            "%s cannot be obeyed (%s), so nothing was read from this folder: the file may exclude "
            "it. Fix or delete the file." % (path, why)
        )


def identity(text: bytes) -> str:
    """A hash of an ignore file; empty for none."""
    return hashlib.sha256(text).hexdigest() if text else ""


def read_ignore(root: str) -> bytes:
    """The ignore file of a folder, on the host or in the sandbox; empty if there is none.
    IgnoreRefused, also for a symlink."""
    path = os.path.join(root, IGNORE_FILE)
    try:
        fd = os.open(path, READ)
    except OSError as error:
        if not os.path.lexists(path):
            return b""
        why = "it is a symlink" if os.path.islink(path) else error.strerror
        raise IgnoreRefused(path, why) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise IgnoreRefused(path, "it is not a regular file")
        text = pread_exactly(fd, MAX_IGNORE + 1, 0)
    except OSError as error:
        raise IgnoreRefused(path, error.strerror) from error
    finally:
        os.close(fd)
    if len(text) > MAX_IGNORE:
        raise IgnoreRefused(path, "it has more than %d bytes" % MAX_IGNORE)
    if b"\0" in text:
        raise IgnoreRefused(path, "it is not UTF-8 text")
    return text[len(BOM_UTF8) :] if text.startswith(BOM_UTF8) else text
