"""Runs one command for a host whose provider knows less about commands than we need.

Providers run a string with a shell and give back text or an exit code that hides signals. This
program is what they run (as ``python3 -I -S -c SOURCE MODE ...``), and it runs the command: with
the arguments, environment and folder that the host sent, in a session of its own, with an exact
end.

    run MARK             the request comes first on stdin: its length as ten digits and a newline,
                         then JSON {"argv", "env", "cwd", "tty": [rows, columns] or null,
                         "log": path or null}. The rest of stdin is the command's.
    signal PID START N   signal the session that a command leads, or all processes of ours (PID 0)
    resize PID START ROWS COLUMNS

What the host must know is written to stderr, where it finds it by MARK: ``started PID START``,
``failed REASON`` and ``exit CODE`` (-N for signal N). With "log" the command outlives this program
and everybody: it writes to that file, and nobody waits for it.

One file, standard library only: it travels on the command line.
"""

import errno
import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, NoReturn, Optional

MARKED = "SANDBOX_KERNEL_COMMAND"
"""Set for every command, so that all that a sandbox runs for us can be found."""
GUEST = b"/tmp/.sandbox-kernel/guest.pyz"
"""The guest program, which the agent's command line names."""
MAX_REQUEST = 16 * 2**20
LOG_LIMIT = 4 * 2**20
PR_SET_PDEATHSIG = 1


def main(arguments: "List[str]") -> int:
    mode, rest = arguments[0], arguments[1:]
    if mode == "run":
        return run(rest[0])
    pid, start, values = int(rest[0]), rest[1], [int(word) for word in rest[2:]]
    if mode == "signal":
        return send_signal(pid, start, values[0])
    return resize(pid, start, values[0], values[1])


def run(mark: str) -> int:
    def say(text: str) -> None:
        os.write(2, ("\0%s %s\n" % (mark, text.replace("\n", " ")[:2000])).encode())

    request = json.loads(read_exactly(int(read_exactly(11))))
    argv = request["argv"]
    env = dict(os.environ, **request["env"])
    env[MARKED] = mark
    log = request["log"]
    if log:
        trim(log)
    master, slave = os.openpty() if request["tty"] else (-1, -1)
    if slave >= 0:
        set_size(slave, *request["tty"])
    trouble, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(trouble)
        start(argv, env, request["cwd"], slave, log, theirs)
    os.close(theirs)
    if slave >= 0:
        os.close(slave)
    failure = b""
    while True:
        piece = os.read(trouble, 4096)
        if not piece:
            break
        failure += piece
    if failure:
        os.waitpid(pid, 0)
        say("failed " + failure.decode(errors="replace"))
        return 127
    say("started %d %s" % (pid, started_at(pid)))
    if log:
        say("exit 0")
        return 0
    if master >= 0:
        carry(master)
    # The streams end when the command's own copies do.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    _, status = os.waitpid(pid, 0)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    say("exit %d" % code)
    return 0


def start(
    argv: "List[str]",
    env: "Dict[str, str]",
    cwd: str,
    terminal: int,
    log: "Optional[str]",
    trouble: int,
) -> "NoReturn":
    """In the child: become the command, or say why not."""
    try:
        os.setsid()
        if log:
            # Not even the end of this program's own session may reach it.
            null = os.open(os.devnull, os.O_RDWR)
            out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            ends = (null, out, out)
        elif terminal >= 0:
            import fcntl
            import termios

            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
            ends = (terminal, terminal, terminal)
        else:
            die_with_parent()
            ends = (0, 1, 2)
        for number, end in enumerate(ends):
            if number != end:
                os.dup2(end, number)
        os.chdir(cwd)
        execute(argv, env)
    except OSError as error:
        os.write(trouble, ("%s: %s" % (error.filename or argv[0], error.strerror)).encode())
    except ValueError as error:
        os.write(trouble, ("%s: %s" % (argv[0], error)).encode())
    os._exit(127)


def execute(argv: "List[str]", env: "Dict[str, str]") -> None:
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    found = OSError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    for folder in env.get("PATH", os.defpath).split(":"):
        try:
            os.execve(os.path.join(folder, argv[0]), argv, env)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            pass
        except OSError as error:
            found = error
    raise found


def die_with_parent() -> None:
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (ImportError, AttributeError, OSError):
        pass  # a system without it; the host ends the command by its number


def carry(master: int) -> None:
    """Between stdin, stdout and a terminal, until nobody has the terminal open any more."""
    import select

    waiting = [0, master]
    while True:
        for fd in select.select(waiting, [], [])[0]:
            try:
                data = os.read(fd, 65536)
            except OSError:
                data = b""
            if fd == master and not data:
                return
            if not data:
                waiting.remove(0)
                data = b"\x04"
            write_all(1 if fd == master else master, data)


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


def trim(path: str) -> None:
    """A log that has grown beyond its bound is begun anew with its last half."""
    try:
        if os.lstat(path).st_size > LOG_LIMIT:
            with open(path, "r+b") as file:
                file.seek(-LOG_LIMIT // 2, os.SEEK_END)
                kept = file.read()
                file.seek(0)
                file.write(kept)
                file.truncate()
    except FileNotFoundError:
        pass


def started_at(pid: int) -> str:
    """What tells a process from a later one with the same number; empty if it is gone."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def send_signal(pid: int, start: str, number: int) -> int:
    if pid:
        try:
            if started_at(pid) in ("", start):
                # Also when it has ended: the rest of its session is told.
                os.killpg(pid, number)
        except ProcessLookupError:
            pass
        return 0
    for found in ours():
        try:
            os.kill(found, number)
        except ProcessLookupError:
            pass
    return 1 if ours() else 0


def ours() -> "List[int]":
    """All processes that were started for the host, or by what was, but for this one."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in numbers if pid != os.getpid() and is_ours(pid)]


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


def resize(pid: int, start: str, rows: int, columns: int) -> int:
    if started_at(pid) == start:
        fd = os.open("/proc/%d/fd/0" % pid, os.O_RDWR | os.O_NOCTTY)
        set_size(fd, rows, columns)
    return 0


def set_size(fd: int, rows: int, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
