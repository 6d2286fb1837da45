"""The agent: the daemon in the sandbox that owns the kernel and the session.

It outlives every link. It ends when the host says so, or when no host has been attached for
``lease`` seconds.
"""

import ctypes
import os
import signal
import struct
from typing import TYPE_CHECKING, Any, Dict, Optional, Set

from .agent_socket import AgentSocket
from .control_calls import ControlCalls
from .kernel_process import Kernel
from .loop import Loop
from .recorder import Recorder
from .sessions import Sessions
from .spares import KernelPlan
from .targets import Targets
from .warm_process import WarmProcess, kernel_environment
from .workspace.helper_process import Helper

if TYPE_CHECKING:
    from .egress.ways_out import WaysOut

_ALIVE_INTERVAL = 5.0
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("IIQiIQQQ")
_RESET_ON_FORK = 1
_TURN = 100_000  # nanoseconds, the least that there is


class Agent:
    def __init__(self, folder: str, lease: float) -> None:
        self.loop = Loop()
        self.folder = folder
        self.lease = lease
        self.kernel = Kernel(self.loop, folder, lambda: self.targets.kernel_exited())
        self.recorder = Recorder(
            self.loop, lambda: self.kernel.connect("iopub"), lambda: self.kernel.running
        )
        self._helper = Helper()
        self.targets = Targets(self.loop, self.kernel, self.recorder, self._helper)
        self.kernel.spares.calm = self.targets.calm
        self.targets.calls = ControlCalls(self).by_name()
        self.sessions = Sessions(self.loop, self.targets)
        self.sessions.on_copied = self.kernel.spares.renew
        self._ways_out: Optional[WaysOut] = None

    def run(self) -> None:
        """Serve until shut down or abandoned."""
        agent_socket = AgentSocket(self.loop, self.folder, self.sessions)
        self._watch_signals()
        self.loop.call_later(_ALIVE_INTERVAL, self._check_lease)
        try:
            self.loop.run()
        finally:
            signal.set_wakeup_fd(-1)
            self.kernel.kill()
            self.kernel.spares.close()
            self.kernel.warm.close()
            self._helper.close()
            agent_socket.close()

    def open_ways_out(self, proxy: int) -> Dict[str, Any]:
        """The host wants connections out of the sandbox, with a proxy at that port. OSError."""
        if self._ways_out is None:
            from .egress.ways_out import WaysOut  # lazy: most agents have none

            self._ways_out = WaysOut(self.loop, lambda: self.sessions.peer)
            self.sessions.on_ended = self._ways_out.end_session
        return self._ways_out.open(proxy)

    def _watch_signals(self) -> None:
        self.loop.watch_children(self._reap)
        signal.signal(signal.SIGTERM, lambda *_: self.loop.stop())
        # A broken link is an OSError here. Kernels are started with the defaults.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        # Handlers, because a kernel would inherit SIG_IGN.
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def _reap(self) -> None:
        """Some process has ended, or was stopped."""
        self.kernel.reap()
        self._helper.go_on()
        # An unknown one may be the kernel that is being launched, whose exit code is needed.
        if not self.kernel.launching and not self.kernel.spares.making:
            _reap_orphans({self.kernel.pid, self.kernel.warm.pid, self.kernel.spares.pid})

    def _check_lease(self) -> None:
        if self.sessions.check_alive() > self.lease:
            print("agent: no host for %g s: the lease is over" % self.lease, flush=True)
            self.loop.stop()
        self.loop.call_later(min(_ALIVE_INTERVAL, self.lease / 4), self._check_lease)


def _reap_orphans(known: "Set[Optional[int]]") -> None:
    """Kernels' orphans become our children, and must not stay zombies."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return
        os.waitpid(found.si_pid, 0)


def main(folder: str, lease: float, warm: Optional[WarmProcess]) -> None:
    """Run the agent. ``warm`` is ready to become the kernel, or getting ready."""
    libc = ctypes.CDLL(None)
    # Code in the sandbox runs under the same user: it must not read or write this process.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _ask_for_short_turns(libc)
    agent = Agent(folder, lease)
    if warm is not None:
        agent.kernel.warm.adopt(warm)
        agent.kernel.spares.keep(KernelPlan(warm.command, kernel_environment({}), os.getcwd()))
    agent.run()


def _ask_for_short_turns(libc: ctypes.CDLL) -> None:
    """Kernel and client may keep all processors busy. This process works for microseconds, with
    both waiting for it: since Linux 6.12 whoever asks for short turns gets them sooner, and not
    more of them. Before that, or where it is not allowed, nothing changes."""
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        libc.syscall(number, 0, _SCHED_ATTR.pack(48, 0, _RESET_ON_FORK, nice, 0, _TURN, 0, 0), 0)
