"""Copies of events for a program of the operator's (``audit_command``), which gets them as JSON
lines on its stdin.

One process of the program for each process of ours. If it ends, it is started again, later each
time; meanwhile events wait, and those that find no room are counted: the program gets an event
``dropped`` with their number. Nobody ever waits for it, but for a moment at our own exit.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import subprocess
import threading
import time
from collections import deque

from sandbox_kernel.audit.event_log import Event, line_of, now
from sandbox_kernel.host_programs import host_environment

log = logging.getLogger(__name__)

MOST_WAITING = 1000
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
AT_EXIT = 2.0
"""Seconds that our exit waits for the program to take what is left, and again to end."""
_MOST_COMMANDS = 4

_shippers: dict[str, Shipper] = {}
_lock = threading.Lock()


def ship(command: str, event: Event) -> None:
    """Give an event to the program with this command line (words, as a shell splits them; no shell
    runs). Does not wait, and never raises."""
    with _lock:
        shipper = _shippers.get(command)
        if shipper is None or shipper.pid != os.getpid():  # a fork has no threads
            if len(_shippers) >= _MOST_COMMANDS and command not in _shippers:
                return
            shipper = _shippers[command] = Shipper(command)
            atexit.register(shipper.close)
    shipper.put(event)


class Shipper:
    """One program, and what waits for it."""

    def __init__(
        self, command: str, *, most_waiting: int = MOST_WAITING, first_pause: float = FIRST_PAUSE
    ) -> None:
        self.pid = os.getpid()
        self._command = command
        self._most_waiting = most_waiting
        self._first_pause = first_pause
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        # A daemon, because a program that reads nothing must not keep us from ending.
        self._thread = threading.Thread(target=self._run, name="sandbox-kernel audit", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        with self._changed:
            if len(self._waiting) >= self._most_waiting:
                self._dropped += 1
            else:
                self._waiting.append(line_of(event))
            self._changed.notify_all()

    def close(self) -> None:
        """Let the program have what is left, and end it."""
        if self.pid != os.getpid():
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(AT_EXIT)
        process = self._process
        if process is not None:
            # Once the thread has ended its stdin is closed, so that the program knows.
            try:
                process.wait(AT_EXIT if not self._thread.is_alive() else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with self._changed:
            lost = len(self._waiting) + self._dropped
        if lost:
            log.warning("%s did not take the last %d events of the audit.", self._program, lost)

    @property
    def _program(self) -> str:
        return f"The program of audit_command ({self._command.partition(' ')[0][:200]})"

    # --- in the thread

    def _run(self) -> None:
        pause = self._first_pause
        while self._wait_for_events():
            started = time.monotonic()
            problem = self._serve()
            if not problem:
                return
            if time.monotonic() - started > LONGEST_PAUSE:
                pause = self._first_pause
            log.warning("%s %s; it is started again in %g s.", self._program, problem, pause)
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, pause):
                    return
            pause = min(2 * pause, LONGEST_PAUSE)

    def _wait_for_events(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            return bool(self._waiting)

    def _serve(self) -> str:
        """Run the program for as long as it takes events. What went wrong; empty: we are closing,
        and it has them all."""
        try:
            process = subprocess.Popen(
                shlex.split(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=host_environment(),
                cwd="/",
                start_new_session=True,  # Ctrl-C is for us; it gets the last events
            )
        except (OSError, ValueError) as error:
            return f"cannot be started: {error}"
        self._process, stdin = process, process.stdin
        assert stdin is not None
        try:
            with stdin:
                while lines := self._next():
                    for line in lines:
                        stdin.write(line)
                    stdin.flush()
                    self._taken(len(lines))
        except OSError as error:
            process.kill()
            process.wait()
            return f"takes no more events: {error}"
        return ""

    def _next(self) -> list[bytes]:
        """What waits now, with the number of what was dropped before it; empty: we are closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            if self._dropped and self._waiting:
                event = {"time": now(), "kind": "dropped", "count": self._dropped}
                self._waiting.append(line_of(event))
                self._dropped = 0
            return list(self._waiting)

    def _taken(self, count: int) -> None:
        """Not earlier: what a program that ended may not have read is sent again to the next."""
        with self._changed:
            for _ in range(count):
                self._waiting.popleft()
