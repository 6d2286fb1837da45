"""Runs one command for an agent framework, in the sandbox, as the text of a ``-c``.

stdin has a request (its length as ten digits and a newline, then JSON) and then the command's own
input. The request:

    {"argv": [...], "env": {...}, "cwd": "/workspace", "merged": whether stderr goes to stdout}

The command leads a session of its own. Its end is the end of this program: what it leaves in the
background goes on, but may not hold the streams open. SIGTERM and SIGHUP end its whole session.
The exit code is a shell's: 128 + N for signal N, 127 for a program that is missing, 126 for one
that cannot be run.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import subprocess
import sys
import time

from .commands.single import read_exactly, write_all
from .commands.start import running_pids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DRAIN_GRACE = 0.5
"""Seconds for what the command wrote before its end, if something else holds its streams open."""
ENDED = 143
_ROUNDS = 20


class Runner:
    """The command, and whether it is to end."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.ending = False

    def end(self, *_: object) -> None:
        """For signals, and when nobody reads the output any more."""
        self.ending = True
        if self.process is not None:
            end_session(self.process.pid)
            os._exit(ENDED)

    def run(self, request: dict[str, Any]) -> int:
        streams = subprocess.STDOUT if request["merged"] else subprocess.PIPE
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.end)
        try:
            self.process = process = subprocess.Popen(
                request["argv"],
                env={**os.environ, **request["env"]},
                cwd=request["cwd"],
                stdout=subprocess.PIPE,
                stderr=streams,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return refused(request, error)
        if self.ending:
            self.end()
        try:
            self.carry(process)
        except BrokenPipeError:
            self.end()
        code = process.wait()
        return code if code >= 0 else 128 - code

    def carry(self, process: subprocess.Popen[bytes]) -> None:
        """Carry the output until it ends, or the command has."""
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        targets = {
            end.fileno(): to for end, to in ((process.stdout, 1), (process.stderr, 2)) if end
        }
        with selectors.DefaultSelector() as selector:
            for end in (wake, *targets):
                selector.register(end, selectors.EVENT_READ)
            last = None
            while targets:
                if last is None and process.poll() is not None:
                    last = time.monotonic() + DRAIN_GRACE
                left = None if last is None else last - time.monotonic()
                if left is not None and left <= 0:
                    return
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 65536)
                    if key.fd == wake:
                        continue
                    if data:
                        write_all(targets[key.fd], data)
                    else:
                        selector.unregister(key.fd)
                        del targets[key.fd]


def refused(request: dict[str, Any], error: Exception) -> int:
    """The command could not be started."""
    missing = isinstance(error, FileNotFoundError) and error.filename != request["cwd"]
    program = request["argv"][0]
    if missing:
        why = "%s: command not found" % program
    elif isinstance(error, OSError) and error.filename == request["cwd"]:
        why = "%s: %s" % (request["cwd"], error.strerror)
    else:
        number = error.errno if isinstance(error, OSError) else errno.EINVAL
        why = "%s: %s" % (program, os.strerror(number or errno.EINVAL))
    os.write(2, (why + "\n").encode(errors="surrogateescape"))
    return 127 if missing else 126


def end_session(leader: int) -> None:
    """Kill all processes of a session, also those that are forked meanwhile."""
    for _ in range(_ROUNDS):
        found = [pid for pid in running_pids() if session(pid) == leader]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass


def session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def main() -> int:
    for stream in (1, 2):
        os.set_blocking(stream, True)
    return Runner().run(json.loads(read_exactly(int(read_exactly(11)))))


if __name__ == "__main__":
    sys.exit(main())
