"""Runs one command for a host whose provider runs strings with a shell.

Such providers give back text, or an exit code that hides signals. They run this program instead
(``guest_program.program`` makes its text), and it runs the command: with the arguments, environment
and folder that the host sent, in a session of its own, with an exact end.

    run MARK             the request comes first on stdin: its length as ten digits and a newline,
                         then JSON {"argv", "env", "cwd", "tty": [rows, columns] or null,
                         "log": path or null}. The rest of stdin is the command's.
    signal PID START N   signal the session that a command leads, or all processes of ours (PID 0)
    resize PID START ROWS COLUMNS

It writes messages for the host to stderr, marked with MARK: ``started PID START``,
``failed REASON`` and ``exit CODE`` (-N for signal N). With "log" the command outlives this program:
it writes to that file, and nobody waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from . import start

MARKED = "SANDBOX_KERNEL_COMMAND"
"""Set for every command, to find all processes that a sandbox runs for us."""
GUEST = b"/tmp/.sandbox-kernel/guest.pyz"
"""The guest program, which the agent's command line names."""
MAX_REQUEST = 16 * 2**20
PR_SET_PDEATHSIG = 1


def main() -> int:
    mode, *rest = sys.argv[1:]
    if mode == "run":
        return run(rest[0])
    pid, started, values = int(rest[0]), rest[1], [int(word) for word in rest[2:]]
    if mode == "signal":
        return send_signal(pid, started, values[0])
    return resize(pid, started, values[0], values[1])


def run(mark: str) -> int:
    def say(text: str) -> None:
        os.write(2, ("\0%s %s\n" % (mark, text.replace("\n", " ")[:2000])).encode())

    request = json.loads(read_exactly(int(read_exactly(11))))
    env = {**os.environ, **request["env"], MARKED: mark}
    log = request["log"]
    master = -1
    try:
        if log:
            # Not even the end of this program's own session may reach it.
            streams = [os.open(os.devnull, os.O_RDONLY), *[start.open_log(log)] * 2]
        elif request["tty"]:
            master, slave = start.open_terminal(*request["tty"])
            streams = [slave] * 3
        else:
            streams = [0, 1, 2]
        pid = start.start(
            *(request["argv"], env, request["cwd"], streams),
            terminal=master >= 0,
            prepare=None if log or master >= 0 else die_with_parent,
        )
    except OSError as error:
        say("failed %s: %s" % (request["argv"][0], error.strerror))
        return 127
    say("started %d %s" % (pid, started_at(pid)))
    if log:
        say("exit 0")
        return 0
    if master >= 0:
        os.close(streams[0])
        carry(master)
    # The streams end when the command's own copies do.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    _, status = os.waitpid(pid, 0)
    say("exit %d" % os.waitstatus_to_exitcode(status))
    return 0


def die_with_parent() -> None:
    try:
        start.process_control(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (ImportError, AttributeError, OSError):
        pass  # a system without it; the host ends the command by its number


def carry(master: int) -> None:
    """Carry bytes between stdin, stdout and a terminal, until nobody has the terminal open."""
    import selectors

    from ..loop import Loop
    from .stdio import CommandInput, CommandOutput

    loop = Loop(selectors.PollSelector())
    keyboard = CommandInput(loop, os.dup(master), lambda size: typed.resume(), terminal=True)

    def type_in(data: bytes) -> None:
        keyboard.write(data)
        if keyboard.pending:
            typed.pause()

    typed = CommandOutput(loop, os.dup(0), type_in, keyboard.end)
    os.set_blocking(1, True)
    CommandOutput(loop, master, lambda data: write_all(1, data), loop.stop)
    loop.run()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_exactly(size: int) -> bytes:
    """Nothing beyond it: the rest is for the command."""
    if size > MAX_REQUEST:
        raise ValueError("a request of %d bytes" % size)
    found = b""
    while len(found) < size:
        piece = os.read(0, size - len(found))
        if not piece:
            raise EOFError("the request ended early")
        found += piece
    return found


def started_at(pid: int) -> str:
    """Tells a process from a later one with the same pid; empty if it is gone."""
    return "".join(start.process_stat(pid)[19:20])


def send_signal(pid: int, started: str, number: int) -> int:
    if pid:
        if started_at(pid) in ("", started):
            # Also when it has ended: there may be others in its session.
            start.signal_group(pid, number)
        return 0
    for found in ours():
        start.signal_process(found, number)
    return 1 if ours() else 0


def ours() -> list[int]:
    """All processes that the host started, and their descendants, but not this one."""
    return [pid for pid in start.running_pids() if is_ours(pid)]


def is_ours(pid: int) -> bool:
    wanted = (MARKED + "=").encode()
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return any(item.startswith(wanted) for item in file.read().split(b"\0"))
    except PermissionError:
        pass  # the agent hides its memory, but not its command line
    except OSError:
        return False
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return GUEST in file.read().split(b"\0")
    except OSError:
        return False


def resize(pid: int, started: str, rows: int, columns: int) -> int:
    if started_at(pid) == started:
        terminal = os.open("/proc/%d/fd/0" % pid, os.O_RDWR | os.O_NOCTTY)
        start.resize_terminal(terminal, rows, columns)
    return 0
