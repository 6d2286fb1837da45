"""Process 1 of a box: runs commands for the host, keeps their log, and ends the box.

BoxLite runs it as the box's main command (``python3 -c <this file>``), so the VM powers off when
it ends; the exit code tells the host why. The host reaches it through a *relay*: a command that
BoxLite runs in the box, which hands its stdin and stdout to this process and then only waits.

Over these go lines of JSON, ``[id, kind, value]``, in both directions. BoxLite decodes a command's
output as text and queues both directions without a bound, so bytes travel as base64 and no side
sends more than WINDOW bytes of a stream before the other one says that it took some.

    from the host                                  from here
    [0, "configure", {lease, env, workdir}]        [0, "hello", {boot}]
    [n, "exec", {argv, env, cwd, tty, duplex}]     [n, "started", pid]  or  [n, "failed", text]
    [n, "spawn", {argv, env, cwd, main}]           the same
    [n, "in", base64]    "" ends stdin             [n, "out" | "err", base64]    "" is its end
    [n, "took_out" | "took_err", size]             [n, "took_in", size]
    [n, "signal", number]                          [n, "exit", code]
    [n, "resize", [rows, columns]]
    [n, "close", null]                             [n, "closed", null]
    [n, "info" | "logs" | "stop", null]            [n, "reply", value]

Standard library only, Python 3.9+; it is read as text, never imported in the box.
"""

import base64
import ctypes
import errno
import fcntl
import heapq
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ADDRESS = "\0sandbox-kernel-supervisor"
WINDOW = 256 * 1024
CHUNK = 24 * 1024
MAX_LINE = 2**20
MAX_COMMANDS = 512
LOG_LIMIT = 2**20
HANGUP_GRACE = 0.5
STOP_GRACE = 2.0
UNCONFIGURED_LEASE = 600.0
EXIT_STOPPED, EXIT_LEASE, EXIT_MAIN = 80, 81, 82
PR_SET_DUMPABLE = 4


class Command:
    """A command that the host watches, with what waits to go in and what may come out."""

    def __init__(self, relay: "Relay", number: int) -> None:
        self.relay = relay
        self.number = number
        self.pid = 0
        self.stdin = -1
        self.outputs: dict[int, str] = {}
        self.credit = {"out": WINDOW, "err": WINDOW}
        self.pending = bytearray()
        self.input_ended = False
        self.terminal = False
        self.closing = False
        self.exited = False


class Relay:
    """One way to the host."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock = sock
        self.pid = pid
        self.fd_in = -1
        self.fd_out = -1
        self.received = bytearray()
        self.unsent = bytearray()
        self.commands: dict[int, Command] = {}


class Supervisor:
    def __init__(self) -> None:
        self.boot = os.urandom(8).hex()
        self.selector = selectors.DefaultSelector()
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.timer_count = 0
        self.relays: list[Relay] = []
        self.by_pid: dict[int, Command] = {}
        self.main_pid = 0
        self.lease = UNCONFIGURED_LEASE
        self.env: dict[str, str] = {}
        self.workdir = "/"
        self.log = bytearray()
        self.attached_at = time.monotonic()
        self.stopping = 0
        self.stop_replies: list[tuple[Relay, int]] = []
        self.log_in, self.log_out = os.pipe()
        os.set_blocking(self.log_in, False)
        self.watch(self.log_in, selectors.EVENT_READ, self.take_log)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(ADDRESS)
        self.listener.listen(16)
        self.listener.setblocking(False)
        self.watch(self.listener.fileno(), selectors.EVENT_READ, self.accept)
        wake_in, self.wake_out = os.pipe()
        for fd in (wake_in, self.wake_out):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.begin_stop(EXIT_STOPPED))
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self.watch(wake_in, selectors.EVENT_READ, lambda: self.woken(wake_in))
        self.later(1.0, self.check_lease)

    # --- the loop

    def watch(self, fd: int, events: int, call: "Callable[[], None]") -> None:
        self.selector.register(fd, events, call)

    def unwatch(self, fd: int) -> None:
        try:
            self.selector.unregister(fd)
        except KeyError:
            pass

    def later(self, delay: float, call: "Callable[[], None]") -> None:
        self.timer_count += 1
        heapq.heappush(self.timers, (time.monotonic() + delay, self.timer_count, call))

    def run(self) -> None:
        while True:
            wait = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else None
            for key, _ in self.selector.select(wait):
                # What came first may have closed this one, and its number may be another's now.
                if self.selector.get_map().get(key.fd) is key:
                    self.attempt(key.data, key.fd)
            while self.timers and self.timers[0][0] <= time.monotonic():
                self.attempt(heapq.heappop(self.timers)[2])

    def attempt(self, call: "Callable[[], None]", fd: int = -1) -> None:
        """An error costs a command or a relay, not the box."""
        try:
            call()
        except Exception:  # noqa: BLE001
            self.log += traceback.format_exc().encode()
            self.unwatch(fd)

    # --- relays

    def accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return
        sock.settimeout(5.0)
        try:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid = struct.unpack("3i", credentials)[0]
            # BoxLite's own commands have a parent outside of this PID namespace, which nothing
            # that runs in here can have.
            if parent_of(pid) != 0:
                raise OSError("not a command of the host's")
            _, fds, _, _ = socket.recv_fds(sock, 16, 2)
            if len(fds) != 2:
                raise OSError("no streams")
        except OSError:
            sock.close()
            return
        relay = Relay(sock, pid)
        relay.fd_in, relay.fd_out = fds
        for fd in fds:
            os.set_blocking(fd, False)
        self.relays.append(relay)
        self.watch(relay.fd_in, selectors.EVENT_READ, lambda: self.receive(relay))
        self.send(relay, 0, "hello", {"boot": self.boot, "python": sys.version.split()[0]})

    def receive(self, relay: Relay) -> None:
        try:
            data = os.read(relay.fd_in, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        relay.received += data
        if not data or len(relay.received) > MAX_LINE:
            return self.drop(relay)
        *lines, rest = bytes(relay.received).split(b"\n")
        relay.received = bytearray(rest)
        for line in lines:
            number, kind, value = json.loads(line)
            self.handle(relay, number, kind, value)

    def send(self, relay: Relay, number: int, kind: str, value: "Any") -> None:
        if relay.fd_out >= 0:
            if not relay.unsent:
                self.watch(relay.fd_out, selectors.EVENT_WRITE, lambda: self.flush(relay))
            relay.unsent += json.dumps([number, kind, value], separators=(",", ":")).encode()
            relay.unsent += b"\n"

    def flush(self, relay: Relay) -> None:
        try:
            del relay.unsent[: os.write(relay.fd_out, relay.unsent[:65536])]
        except BlockingIOError:
            return
        except OSError:
            return self.drop(relay)
        if not relay.unsent:
            self.unwatch(relay.fd_out)

    def drop(self, relay: Relay) -> None:
        """The host is gone: so are the commands that it watched."""
        if relay not in self.relays:
            return
        self.relays.remove(relay)
        for fd in (relay.fd_in, relay.fd_out):
            self.unwatch(fd)
            os.close(fd)
        relay.fd_in = relay.fd_out = -1
        relay.sock.close()
        for command in list(relay.commands.values()):
            self.close(command)

    # --- requests

    def handle(self, relay: Relay, number: int, kind: str, value: "Any") -> None:
        command = relay.commands.get(number)
        if kind == "configure":
            self.lease = float(value["lease"])
            self.env = value["env"]
            self.workdir = value["workdir"]
            os.makedirs(self.workdir, exist_ok=True)
            self.attached_at = time.monotonic()
        elif kind in ("exec", "spawn"):
            self.start(relay, number, kind, value)
        elif kind == "info":
            self.send(relay, number, "reply", {"processes": len(others(set()))})
        elif kind == "logs":
            self.send(relay, number, "reply", self.log.decode(errors="replace"))
        elif kind == "stop":
            self.stop_replies.append((relay, number))
            self.begin_stop(EXIT_STOPPED)
        elif command is None:
            pass  # about a command that has ended meanwhile
        elif kind == "in":
            self.feed(command, base64.b64decode(value))
        elif kind in ("took_out", "took_err"):
            command.credit[kind[5:]] += int(value)
            self.watch_outputs(command)
        elif kind == "signal":
            self.kill(command, int(value))
        elif kind == "resize" and command.terminal and command.stdin >= 0:
            resize(command.stdin, value)
        elif kind == "close":
            self.close(command)

    def start(self, relay: Relay, number: int, kind: str, value: "dict[str, Any]") -> None:
        command = Command(relay, number)
        try:
            if self.stopping:
                raise OSError(errno.ESHUTDOWN, "the box is being stopped")
            if len(self.by_pid) >= MAX_COMMANDS:
                raise OSError(errno.EAGAIN, f"more than {MAX_COMMANDS} commands at once")
            ends, ours = self.streams(kind, value, command)
            try:
                command.pid = self.run_command(value, ends, command.terminal)
            except BaseException:
                for fd in set(ours):
                    os.close(fd)
                raise
            finally:
                for fd in set(ends) - {self.log_out}:
                    os.close(fd)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.send(relay, number, "failed", why)
            return
        self.by_pid[command.pid] = command
        if kind == "spawn":
            command.closing = True  # nobody watches it
            if value.get("main"):
                self.main_pid = command.pid
        else:
            relay.commands[number] = command
        self.send(relay, number, "started", command.pid)
        self.watch_outputs(command)

    def streams(
        self, kind: str, value: "dict[str, Any]", command: Command
    ) -> "tuple[list[int], list[int]]":
        """The command's stdin, stdout and stderr, and our ends of them."""
        if kind == "spawn":
            return [os.open(os.devnull, os.O_RDWR), self.log_out, self.log_out], []
        if value.get("tty"):
            master, slave = os.openpty()
            resize(master, value["tty"])
            command.terminal = True
            command.stdin = master
            command.outputs[master] = "out"
            self.send_end(command, "err")
            ours = [master]
            ends = [slave, slave, slave]
        else:
            theirs, command.stdin = os.pipe()
            out, out_end = os.pipe()
            command.outputs[out] = "out"
            ours, ends = [command.stdin, out], [theirs, out_end, self.log_out]
            if value.get("duplex"):
                self.send_end(command, "err")
            else:
                err, ends[2] = os.pipe()
                command.outputs[err] = "err"
                ours.append(err)
        for fd in ours:
            os.set_blocking(fd, False)
        return ends, ours

    def send_end(self, command: Command, name: str) -> None:
        self.send(command.relay, command.number, name, "")

    def run_command(self, value: "dict[str, Any]", ends: "list[int]", terminal: bool) -> int:
        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        env = {**os.environ, **self.env, **value["env"]}
        cwd = value.get("cwd") or self.workdir
        if not os.path.isdir(cwd):
            raise OSError(errno.ENOENT, f"there is no folder {cwd}")
        process = subprocess.Popen(
            value["argv"],
            stdin=ends[0],
            stdout=ends[1],
            stderr=ends[2],
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=take_terminal if terminal else None,
        )
        process.returncode = 0  # reaped by woken(), not by its destructor
        return process.pid

    # --- streams

    def watch_outputs(self, command: Command) -> None:
        for fd, name in command.outputs.items():
            wanted = command.credit[name] > 0 and not command.closing
            events = selectors.EVENT_READ if wanted else 0
            if fd == command.stdin and command.pending:
                events |= selectors.EVENT_WRITE
            self.unwatch(fd)
            if events:
                self.watch(fd, events, lambda fd=fd: self.ready(command, fd))  # type: ignore[misc]
        if command.stdin >= 0 and command.stdin not in command.outputs:
            self.unwatch(command.stdin)
            if command.pending:
                self.watch(command.stdin, selectors.EVENT_WRITE, lambda: self.write(command))

    def ready(self, command: Command, fd: int) -> None:
        name = command.outputs[fd]
        if fd == command.stdin and command.pending:
            self.write(command)
        if command.credit[name] <= 0 or fd not in command.outputs:
            return
        try:
            data = os.read(fd, min(CHUNK, command.credit[name]))
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal that nobody has open any more
        self.send(command.relay, command.number, name, base64.b64encode(data).decode())
        command.credit[name] -= len(data)
        if not data:
            self.unwatch(fd)
            del command.outputs[fd]
            if fd != command.stdin:
                os.close(fd)
            self.finish(command)
        elif command.credit[name] <= 0:
            self.watch_outputs(command)

    def feed(self, command: Command, data: bytes) -> None:
        if command.terminal and not data:
            data = b"\x04"
        command.input_ended = command.input_ended or not data
        command.pending += data
        if len(command.pending) > 2 * WINDOW:
            return self.drop(command.relay)
        self.write(command)
        self.watch_outputs(command)

    def write(self, command: Command) -> None:
        while command.pending and command.stdin >= 0:
            try:
                size = os.write(command.stdin, command.pending[:65536])
            except BlockingIOError:
                return
            except OSError:
                size = len(command.pending)
                self.close_stdin(command)
            del command.pending[:size]
            self.send(command.relay, command.number, "took_in", size)
        if command.stdin < 0 and command.pending:
            self.send(command.relay, command.number, "took_in", len(command.pending))
            command.pending.clear()
        if command.input_ended and not command.pending and not command.terminal:
            self.close_stdin(command)
        elif not command.pending:
            self.watch_outputs(command)

    def close_stdin(self, command: Command) -> None:
        if command.stdin >= 0 and not command.terminal:
            self.unwatch(command.stdin)
            os.close(command.stdin)
            command.stdin = -1

    # --- ends

    def kill(self, command: Command, signum: int) -> None:
        if command.pid and not command.exited:
            try:
                os.killpg(command.pid, signum)
            except OSError:
                pass

    def close(self, command: Command) -> None:
        if command.closing:
            return
        command.closing = True
        for fd in {command.stdin, *command.outputs} - {-1}:
            self.unwatch(fd)
            os.close(fd)
        command.stdin = -1
        command.outputs.clear()
        if command.exited:
            return self.finish(command)
        self.kill(command, signal.SIGHUP)
        self.later(HANGUP_GRACE, lambda: self.kill(command, signal.SIGKILL))

    def finish(self, command: Command) -> None:
        """Forget a command when nothing more is to come from it."""
        if command.exited and (command.closing or not command.outputs):
            if not command.closing:
                command.closing = True
                if command.stdin >= 0:
                    self.unwatch(command.stdin)
                    os.close(command.stdin)
                    command.stdin = -1
            if command.relay.commands.pop(command.number, None) is not None:
                self.send(command.relay, command.number, "closed", None)

    def woken(self, wake_in: int) -> None:
        os.read(wake_in, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            command = self.by_pid.pop(pid, None)
            if command is not None:
                # What it left behind in its group has lost its leader, and its host, soon.
                if command.closing and command.number in command.relay.commands:
                    self.kill(command, signal.SIGKILL)
                command.exited = True
                if command.number in command.relay.commands:
                    self.send(command.relay, command.number, "exit", code)
                self.finish(command)
            if pid == self.main_pid:
                self.take_log()
                self.begin_stop(EXIT_MAIN)

    def check_lease(self) -> None:
        if any(relay.commands for relay in self.relays):
            self.attached_at = time.monotonic()
        elif time.monotonic() - self.attached_at > self.lease:
            self.begin_stop(EXIT_LEASE)
        self.later(min(1.0, self.lease / 4), self.check_lease)

    def begin_stop(self, code: int) -> None:
        if self.stopping:
            return
        self.stopping = code
        signal_all(signal.SIGTERM, {relay.pid for relay in self.relays})
        deadline = time.monotonic() + STOP_GRACE

        def check() -> None:
            relays = {relay.pid for relay in self.relays}
            if others(relays) and time.monotonic() < deadline:
                return self.later(0.02, check)
            signal_all(signal.SIGKILL, relays)
            self.later(0.05, end)

        def end() -> None:
            self.take_log()
            text = self.log[-LOG_LIMIT // 4 :].decode(errors="replace")
            for relay, number in self.stop_replies:
                self.send(relay, number, "reply", text)
            os.sync()
            limit = time.monotonic() + STOP_GRACE

            def leave() -> None:
                if any(relay.unsent for relay in self.relays) and time.monotonic() < limit:
                    return self.later(0.02, leave)
                # The last lines are in a pipe; let BoxLite's agent take them.
                self.later(0.1, lambda: os._exit(code))

            leave()

        check()

    def take_log(self) -> None:
        while True:
            try:
                data = os.read(self.log_in, 65536)
            except BlockingIOError:
                return
            self.log += data
            if len(self.log) > LOG_LIMIT:
                del self.log[: -LOG_LIMIT // 2]


def resize(fd: int, size: "list[int]") -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size[0], size[1], 0, 0))


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def others(keep: "set[int]") -> "list[int]":
    """All processes of the box but this one and those to keep, which have not ended."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in {os.getpid(), *keep}:
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                        found.append(int(name))
            except OSError:
                continue
    return found


def signal_all(signum: int, keep: "set[int]") -> None:
    for pid in others(keep):
        try:
            os.kill(pid, signum)
        except OSError:
            continue


def main() -> None:
    if os.getpid() != 1:
        sys.exit("This ends all processes that it sees, so it runs as process 1 of a box only.")
    # Nothing else in the box may read its memory or take its descriptors.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    Supervisor().run()


if __name__ == "__main__":
    main()
