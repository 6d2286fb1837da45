"""The kernel process: start, signal, watch, and the tail of what it prints.

Each launch is a *generation* with its own folder of sockets, so that an old kernel's sockets are
never taken for those of the new one. The connection file has one path for all of them: it is in the
command line, which a warm kernel (``warm_start``) has before it is launched.
"""

import json
import os
import shutil
import signal
import socket
import time
from functools import partial
from typing import Any, Callable, Dict, List, Optional

from ..wire.event_loop import LoopLike
from . import landlock
from .commands.start import start
from .endpoints import Endpoints, ipc_endpoints, tcp_endpoints
from .spares import KernelPlan, Spares
from .warm_process import CONNECTION_FILE, kernel_command, kernel_environment, start_environment
from .warm_start import WarmStart

LOG_LIMIT = 256 * 1024
"""Bytes of the kernel's own output that ``logs`` shows."""

_TCP_CONNECT_TIMEOUT = 0.2


class LaunchError(Exception):
    """The kernel could not be started. ``kind`` is ``missing`` if its program is not there."""

    def __init__(self, message: str, kind: str = "launch") -> None:
        super().__init__(message)
        self.kind = kind


class Log:
    """The last LOG_LIMIT bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * LOG_LIMIT:
            del self._data[:-LOG_LIMIT]

    def tail(self, size: int = LOG_LIMIT) -> str:
        return bytes(self._data[-size:]).decode(errors="replace") if size else ""


class Kernel:
    """The one kernel of this sandbox. ``on_exit`` is called once for each launch that ends."""

    def __init__(self, loop: LoopLike, folder: str, on_exit: Callable[[], object]) -> None:
        self.generation = 0
        self.pid: Optional[int] = None
        self.exit_code: Optional[int] = None
        """Exit code of the last launch; -N for signal N; None while it runs."""
        self.ended_at: Optional[float] = None
        self.log = Log()
        self._loop = loop
        self._folder = folder
        self._on_exit = on_exit
        self.warm = WarmStart(loop)
        self._layer = landlock.layer()
        self.spares = Spares(loop, folder, self.warm, self._layer, lambda: self.running)
        self._launched = False
        self.launching = False
        """A kernel was started, and may even have ended, but its pid is not known yet."""
        self._sockets = os.path.join(folder, "k0")
        self._endpoints = Endpoints({}, {})

    @property
    def running(self) -> bool:
        return self._launched and self.exit_code is None

    def launch(
        self,
        argv: List[str],
        env: Dict[str, str],
        cwd: str,
        connection: Dict[str, Any],
        transport: str,
        done: Callable[[Optional[LaunchError]], None],
    ) -> None:
        """Start a kernel: the spare, or a fork of the warm one, or a new process, whichever fits
        first. ``done`` gets None or the failure."""
        if self.running or self.launching:
            return done(LaunchError("a kernel is already running, with pid %s" % self.pid))
        self.generation += 1
        plan = self.plan(argv, env, cwd)
        spare = self.spares.fitting(plan, connection, transport)
        if spare is None:
            self.spares.close()
            return self._launch_new(plan, connection, transport, done)
        try:
            self._listen_in(spare.folder, spare.endpoints, connection)
        except OSError as error:
            self.spares.close()
            return done(LaunchError(str(error)))
        self.launching = True
        output = spare.output

        def taken(pid: Optional[int]) -> None:
            self.launching = False
            if pid is None:
                return self._launch_new(plan, connection, transport, done)
            self._launched_as(pid, output)
            done(None)
            self.reap()

        self.spares.take(plan, connection, taken)

    def plan(self, argv: List[str], env: Dict[str, str], cwd: str) -> KernelPlan:
        """What a kernel with these arguments of ``launch`` is started with."""
        return KernelPlan(kernel_command(argv, self._folder), kernel_environment(env), cwd or "/")

    def _launch_new(
        self,
        plan: KernelPlan,
        connection: Dict[str, Any],
        transport: str,
        done: Callable[[Optional[LaunchError]], None],
    ) -> None:
        command, environment, cwd = plan
        folder = os.path.join(self._folder, "k%d" % self.generation)
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
            endpoints = ipc_endpoints(folder) if transport == "ipc" else tcp_endpoints()
            self._listen_in(folder, endpoints, connection)
            null = os.open(os.devnull, os.O_RDONLY)
        except OSError as error:
            return done(LaunchError(str(error)))
        try:
            read, write = os.pipe()
        except OSError as error:
            os.close(null)
            return done(LaunchError(str(error)))
        self.launching = True

        def started(pid: Optional[int]) -> None:
            """The warm kernel's answer; without a pid, the kernel is started plainly."""
            self.launching = False
            try:
                if pid is None:
                    prepare = partial(landlock.enter, self._layer) if self._layer >= 0 else None
                    start_env = start_environment(command, environment)
                    streams = (null, write, write)
                    pid = start(command, start_env, cwd, streams, prepare=prepare)
            except (OSError, ValueError, IndexError) as error:
                os.close(read)
                kind = "missing" if isinstance(error, FileNotFoundError) else "launch"
                return done(LaunchError("%s: %s" % (" ".join(command[:1]), error), kind))
            finally:
                os.close(write)
                os.close(null)
            self._launched_as(pid, read)
            done(None)
            self.reap()  # it may have ended before its pid was known

        layer = () if self._layer < 0 else (self._layer,)
        fds = (null, write, write, *layer)
        self.warm.launch(command, environment, cwd, fds, started, layer=bool(layer))

    def _listen_in(self, folder: str, endpoints: Endpoints, connection: Dict[str, Any]) -> None:
        """Set where the next kernel listens. The last one's sockets are deleted."""
        shutil.rmtree(self._sockets, ignore_errors=True)
        self._sockets, self._endpoints = folder, endpoints
        path = os.path.join(self._folder, CONNECTION_FILE)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({**connection, **endpoints.fields}, file)

    def _launched_as(self, pid: int, output: int) -> None:
        self._launched = True
        self.pid = pid
        self.exit_code = self.ended_at = None
        os.set_blocking(output, False)
        self._loop.add_reader(output, self._output, output)

    def connect(self, channel: str) -> Optional[socket.socket]:
        """A connection to one of the kernel's sockets, or None if it does not listen (yet).

        It never waits, because a stopped kernel accepts nobody. OSError if no descriptor is left.
        """
        address = self._endpoints.addresses.get(channel)
        if address is None or not self.running:
            return None
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(0.0 if family == socket.AF_UNIX else _TCP_CONNECT_TIMEOUT)
            sock.connect(address)
            if family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            return None
        return sock

    def signal(self, signum: int) -> bool:
        """Signal the kernel's process group, as a local kernel manager does. False: not running."""
        if not self.running or self.pid is None:
            return False
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """Kill the kernel and the processes in its group."""
        self.signal(signal.SIGKILL)

    def reap(self) -> None:
        """Call it after SIGCHLD."""
        if not self.running or self.pid is None:
            return
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return  # not ours yet: the warm interpreter is about to leave it to us
        if pid:
            # Its children in the process group might hold its sockets open.
            self.kill()
            self.exit_code = os.waitstatus_to_exitcode(status)
            self.ended_at = time.time()
            self._on_exit()

    def _output(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.log.add(data)
        else:
            self._loop.remove_reader(fd)
            os.close(fd)

    def status(self) -> Dict[str, Any]:
        return {
            "generation": self.generation,
            "running": self.running,
            "pid": self.pid,
            "exit_code": self.exit_code,
            "ended_at": self.ended_at,
            "spare": self.spares.ready,
        }

    def usage(self) -> Dict[str, Any]:
        """Memory and CPU time of the kernel process; empty if it cannot be read."""
        try:
            with open("/proc/%s/statm" % self.pid) as file:
                pages = int(file.read().split()[1])
            with open("/proc/%s/stat" % self.pid) as file:
                fields = file.read().rpartition(")")[2].split()
        except (OSError, ValueError, IndexError):
            return {}
        ticks = os.sysconf("SC_CLK_TCK")
        return {
            "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "cpu_seconds": (int(fields[11]) + int(fields[12])) / ticks,
            "threads": int(fields[17]),
        }
