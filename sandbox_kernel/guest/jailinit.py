"""Process 1 of the local jail: starts commands for the host, reaps, enforces limits, ends the jail.

Started by ``sandboxes/local/client.py`` through bubblewrap, with five inherited descriptors: the
listening socket of which only the host knows the path, a pipe with the configuration, the
sandbox's log, its state file and what it sees as /proc/meminfo. The host connects once a request
and speaks JSON lines:

    {"kind": "exec",  "argv": [...], "env": {...}, "cwd": "/workspace", "tty": [rows, columns]}
    {"kind": "spawn", "argv": [...], "env": {...}, "cwd": "/workspace", "main": false}
    (with "guest": [...], arguments for the guest program, which is then forked from here)
    {"kind": "info"}
    {"kind": "lease", "seconds": 3600.0}  (from now on)
    {"kind": "clear"}  (ends all processes but guest programs: what keeps the sandbox)
    {"kind": "stop"}

The descriptors of an ``exec``'s stdin, stdout and stderr travel with the request (two of them:
stderr goes to the log), so no data ever passes through here; a terminal's master goes back with
the answer. Answers are ``{"pid": n}`` or ``{"error": name, "message": text}``, and at the end
``{"exit": code}``. The host may send ``{"signal": n}``; when it hangs up, the command's process
group is ended.

Everything else in the jail is hostile and has the same uid. This process is therefore not
dumpable (no ptrace, no /proc/1/mem or fd), handles no signal but SIGCHLD, and hands nothing of its
own to a child.
"""

from __future__ import annotations

import array
import errno
import heapq
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time

from . import jailspawn, landlock
from .jailview import MemoryView
from .jailwatch import Watch, memory_in_use, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MAX_REQUEST = 2**20
LOG_LIMIT = 4 * 2**20
"""The log is cut to its last half when it grows beyond this."""
HANGUP_GRACE = 0.5
"""Seconds between SIGHUP and SIGKILL for a command whose host hung up."""
STOP_GRACE = 2.0
"""Seconds between SIGTERM and the end of the jail."""
LEASE_INTERVAL = 5.0
"""The lease is looked at this often, since the host may shorten it."""
MAX_EVENTS = 20
OOM_SCORE_RAISE = 500
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
RUN_FOLDER = "/run/sandbox-kernel"


class RequestError(Exception):
    """A request that cannot be met; goes back to the host as an answer."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Connection:
    """One connection from the host."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()
        self.fds: list[int] = []
        self.served = False
        self.pid = 0
        self.hung_up = False

    def receive(self) -> bool:
        """Take what has come. False at the end of the connection."""
        room = socket.CMSG_SPACE(3 * array.array("i").itemsize)
        data, ancillary, _, _ = self.sock.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self.fds.extend(fds)
        self.received += data
        return bool(data) and len(self.received) <= MAX_REQUEST

    def lines(self) -> list[bytes]:
        *complete, rest = bytes(self.received).split(b"\n")
        self.received = bytearray(rest)
        return complete

    def answer(self, fds: tuple[int, ...] = (), **message: Any) -> None:
        """Send one line. A host that does not take it is treated as gone by the next read."""
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self.sock.sendmsg([json.dumps(message).encode() + b"\n"], rights)
        except OSError:
            pass

    def close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


class Child:
    """A command that was started for the host."""

    def __init__(self, name: str, connection: Connection | None, main: bool) -> None:
        self.name = name
        self.connection = connection
        self.main = main
        self.guest = False


class JailInit:
    """The server. ``run`` never returns."""

    def __init__(
        self, config: dict[str, Any], listen_fd: int, log_fd: int, state_fd: int, view_fd: int
    ) -> None:
        self._log_fd = log_fd
        self._view = MemoryView(view_fd, config["memory"])
        self._state_fd = state_fd
        self._lease = float(config["lease"])
        self._environ = {**os.environ, **config["env"]}
        self._children: dict[int, Child] = {}
        self._attached = 0
        self._idle_since = time.monotonic()
        self._stopping = ""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._state: dict[str, Any] = {"events": [], "kills": {}, "ended": "", "reason": ""}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(fileno=listen_fd)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._log_in, self._log_out = os.pipe()
        os.set_blocking(self._log_in, False)
        self._selector.register(self._log_in, selectors.EVENT_READ, self._take_log)
        self._apply_limits(config)
        self._oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        self._oom_score = int(os.read(self._oom_fd, 16))
        self._landlock = landlock.restrict()
        self._layer = landlock.layer() if config["commands_apart"] else -1
        _control(PR_SET_DUMPABLE, 0)
        # Bubblewrap's process outside. Without it, nobody would wait for the jail's end.
        _control(PR_SET_PDEATHSIG, signal.SIGKILL)
        self._handle_signals()
        watch = config["watch"]
        self._watch = Watch(
            memory=watch["memory"],
            process_limit=watch["processes"],
            disk=watch["disk"],
            folders=watch["folders"],
            cpus=os.cpu_count() or 1,
            report=self._record,
            is_main=lambda pid: pid in self._children and self._children[pid].main,
        )
        os.makedirs(RUN_FOLDER, mode=0o700, exist_ok=True)

    @staticmethod
    def _apply_limits(config: dict[str, Any]) -> None:
        for name, value in config["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))

    def _handle_signals(self) -> None:
        # What the host's process ignores (under nohup, say) is no matter of the jail's.
        for number in signal.valid_signals():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        # A process in the jail can signal process 1, but only where there is a handler.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        self._wakeup = (receiver, sender)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(receiver, selectors.EVENT_READ, self._reap)

    # --- the loop ---

    def run(self) -> NoReturn:
        self._check_watch()
        self._check_view()
        self._check_lease()
        while True:
            wait = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, _ in self._selector.select(wait):
                key.data()
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._timer_count, call))

    def _check_watch(self) -> None:
        self._after(self._watch.check(), self._check_watch)

    def _check_view(self) -> None:
        self._after(self._view.update(), self._check_view)

    def _check_lease(self) -> None:
        left = self._lease
        if not self._attached:
            left = self._idle_since + self._lease - time.monotonic()
        if left <= 0:
            self._end("lease", f"nobody was attached for {self._lease:g} s: the lease is over")
        self._after(min(left, LEASE_INTERVAL), self._check_lease)

    # --- connections ---

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the host gave up in the meantime
        sock.setblocking(False)
        connection = Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._readable(connection))

    def _readable(self, connection: Connection) -> None:
        try:
            alive = connection.receive()
        except BlockingIOError:
            return
        except OSError:
            alive = False
        for line in connection.lines():
            try:
                self._serve(connection, json.loads(line))
            except RequestError as error:
                connection.answer(error=error.name, message=str(error))
            except Exception as error:  # noqa: BLE001  (no request may end the jail)
                connection.answer(error="EINVAL", message=f"not a request: {error!r}")
            finally:
                connection.close_fds()
        if not alive:
            self._hang_up(connection)

    def _serve(self, connection: Connection, request: dict[str, Any]) -> None:
        if connection.served:
            self._signal(connection.pid, int(request["signal"]))
            return
        connection.served = True
        kind = request["kind"]
        if kind == "exec":
            self._exec(connection, request)
        elif kind == "spawn":
            child = Child(request["argv"][0], None, bool(request.get("main")))
            pid = self._start(child, request, self._log_actions())
            self._idle_since = time.monotonic()
            connection.answer(pid=pid)
        elif kind == "info":
            found = processes()
            connection.answer(
                processes=len(found),
                memory=memory_in_use(found),
                attached=self._attached,
                landlock=self._landlock,
                **self._state,
            )
        elif kind == "lease":
            self._lease = float(request["seconds"])
            self._idle_since = time.monotonic()
            connection.answer(lease=self._lease)
        elif kind == "clear":
            self._clear()
            connection.answer(cleared=True)
        elif kind == "stop":
            connection.answer(stopping=True)
            self._stop()
        else:
            raise RequestError("EINVAL", f"unknown kind {kind!r}")

    def _hang_up(self, connection: Connection) -> None:
        """The host has closed its side: end the command's process group, then this connection."""
        self._selector.unregister(connection.sock)
        connection.close_fds()
        connection.hung_up = True
        pid = connection.pid
        if pid and self._signal(pid, signal.SIGHUP):
            self._signal(pid, signal.SIGCONT)
            child = self._children.get(pid)

            def finish() -> None:
                # The same number may have become another command's by now.
                if self._children.get(pid) in (None, child):
                    self._signal(pid, signal.SIGKILL)

            self._after(HANGUP_GRACE, finish)
        if pid not in self._children:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        connection.sock.close()
        if connection.pid:
            self._attached -= 1
            self._idle_since = time.monotonic()

    @staticmethod
    def _signal(group: int, number: int) -> bool:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # only zombies are left of the group
        return True

    # --- commands ---

    def _exec(self, connection: Connection, request: dict[str, Any]) -> None:
        child = Child(request["argv"][0], connection, False)
        if request.get("tty"):
            master, actions = self._open_terminal(*request["tty"])
            try:
                connection.pid = self._start(child, request, actions)
                connection.answer(pid=connection.pid, fds=(master,))
            finally:
                os.close(master)
        else:
            if len(connection.fds) not in (2, 3):
                raise RequestError("EINVAL", "an exec needs its stdin, stdout and stderr")
            fds = [*connection.fds, self._log_out][:3]
            actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
            connection.pid = self._start(child, request, actions)
            connection.answer(pid=connection.pid)
        self._attached += 1

    def _log_actions(self) -> list[tuple[Any, ...]]:
        return [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, self._log_out, 1),
            (os.POSIX_SPAWN_DUP2, self._log_out, 2),
        ]

    @staticmethod
    def _open_terminal(rows: int, columns: int) -> tuple[int, list[tuple[Any, ...]]]:
        import fcntl
        import struct
        import termios

        master, slave = os.openpty()
        try:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            name = os.ttyname(slave)
        finally:
            os.close(slave)
        # The first terminal that the leader of a new session opens becomes its controlling one.
        return master, [
            (os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]

    def _start(self, child: Child, request: dict[str, Any], actions: list[tuple[Any, ...]]) -> int:
        argv = request["argv"]
        cwd = request["cwd"]
        environ = {**self._environ, "PWD": cwd, **request.get("env", {})}
        try:
            os.chdir(cwd)
        except OSError as error:
            raise RequestError(_name(error), f"the folder {cwd!r}: {error.strerror}") from None
        os.write(self._oom_fd, b"%d" % min(1000, self._oom_score + OOM_SCORE_RAISE))
        try:
            if "guest" in request:
                child.guest = True
                pid = jailspawn.fork(request["guest"], environ, actions)
            else:
                pid = jailspawn.spawn(argv, environ, actions, self._layer)
        except OSError as error:
            raise RequestError(_name(error), error.strerror or str(error)) from None
        finally:
            os.write(self._oom_fd, b"%d" % self._oom_score)
            os.chdir("/")
        self._children[pid] = child
        return pid

    def _reap(self) -> None:
        try:
            while self._wakeup[0].recv(4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                if self._stopping:
                    self._end("stop", self._stopping)
                return
            if not pid:
                return
            if os.WIFSTOPPED(status):
                # Nobody stops the keepers but code that wants to be rid of them, or by mistake.
                if pid in self._children and self._children[pid].guest:
                    _kill(pid, signal.SIGCONT)
                continue
            code = _exit_code(status)
            child = self._children.pop(pid, None)
            if code == -signal.SIGKILL:
                self._note_killed(pid, child, usage.ru_maxrss * 1024)
            if child is not None:
                self._ended(child, code)

    def _ended(self, child: Child, code: int) -> None:
        connection = child.connection
        if connection is not None:
            connection.answer(exit=code)
            if connection.hung_up:
                self._close(connection)
        elif not self._stopping:
            self.log(f"{child.name!r} ended with {_words(code)}")
        if child.main:
            self._end("main", f"its main process {child.name!r} ended with {_words(code)}")

    # --- the end ---

    def _clear(self) -> None:
        """Leave nothing but the keepers (the agent, connectors), and let those go on."""
        keepers = [pid for pid, child in self._children.items() if child.guest]
        try:
            os.kill(-1, signal.SIGSTOP)  # all at once, so that nothing can fork itself away
        except ProcessLookupError:
            return
        for process in processes():
            if process.pid not in (os.getpid(), *keepers):
                _kill(process.pid, signal.SIGKILL)
        for pid in keepers:
            _kill(pid, signal.SIGCONT)

    def _stop(self) -> None:
        if self._stopping:
            return
        self._stopping = "it was stopped"
        try:
            os.kill(-1, signal.SIGTERM)
            os.kill(-1, signal.SIGCONT)
        except ProcessLookupError:
            self._end("stop", self._stopping)
        self._after(STOP_GRACE, lambda: self._end("stop", self._stopping))

    def _end(self, kind: str, reason: str) -> NoReturn:
        """End the jail: the kernel kills all that is left when process 1 exits."""
        self._take_log()
        self._state.update(ended=kind, reason=reason)
        self._save_state()
        self.log(f"the sandbox ends: {reason}")
        os._exit(0)

    # --- log and state ---

    def log(self, text: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._append(f"{now} jail: {text}\n".encode(errors="replace"))

    def _append(self, data: bytes) -> None:
        try:
            os.write(self._log_fd, data)
            size = os.fstat(self._log_fd).st_size
            if size > LOG_LIMIT:
                kept = os.pread(self._log_fd, LOG_LIMIT // 2, size - LOG_LIMIT // 2)
                os.ftruncate(self._log_fd, 0)
                os.write(self._log_fd, b"[the log was cut here]\n" + kept)
        except OSError:
            pass  # a full disk must not end the jail, and there is nowhere left to say so

    def _take_log(self) -> None:
        """Move what the spawned commands wrote to the log. A bounded piece at a time, so that
        a flood of output does not keep this process from its other work."""
        for _ in range(4):
            try:
                self._append(os.read(self._log_in, 65536))
            except BlockingIOError:
                return

    def _record(self, event: dict[str, Any]) -> None:
        self.log(event["text"])
        self._remember(event)

    def _remember(self, event: dict[str, Any]) -> None:
        kills = self._state["kills"]
        kills[event["kind"]] = kills.get(event["kind"], 0) + 1
        self._state["events"] = [*self._state["events"], event][-MAX_EVENTS:]
        self._save_state()

    def _note_killed(self, pid: int, child: Child | None, peak: int) -> None:
        """Note a death by SIGKILL: with the cgroup's count of out-of-memory kills, which only the
        host can see, it tells who was hit."""
        if any(event["pid"] == pid for event in self._state["events"]):
            return
        name = os.path.basename(child.name) if child else ""
        self._remember(
            {"kind": "killed", "pid": pid, "name": name, "used": peak, "time": time.time()}
        )

    def _save_state(self) -> None:
        data = json.dumps(self._state).encode() + b"\n"
        try:
            os.pwrite(self._state_fd, data, 0)
            os.ftruncate(self._state_fd, len(data))
        except OSError as error:
            self.log(f"the state could not be written: {error}")


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended meanwhile


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "EIO")


def _exit_code(status: int) -> int:
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _control(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _read_config(fd: int) -> dict[str, Any] | None:
    data = b""
    while len(data) <= MAX_REQUEST:
        piece = os.read(fd, 65536)
        if not piece:
            break
        data += piece
    os.close(fd)
    config = json.loads(data) if data else None
    return config if isinstance(config, dict) else None


def _close_others(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor of the listing itself


def main() -> NoReturn:
    """``sys.argv``: the numbers of the inherited descriptors."""
    listen_fd, config_fd, log_fd, state_fd, view_fd = own = [int(text) for text in sys.argv[1:6]]
    _close_others({0, 1, 2, *own})
    for fd in own:
        os.set_inheritable(fd, False)
    config = _read_config(config_fd)
    if config is None:
        # The host gave up before it was done, so nobody knows of this jail.
        sys.exit("jailinit: no configuration, so nobody wants this jail")
    JailInit(config, listen_fd, log_fd, state_fd, view_fd).run()
