"""Spares: keeps one kernel that has started and waits to be the next one.

A spare is a fork of the warm interpreter that goes on through the kernel's own start and stops
before anything that depends on which kernel it will be (``warm/spare.py``). It is made while the
kernel is idle, and given up when the sandbox's memory gets short. Only ipykernel's
plain command line has spares, and a spare serves only a kernel whose folder is the same and whose
environment differs in nothing that IPython reads in its start. All others are started as if there
were no spares.

While a spare waits, the warm interpreter has nothing to do, and most of its memory is its own. So
it ends when a spare has waited for a while beside a kernel. It is started again when that spare
was used, for the next one.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ..wire.event_loop import Cancellable, LoopLike
from .endpoints import Endpoints, ipc_endpoints
from .warm import MAX_REQUEST, READY, TAKEN
from .warm_process import LAUNCHER
from .warm_start import WarmStart, early_variables

QUIET = 1.0
"""Seconds without a message before a spare is made, and between two looks at that."""
START_LIMIT, ANSWER_LIMIT = 30.0, 5.0
"""Seconds for a spare to start, and to answer when it is taken."""
LEAST_MEMORY = 900 * 2**20
"""Bytes. A smaller sandbox has no spares."""
_ENOUGH, _SHORT = 0.25, 0.15
"""Shares of the memory: with more than the first available a spare is made, and with less than the
second it is given up."""
_MEMORY_INTERVAL = 5.0
REST = 60.0
"""Seconds that a spare waits beside a kernel before the warm interpreter ends. A kernel that is
restarted is often restarted again soon, before there is another spare."""

SESSION_NAME = "JPY_SESSION_NAME"
"""The one variable that IPython reads in its start and a spare gets afterwards."""
_START_VARIABLES = (
    *("HOME", "USER", "LOGNAME", "SHELL", "TMP", "TEMP", "XDG_", "VIRTUAL_ENV", "CONDA"),
    *("JUPYTER", "JPY_", "IPYKERNEL", "TERM", "COLOR", "NO_COLOR", "ZMQ", "MPL", "QT_"),
    "SOURCE_DATE_EPOCH",
)


class KernelPlan(NamedTuple):
    """What a kernel is started with."""

    command: List[str]
    environment: Dict[str, str]
    cwd: str


class Spare(NamedTuple):
    """A kernel that waits, or has been taken. ``output`` is its stdout and stderr, which belong to
    whoever took it."""

    plan: KernelPlan
    folder: str
    endpoints: Endpoints
    sock: socket.socket
    output: int


Taken = Callable[[Optional[int]], object]


class Spares:
    """At most one spare. ``calm`` says whether now is a good time to make one, ``running`` whether
    there is a kernel beside it."""

    def __init__(
        self,
        loop: LoopLike,
        folder: str,
        warm: WarmStart,
        layer: int,
        running: Callable[[], bool],
    ) -> None:
        self.calm: Callable[[], bool] = lambda: True
        self._running = running
        self._loop = loop
        self._folder = folder
        self._warm = warm
        self._layer = layer
        self._plan: Optional[KernelPlan] = None
        self._spare: Optional[Spare] = None
        self._taken: Optional[Taken] = None
        self._timer: Optional[Cancellable] = None
        self._count = 0
        self.pid: Optional[int] = None
        self.making = False
        """A spare was forked, and may even have ended, but its pid is not known yet."""
        self._started = False
        self._started_at = 0.0

    @property
    def ready(self) -> "Optional[int]":
        """The pid of a spare that has started."""
        return self.pid if self._started else None

    def keep(self, plan: KernelPlan) -> None:
        """Have a spare for such a kernel, when it is calm. Before that, and for a kernel that can
        have none, there is a warm interpreter, if there can be one."""
        self.close()
        if _is_plain(plan.command):
            self._plan = plan
            self._later(QUIET, self._make_if_calm)
        else:
            self._warm.prepare(plan.command)

    def renew(self) -> None:
        """Replace the spare, for example because this sandbox is a copy of another one."""
        plan = self._plan
        if plan is not None:
            self.keep(plan)

    def fitting(
        self, plan: KernelPlan, connection: Dict[str, Any], transport: str
    ) -> Optional[Spare]:
        """The spare, if it can become this kernel."""
        spare = self._spare
        fits = (
            spare is not None
            and self.pid is not None
            and spare.plan.command == plan.command
            and spare.plan.cwd == plan.cwd
            and transport == "ipc"
            and "curve_secretkey" not in connection
            and _start_variables(spare.plan.environment) == _start_variables(plan.environment)
        )
        return spare if fits else None

    def take(self, plan: KernelPlan, connection: Dict[str, Any], taken: Taken) -> None:
        """Make the fitting spare this kernel. ``taken`` gets its pid, or None if it is not fit any
        more. Either way there is no spare afterwards."""
        assert self._spare is not None
        self._taken = taken
        self._later(ANSWER_LIMIT, self.close)
        identity = {"env": plan.environment, "cwd": plan.cwd, "connection": connection}
        try:
            self._spare.sock.send(json.dumps(identity).encode())
        except OSError:  # it has ended, or that is too much for it
            self.close()

    def close(self) -> None:
        """End the spare. A kernel that waits for it is started otherwise."""
        self._plan = None
        self._stop_timer()
        spare, pid, self._spare, self.pid = self._spare, self.pid, None, None
        self._started = False
        if spare is not None:
            self._loop.remove_reader(spare.sock.fileno())
            spare.sock.close()  # by which it ends, if its pid is not known yet
            os.close(spare.output)
            if pid is not None:
                kill_group(pid)
                with contextlib.suppress(ChildProcessError):  # not ours yet
                    os.waitpid(pid, os.WNOHANG)
            shutil.rmtree(spare.folder, ignore_errors=True)
        taken, self._taken = self._taken, None
        if taken is not None:
            taken(None)

    def _make_if_calm(self) -> None:
        assert self._plan is not None
        total, available = _memory()
        small = total < LEAST_MEMORY
        if not small and available < _ENOUGH * total:
            self._later(_MEMORY_INTERVAL, self._make_if_calm)
        elif not self._warm.prepare(self._plan.command) or small:
            return
        elif not self.calm():
            self._later(QUIET, self._make_if_calm)
        else:
            self._make(self._plan)

    def _make(self, plan: KernelPlan) -> None:
        self._count += 1
        folder = os.path.join(self._folder, "s%d" % self._count)
        opened: List[int] = []
        try:
            os.makedirs(folder, 0o700)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.append(theirs.detach())
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_REQUEST)
            ours.setblocking(False)
            null = os.open(os.devnull, os.O_RDONLY)
            opened.append(null)
            read, write = os.pipe()
            opened.append(write)
        except OSError:  # the sandbox's limits leave no room for a spare
            for fd in opened:
                os.close(fd)
            return shutil.rmtree(folder, ignore_errors=True)
        spare = self._spare = Spare(plan, folder, ipc_endpoints(folder), ours, read)
        self._loop.add_reader(ours.fileno(), self._answered)
        self._later(START_LIMIT, self.close)
        self.making = True

        def started(pid: Optional[int]) -> None:
            self.making = False
            for fd in opened:
                os.close(fd)
            if self._spare is spare and pid is not None:
                self.pid = pid
            elif pid is not None:
                kill_group(pid)
            elif self._spare is spare:
                self.close()

        layer = () if self._layer < 0 else (self._layer,)
        fds = (null, write, write, *layer, opened[0])
        options = {"layer": bool(layer), "spare": spare.endpoints.fields}
        self._warm.launch(plan.command, plan.environment, plan.cwd, fds, started, **options)

    def _answered(self) -> None:
        spare = self._spare
        assert spare is not None
        try:
            answer = spare.sock.recv(64)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if answer == READY and self._taken is None:
            self._started = True
            self._started_at = self._loop.time()
            self._later(_MEMORY_INTERVAL, self._check_memory)
        elif answer == TAKEN and self._taken is not None and self.pid is not None:
            self._hand_over(spare, self.pid, self._taken)
        elif answer != READY:  # it has ended
            self.close()

    def _hand_over(self, spare: Spare, pid: int, taken: Taken) -> None:
        self._stop_timer()
        self._loop.remove_reader(spare.sock.fileno())
        spare.sock.close()
        self._plan = self._spare = self._taken = self.pid = None
        self._started = False
        taken(pid)

    def _check_memory(self) -> None:
        total, available = _memory()
        if available >= _SHORT * total:
            if self._running() and self._loop.time() - self._started_at > REST:
                self._warm.close()
            return self._later(_MEMORY_INTERVAL, self._check_memory)
        plan = self._plan
        self.close()
        self._plan = plan
        self._later(_MEMORY_INTERVAL, self._make_if_calm)

    def _later(self, seconds: float, callback: Callable[[], object]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def kill_group(pid: int) -> None:
    """Kill a process that leads its group, with the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _is_plain(command: List[str]) -> bool:
    """Is this ``python ... -m ipykernel_launcher -f FILE``?"""
    return len(command) > 4 and command[-4:-1] == ["-m", LAUNCHER, "-f"]


def _start_variables(environment: Dict[str, str]) -> Dict[str, str]:
    """The variables that IPython reads in its start."""
    found = {k: v for k, v in environment.items() if k.startswith(_START_VARIABLES)}
    found.pop(SESSION_NAME, None)
    return {**found, **early_variables(environment)}


def _memory() -> Tuple[int, int]:
    """Bytes of memory that the sandbox has, and that are available; zeros if nothing says that."""
    fields = {}
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                fields[name] = value
        return 1024 * int(fields["MemTotal"].split()[0]), 1024 * int(
            fields["MemAvailable"].split()[0]
        )
    except (OSError, ValueError, LookupError):
        return 0, 0
