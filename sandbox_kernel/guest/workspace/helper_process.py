"""The helper's process, beside the agent, so that the kernel's channels do not wait for it.

It starts with the first stream to the target ``workspace``, and lives as long as the agent, which
passes it one end of a socket for each such stream and pumps the other.
"""

import ctypes
import os
import signal
import socket
import traceback
from typing import Optional

from ...wire.descriptors import send_with_descriptors

_PR_SET_PDEATHSIG = 1


class Helper:
    """The agent's side: starts the process on first use, and again if it has ended."""

    def __init__(self) -> None:
        self._control: Optional[socket.socket] = None
        self._pid = 0

    def hand_over(self, sock: socket.socket) -> None:
        """Let the helper serve this connection, and close it here. OSError."""
        try:
            for attempt in (1, 2):
                if self._control is None:
                    self._control, self._pid = _start()
                try:
                    send_with_descriptors(self._control, b".", [sock.fileno()])
                    return
                except OSError:
                    self._control.close()  # it has ended
                    self._control = None
                    if attempt == 2:
                        raise
        finally:
            sock.close()

    def go_on(self) -> None:
        """Continue the helper after SIGCHLD if code in the sandbox has stopped it."""
        try:
            if self._pid and os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOHANG):
                os.kill(self._pid, signal.SIGCONT)
        except (ChildProcessError, ProcessLookupError):
            self._pid = 0  # it has ended

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def _start() -> "tuple[socket.socket, int]":
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        ours.setblocking(False)
        return ours, pid
    code = 1
    try:
        _become_helper(theirs, parent)
        # In the child only: the agent does not need it.
        from .helper import serve

        serve(theirs)
        code = 0
    except BaseException:  # noqa: BLE001  (the agent's code must not go on in this process)
        traceback.print_exc()
    finally:
        os._exit(code)


def _become_helper(control: socket.socket, parent: int) -> None:
    """Drop the signal handlers and descriptors of the agent, of which this is a fork."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    keep = control.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX") if keep < 4096 else keep + 4096)
    try:
        # A session has its own share of the processors where the scheduler groups by session, and
        # this policy yields to processes that wake up; `nice` would starve it on a busy machine.
        os.setsid()
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        print("workspace helper: cannot lower its priority:", error, flush=True)
