"""Process 1 of the local jail. ``commands/process_one.py`` says what it serves.

Started by ``sandboxes/local/client.py`` through bubblewrap, with five inherited descriptors: the
listening socket, whose path only the host knows, a pipe with the configuration, the sandbox's log,
its state file and its /proc/meminfo. The host connects once for each request. Requests of the jail:

    {"kind": "exec" | "spawn", ..., "guest": [...]}  (arguments for the guest program, which is
                                                      then forked from here)
    {"kind": "info"}
    {"kind": "lease", "seconds": 3600.0}  (from now on)
    {"kind": "clear"}  (ends all processes except the guest programs, which keep the sandbox)

The descriptors of an ``exec``'s stdin, stdout and stderr travel with the request (two of them:
stderr goes to the log), and a terminal's master with the answer: no data passes through here.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import socket
import sys
import time

from ...wire.descriptors import close_all, receive_with_descriptors, send_with_descriptors
from .. import landlock
from ..commands import start
from ..commands.process_one import MAX_REQUEST, Child, ProcessOne, RequestConnection, RequestError
from .meminfo import MemoryView
from .watchdog import LONGEST, Watch, memory_in_use, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

MAX_EVENTS = 20
OOM_SCORE_RAISE = 500
PR_SET_PDEATHSIG = 1
RUN_FOLDER = "/run/sandbox-kernel"


class SocketConnection(RequestConnection):
    """One connection from the host."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.sock = sock
        self.fds: list[int] = []
        """Those that came with the request."""
        self._terminal: tuple[int, ...] = ()

    def answer(self, fds: Sequence[int] = (), /, **message: Any) -> None:
        try:
            send_with_descriptors(self.sock, json.dumps(message).encode() + b"\n", fds)
        except OSError:
            pass  # the next read finds that the host has gone

    def open_streams(self, request: dict[str, Any], log: int) -> Sequence[int]:
        if request.get("tty"):
            self._terminal = start.open_terminal(*request["tty"])
            return self._terminal[1:] * 3
        if len(self.fds) not in (2, 3):
            raise RequestError("EINVAL", "an exec needs its stdin, stdout and stderr")
        return [*self.fds, log][:3]

    def started(self, pid: int) -> None:
        self.answer(self._terminal[:1], pid=pid)

    def release(self) -> None:
        close_all((*self.fds, *self._terminal))
        self.fds, self._terminal = [], ()

    def close(self) -> None:
        self.sock.close()


class JailInit(ProcessOne):
    """Process 1 of a jail."""

    name = "jail"

    def __init__(
        self, config: dict[str, Any], listen_fd: int, log_fd: int, state_fd: int, view_fd: int
    ) -> None:
        for name, value in config["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        self._oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        self._oom_score = int(os.read(self._oom_fd, 16))
        self._landlock = landlock.restrict()
        layer = landlock.layer() if config["commands_apart"] else -1
        self._handle_signals()
        environ = {**os.environ, **config["env"]}
        super().__init__(log=log_fd, lease=float(config["lease"]), environ=environ)
        if layer >= 0:
            self.prepare = functools.partial(landlock.enter, layer)
        # Bubblewrap's process outside. Without it, nobody would wait for the jail's end.
        start.process_control(PR_SET_PDEATHSIG, signal.SIGKILL)
        self._state_fd = state_fd
        self._state: dict[str, Any] = {"events": [], "kills": {}, "ended": "", "reason": ""}
        self.kinds.update(info=self._info, lease=self._set_lease, clear=self._clear)
        self._listener = socket.socket(fileno=listen_fd)
        self._listener.setblocking(False)
        self.loop.add_reader(listen_fd, self._accept)
        watch = Watch(
            **config["watch"],
            report=self._record,
            is_main=lambda pid: pid in self.children and self.children[pid].main,
        )
        os.makedirs(RUN_FOLDER, mode=0o700, exist_ok=True)
        self._repeat(watch.check)
        self._repeat(MemoryView(view_fd, config["memory"]).update)

    @staticmethod
    def _handle_signals() -> None:
        # The jail does not inherit which signals the host's process ignores (under nohup, say).
        for number in signal.valid_signals():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        # A process in the jail can signal process 1, but only where there is a handler.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _repeat(self, work: Callable[[], float]) -> None:
        """Do some work again and again; it says after how many seconds."""
        wait = LONGEST
        try:
            wait = work()
        finally:  # an error is logged, and must not end it
            self.loop.call_later(wait, self._repeat, work)

    # --- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the host gave up in the meantime
        sock.setblocking(False)
        self.loop.add_reader(sock.fileno(), self._readable, SocketConnection(sock))

    def _readable(self, connection: SocketConnection) -> None:
        try:
            data, fds = receive_with_descriptors(connection.sock, 65536, 3)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        connection.fds += fds
        alive = self.take(connection, data) and bool(data)
        if connection.served or not alive:
            connection.release()
        if not alive:
            self.loop.remove_reader(connection.sock.fileno())
            self.hang_up(connection)

    def _info(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        found = processes()
        connection.answer(
            processes=len(found),
            memory=memory_in_use(found),
            attached=self.attached,
            landlock=self._landlock,
            **self._state,
        )

    def _set_lease(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        self.set_lease(float(request["seconds"]))
        connection.answer(lease=float(request["seconds"]))

    # --- commands

    def start(self, child: Child, request: dict[str, Any], streams: Sequence[int]) -> int:
        """A command is hostile from its first instruction on, so it gets a Landlock layer of its
        own: its processes cannot read the memory of any that they have not started."""
        os.write(self._oom_fd, b"%d" % min(1000, self._oom_score + OOM_SCORE_RAISE))
        try:
            if "guest" not in request:
                return super().start(child, request, streams)
            from ..__main__ import main

            child.guest = True
            guest = functools.partial(main, request["guest"])
            return start.fork(guest, self.environment(request), request["cwd"], streams)
        finally:
            os.write(self._oom_fd, b"%d" % self._oom_score)

    def child_stopped(self, pid: int) -> None:
        # Hostile code may stop the guest programs, on purpose or by mistake.
        if pid in self.children and self.children[pid].guest:
            start.signal_process(pid, signal.SIGCONT)

    def child_ended(self, pid: int, child: Child | None, code: int, peak: int) -> None:
        """Record each death by SIGKILL: together with the cgroup's count of out-of-memory kills,
        which only the host can see, it says which process was hit."""
        if code != -signal.SIGKILL or any(e["pid"] == pid for e in self._state["events"]):
            return
        name = os.path.basename(child.name) if child else ""
        event = {"kind": "killed", "pid": pid, "name": name, "used": peak, "time": time.time()}
        self._remember(event)

    def _clear(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        """End all processes except the guest programs (agent, connectors)."""
        guests = [pid for pid, child in self.children.items() if child.guest]
        self.signal_all(signal.SIGSTOP)  # all at once, so that nothing can fork itself away
        for process in processes():
            if process.pid not in (os.getpid(), *guests):
                start.signal_process(process.pid, signal.SIGKILL)
        for pid in guests:
            start.signal_process(pid, signal.SIGCONT)
        connection.answer(cleared=True)

    def end(self, kind: str, reason: str) -> NoReturn:
        self.take_log()
        self._state.update(ended=kind, reason=reason)
        self._save_state()
        self.log(f"the sandbox ends: {reason}")
        os._exit(0)

    # --- the state file

    def _record(self, event: dict[str, Any]) -> None:
        self.log(event["text"])
        self._remember(event)

    def _remember(self, event: dict[str, Any]) -> None:
        kills = self._state["kills"]
        kills[event["kind"]] = kills.get(event["kind"], 0) + 1
        self._state["events"] = [*self._state["events"], event][-MAX_EVENTS:]
        self._save_state()

    def _save_state(self) -> None:
        data = json.dumps(self._state).encode() + b"\n"
        try:
            os.pwrite(self._state_fd, data, 0)
            os.ftruncate(self._state_fd, len(data))
        except OSError as error:
            self.log(f"the state could not be written: {error}")


def main() -> None:
    """``sys.argv``: the numbers of the inherited descriptors."""
    listen_fd, config_fd, log_fd, state_fd, view_fd = own = [int(text) for text in sys.argv[1:6]]
    start.close_inherited(own)
    for fd in own:
        os.set_inheritable(fd, False)
    with open(config_fd, "rb") as file:
        config = file.read(MAX_REQUEST)
    if not config:
        # The host gave up before it was done, so nobody knows of this jail.
        sys.exit("jail: no configuration came, so nobody wants this jail")
    JailInit(json.loads(config), listen_fd, log_fd, state_fd, view_fd).loop.run()
