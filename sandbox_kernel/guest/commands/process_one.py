"""Process 1 of a sandbox: starts commands for the host, reaps, keeps log and lease, ends it all.

``jail/init.py`` and ``box.py`` derive from it; they differ in how requests and bytes arrive. A
request is a line of JSON, and has a connection of its own:

    {"kind": "exec",  "argv": [...], "env": {...}, "cwd": "/workspace", "tty": [rows, columns]}
    {"kind": "spawn", "argv": [...], "env": {...}, "cwd": "/workspace", "main": false}
    {"kind": "stop"}

The answer is ``{"pid": n}`` or ``{"error": name, "message": text}``, and later ``{"exit": code}``.
The host may send ``{"signal": n}``; when it hangs up, the command's process group is ended.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time

from ..loop import Loop
from . import start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

MAX_REQUEST = 2**20
HANGUP_GRACE = 0.5
"""Seconds between SIGHUP and SIGKILL for a command whose host hung up."""
STOP_GRACE = 2.0
"""Seconds between SIGTERM and the end of the sandbox."""
_LEASE_INTERVAL = 5.0
_PR_SET_DUMPABLE = 4


class RequestError(Exception):
    """A request failed. The host gets the reason as its answer."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class RequestConnection:
    """One request of the host's and the command that it started."""

    def __init__(self) -> None:
        self.served = False
        self.pid = 0
        self.hung_up = False
        self.received = b""

    def answer(self, **message: Any) -> None:
        """Send one line. A host that does not take it has hung up."""
        raise NotImplementedError

    def open_streams(self, request: dict[str, Any], log: int) -> Sequence[int]:
        """The ends of the streams that a command gets."""
        raise NotImplementedError

    def started(self, pid: int) -> None:
        """The command runs: carry its streams, and tell the host."""
        raise NotImplementedError

    def ended(self, code: int) -> None:
        """The command has ended."""
        self.answer(exit=code)

    def release(self) -> None:
        """Close what ``open_streams`` made and ``started`` did not take."""

    def close(self) -> None:
        raise NotImplementedError


class Child:
    """A command that was started for the host; ``guest`` if it is a program of ours."""

    def __init__(self, name: str, connection: RequestConnection | None, main: bool) -> None:
        self.name = name
        self.connection = connection
        self.main = main
        self.guest = False


class ProcessOne:
    """The server, on a loop that never ends.

    Everything else in the sandbox is hostile and may have the same uid. This process is therefore
    not dumpable (no ptrace, no /proc/1/mem or fd), and hands nothing of its own to a child.
    """

    name = "sandbox"
    log_limit = start.LOG_LIMIT

    def __init__(self, *, log: int, lease: float, environ: dict[str, str]) -> None:
        self.loop = Loop()
        self.loop.on_error = self._log_error
        self.children: dict[int, Child] = {}
        self.environ = environ
        self.prepare: Callable[[], object] | None = None
        """Runs in each command's process, just before its program."""
        self.attached = 0
        self.stopping = ("", "")
        self._lease = lease
        self._idle_since = self.loop.time()
        self._lease_timer = self.loop.call_later(0.0, self._check_lease)
        self._log_fd = log
        self._log_in, self._log_out = os.pipe()
        os.set_blocking(self._log_in, False)
        self.loop.add_reader(self._log_in, self.take_log)
        self.kinds: dict[str, Callable[[RequestConnection, dict[str, Any]], None]] = {
            "exec": self._exec,
            "spawn": self._spawn,
            "stop": self._stop_request,
        }
        start.process_control(_PR_SET_DUMPABLE, 0)
        self.loop.watch_children(self.reap)

    # --- the lease

    def set_lease(self, seconds: float) -> None:
        """End the sandbox after this many seconds without an attached host, counted from now."""
        self._lease = seconds
        self._idle_since = self.loop.time()
        self._lease_timer.cancel()
        self._check_lease()

    def _check_lease(self) -> None:
        left = self._lease
        if not self.attached:
            left = self._idle_since + self._lease - self.loop.time()
        if left <= 0:
            self.over("lease", f"nobody was attached for {self._lease:g} s: the lease is over")
        wait = min(max(left, 0.01), _LEASE_INTERVAL)
        self._lease_timer = self.loop.call_later(wait, self._check_lease)

    # --- requests

    def take(self, connection: RequestConnection, data: bytes) -> bool:
        """Serve the requests that ``data`` completes. False if one is too long."""
        *lines, connection.received = (connection.received + data).split(b"\n")
        if len(connection.received) > MAX_REQUEST:
            return False
        for line in lines:
            try:
                request = json.loads(line)
                served, connection.served = connection.served, True
                serve = self.follow_up if served else self.kinds.get(request["kind"])
                if serve is None:
                    raise RequestError("EINVAL", f"unknown kind {request['kind']!r}")
                serve(connection, request)
            except RequestError as error:
                connection.answer(error=error.name, message=str(error))
            except Exception as error:  # noqa: BLE001  (no request may end the sandbox)
                connection.answer(error="EINVAL", message=f"not a request: {error!r}")
        return True

    def follow_up(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        if not connection.pid:
            raise RequestError("ESRCH", "no command was started")
        start.signal_group(connection.pid, int(request["signal"]))

    def hang_up(self, connection: RequestConnection) -> None:
        """The host has closed its side: end the command's process group, then the connection."""
        if connection.hung_up:
            return
        connection.hung_up = True
        pid = connection.pid
        if pid and start.signal_group(pid, signal.SIGHUP):
            start.signal_group(pid, signal.SIGCONT)
            child = self.children.get(pid)

            def finish() -> None:
                # The number may belong to another command by now.
                if self.children.get(pid) in (None, child):
                    start.signal_group(pid, signal.SIGKILL)

            self.loop.call_later(HANGUP_GRACE, finish)
        if pid not in self.children:
            self.close_connection(connection)

    def close_connection(self, connection: RequestConnection) -> None:
        connection.close()
        if connection.pid:
            self.attached -= 1
            self._idle_since = self.loop.time()

    # --- commands

    def _exec(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        child = Child(request["argv"][0], connection, False)
        try:
            streams = connection.open_streams(request, self._log_out)
            connection.pid = self._start(child, request, streams)
            self.attached += 1
            connection.started(connection.pid)
        finally:
            connection.release()

    def _spawn(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        child = Child(request["argv"][0], None, bool(request.get("main")))
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            pid = self._start(child, request, (null, self._log_out, self._log_out))
        finally:
            os.close(null)
        self._idle_since = self.loop.time()
        connection.answer(pid=pid)

    def _start(self, child: Child, request: dict[str, Any], streams: Sequence[int]) -> int:
        try:
            pid = self.start(child, request, streams)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "EIO")
            raise RequestError(name, error.strerror or str(error)) from None
        self.children[pid] = child
        return pid

    def start(self, child: Child, request: dict[str, Any], streams: Sequence[int]) -> int:
        """Start the command of a request, and return its pid."""
        return start.start(
            request["argv"],
            self.environment(request),
            request["cwd"],
            streams,
            terminal=bool(request.get("tty")),
            prepare=self.prepare,
        )

    def environment(self, request: dict[str, Any]) -> dict[str, str]:
        return {**self.environ, "PWD": request["cwd"], **request.get("env", {})}

    def reap(self) -> None:
        """Some process has ended, or was stopped."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                if self.stopping[0]:
                    self.end(*self.stopping)
                return
            if not pid:
                return
            if os.WIFSTOPPED(status):
                self.child_stopped(pid)
                continue
            child = self.children.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            self.child_ended(pid, child, code, usage.ru_maxrss * 1024)
            if child is not None:
                self._ended(child, code)

    def child_stopped(self, pid: int) -> None:
        """A process was stopped by a signal."""

    def child_ended(self, pid: int, child: Child | None, code: int, peak: int) -> None:
        """A command or an orphan has ended. ``peak`` is the most memory that it had, in bytes."""

    def _ended(self, child: Child, code: int) -> None:
        connection = child.connection
        if connection is not None:
            connection.ended(code)
            if connection.hung_up:
                self.close_connection(connection)
        elif not self.stopping[0]:
            self.log(f"{child.name!r} ended with {exit_words(code)}")
        if child.main:
            reason = f"its main process {child.name!r} ended with {exit_words(code)}"
            self.over("main", reason)

    # --- the end

    def _stop_request(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        connection.answer(stopping=True)
        self.stop("stop", "it was stopped")

    def over(self, kind: str, reason: str) -> None:
        """The sandbox has nothing to live for: its lease is over, or its main command."""
        self.end(kind, reason)

    def stop(self, kind: str, reason: str) -> None:
        """Ask all processes to end; then end the sandbox."""
        if self.stopping[0]:
            return
        self.stopping = (kind, reason)
        self.signal_all(signal.SIGTERM)
        self.signal_all(signal.SIGCONT)
        self.loop.call_later(STOP_GRACE, self.end, kind, reason)
        self.reap()  # ends it at once if there is nobody

    def signal_all(self, number: int) -> None:
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            pass

    def end(self, kind: str, reason: str) -> None:
        """End the sandbox: Linux kills all that is left when process 1 exits."""
        raise NotImplementedError

    # --- the log

    def log(self, text: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._append(f"{now} {self.name}: {text}\n".encode(errors="replace"))

    def _log_error(self, error: BaseException) -> None:
        import traceback

        lines = traceback.format_exception(type(error), error, error.__traceback__)
        self.log("internal error: " + "".join(lines).rstrip())

    def _append(self, data: bytes) -> None:
        try:
            os.write(self._log_fd, data)
            start.cut_log(self._log_fd, self.log_limit)
        except OSError:
            pass  # a full disk must not end the sandbox, and nobody could be told

    def take_log(self) -> None:
        """Move what the spawned commands wrote to the log. A bounded piece at a time, so that
        a flood of output does not keep this process from its other work."""
        for _ in range(4):
            try:
                self._append(os.read(self._log_in, 65536))
            except BlockingIOError:
                return


def exit_words(code: int) -> str:
    """An exit code, as the log says it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
