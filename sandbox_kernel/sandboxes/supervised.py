"""The host's half of ``guest/command.py``: commands run exactly where a provider only runs strings.

A backend runs ``run_line`` with its SDK, writes ``request`` to the stdin of that, and passes what
comes on stderr through ``Marks``.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources

STARTED, FAILED, EXITED = "started", "failed", "exit"
_MAX_MARK = 4096


@functools.cache
def _program() -> str:
    return resources.files("sandbox_kernel.guest").joinpath("command.py").read_text()


def run_line(python: str, mark: str) -> str:
    """The shell command that runs the command of a request."""
    return _line(python, "run", mark)


def signal_line(python: str, process: tuple[int, str], number: int) -> str:
    """The shell command that signals a command's session; (0, "-") stands for all commands, and
    then its exit code says whether any is left."""
    return _line(python, "signal", str(process[0]), process[1], str(number))


def resize_line(python: str, process: tuple[int, str], rows: int, columns: int) -> str:
    """The shell command that sets the size of a command's terminal."""
    return _line(python, "resize", str(process[0]), process[1], str(rows), str(columns))


def _line(*words: str) -> str:
    python, *arguments = words
    return "exec " + shlex.join([python, "-I", "-S", "-c", _program(), *arguments])


def request(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    tty: tuple[int, int] | None = None,
    log: str | None = None,
) -> bytes:
    """What goes to stdin first."""
    fields = {"argv": list(argv), "env": dict(env), "cwd": cwd, "tty": tty, "log": log}
    body = json.dumps(fields).encode()
    return b"%010d\n" % len(body) + body


class Marks:
    """Finds the program's words among what the command writes to stderr."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        self._start = b"\0" + self.mark.encode() + b" "
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, list[str]]:
        """The command's own output, and the words that were in it. A part that may be the
        beginning of a word is held back."""
        data = self._held + data
        plain, words = [], []
        while (start := data.find(self._start)) >= 0:
            end = data.find(b"\n", start)
            if end < 0 and len(data) - start < _MAX_MARK:
                break
            end = len(data) if end < 0 else end
            plain.append(data[:start])
            words.append(data[start + len(self._start) : end].decode(errors="replace"))
            data = data[end + 1 :]
        if start < 0:
            start = self._partial(data)
        self._held = data[start:]
        plain.append(data[:start])
        return b"".join(plain), words

    def _partial(self, data: bytes) -> int:
        """Where the beginning of a mark stands at the end of the data, or its length."""
        tail = max(0, len(data) - len(self._start) + 1)
        while (tail := data.find(b"\0", tail)) >= 0:
            if self._start.startswith(data[tail:]):
                return tail
            tail += 1
        return len(data)

    def rest(self) -> bytes:
        """At the end: what was held back."""
        held, self._held = self._held, b""
        return held


_PROCESS = re.compile(r"(\d{1,10}) (\d{0,20})")


def process(words: str) -> tuple[int, str] | None:
    """A command's process id and start time, from what ``started`` says."""
    found = _PROCESS.fullmatch(words)
    return (int(found[1]), found[2] or "-") if found else None


def exit_code(words: str) -> int | None:
    """From what ``exit`` says; the word of the sandbox, so anything may stand there."""
    return int(words) if re.fullmatch(r"-?\d{1,3}", words) else None
