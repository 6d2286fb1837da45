"""The host's half of ``guest/commands/single.py``, for providers that only run strings.

A backend runs ``line`` with its SDK, writes ``request`` to its stdin, and passes its stderr
through ``Marks``.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex

from sandbox_kernel import guest_program
from sandbox_kernel.sandboxes.command import Command

PYTHON = "python3"
STARTED, FAILED, EXITED = "started", "failed", "exit"
_MAX_MARK = 4096


def line(*arguments: str | int) -> str:
    """The shell command for ``run MARK``, which runs the command of a request; or for ``signal`` or
    ``resize``, a process and numbers. The process (0, "-") stands for all commands of ours; then
    the exit code is 1 while any is left."""
    program = guest_program.program("guest.commands.single")
    return "exec " + shlex.join([PYTHON, "-I", "-S", "-c", program, *map(str, arguments)])


def request(command: Command, *, log: str | None = None) -> bytes:
    """The first bytes for stdin. With ``log``, the command runs on its own and writes to that."""
    fields = {
        "argv": list(command.argv),
        "env": dict(command.env),
        "cwd": command.cwd,
        "tty": command.tty,
        "log": log,
    }
    body = json.dumps(fields).encode()
    return b"%010d\n" % len(body) + body


class Marks:
    """Finds the program's messages in the stderr that it shares with the command."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        self._start = b"\0" + self.mark.encode() + b" "
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, list[str]]:
        """The command's own output, and the messages in it. A partial message is held back."""
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
        """Where the data ends with the beginning of a mark; its length if it does not."""
        tail = max(0, len(data) - len(self._start) + 1)
        while (tail := data.find(b"\0", tail)) >= 0:
            if self._start.startswith(data[tail:]):
                return tail
            tail += 1
        return len(data)

    def rest(self) -> bytes:
        """At the end of stderr: the part that was held back."""
        held, self._held = self._held, b""
        return held


_PROCESS = re.compile(r"(\d{1,10}) (\d{0,20})")


def process(words: str) -> tuple[int, str] | None:
    """A command's pid and start time, from a ``started`` message; None if it has neither."""
    found = _PROCESS.fullmatch(words)
    return (int(found[1]), found[2] or "-") if found else None


def exit_code(words: str) -> int | None:
    """The exit code in an ``exit`` message; None if it is not one: the sandbox is hostile."""
    return int(words) if re.fullmatch(r"-?\d{1,3}", words) else None
