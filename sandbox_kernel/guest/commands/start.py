"""Starts a command: a session of its own, default signals, its streams, its folder.

All fronts use it. The import list is short, because some fronts are started for every command.
"""

from __future__ import annotations

import errno
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LOG_LIMIT = 4 * 2**20
"""A log beyond this size is cut to its last half."""
_DEFAULTS = (
    *(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD),
    *(signal.SIGINT, signal.SIGHUP, signal.SIGTERM),
)
"""Signals that a front ignores or handles; a command starts with the defaults."""
END_OF_INPUT = b"\x04"
"""What a terminal's user types to end the input."""


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    streams: Sequence[int],
    *,
    terminal: bool = False,
    prepare: Callable[[], object] | None = None,
) -> int:
    """Start a command and return its pid, which is also its process group and session.

    ``streams`` become its stdin, stdout and stderr; with ``terminal`` they are a terminal, which
    becomes the controlling one. ``prepare`` runs in the child just before the program. The program
    is looked up in the PATH of ``env``. OSError, with a message for the user, if it cannot be run.
    """

    def become() -> None:
        if terminal:
            import fcntl
            import termios

            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if prepare is not None:
            prepare()
        _execute(argv, env)

    return _fork(cwd, streams, become)


def fork(main: Callable[[], int], env: Mapping[str, str], cwd: str, streams: Sequence[int]) -> int:
    """Run a function of this program as a command, without starting another interpreter."""

    def become() -> None:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os.environ.clear()
            os.environ.update(env)
            code = main()
        except BaseException as error:  # noqa: BLE001  (the child must not go on as its parent)
            os.write(2, f"the guest program failed: {error!r}\n".encode())
        finally:
            os._exit(code)

    return _fork(cwd, streams, become)


def _fork(cwd: str, streams: Sequence[int], become: Callable[[], None]) -> int:
    """Fork. In the child, ``become`` does not return unless it fails."""
    failed, theirs = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(failed)
        os.close(theirs)
        raise
    if not pid:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for signum in _DEFAULTS:
                signal.signal(signum, signal.SIG_DFL)
            for number, fd in enumerate(streams):
                if fd != number:
                    os.dup2(fd, number)
            try:
                os.chdir(cwd)
            except OSError as error:
                raise OSError(error.errno, f"the folder {cwd!r}: {error.strerror}") from None
            become()
        except OSError as error:
            os.write(theirs, f"{error.errno} {error.strerror}".encode())
        except BaseException as error:  # noqa: BLE001  (the child must not go on as its parent)
            os.write(theirs, f"{errno.EINVAL} {error}"[:1000].encode())
        finally:
            os._exit(127)
    os.close(theirs)
    with open(failed, "rb") as file:
        reason = file.read()  # ends when the child has become the command
    if reason:
        os.waitpid(pid, 0)
        code, _, text = reason.decode(errors="replace").partition(" ")
        raise OSError(int(code), text)
    return pid


def _execute(argv: Sequence[str], env: Mapping[str, str]) -> None:
    program = argv[0]
    path = env.get("PATH", os.defpath)
    candidates = [program]
    if "/" not in program:
        candidates = [os.path.join(folder or ".", program) for folder in path.split(":")]
    failure = errno.ENOENT
    for candidate in candidates:
        try:
            os.execve(candidate, list(argv), env)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                raise
            if failure == errno.ENOENT:
                failure = error.errno
    where = "" if "/" in program else f" on the PATH {path}"
    raise OSError(failure, f"{os.strerror(failure)}{where}")


def close_inherited(kept: Sequence[int] = ()) -> None:
    """Close the descriptors that this program was started with, except stdio and ``kept``, so that
    commands do not inherit them. Those that Python opens are closed on exec anyway."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor of the listing itself


def open_terminal(rows: int, columns: int) -> tuple[int, int]:
    """A new terminal of this size: the end for the host, and the end for the command."""
    master, slave = os.openpty()
    resize_terminal(slave, rows, columns)
    return master, slave


def resize_terminal(fd: int, rows: int, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def signal_group(group: int, number: int) -> bool:
    """Signal a command's process group. False if nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # only zombies are left
    return True


def signal_process(pid: int, number: int) -> None:
    """Signal one process. No error if it has ended, or is not ours to signal."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def running_pids() -> list[int]:
    """All processes that this one sees, without itself and without zombies."""
    own = os.getpid()
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in numbers if pid != own and (process_stat(pid) or "Z")[0] not in "ZX"]


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def process_control(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def open_log(path: str) -> int:
    """Open a log file for appending, cut to its last half if it is too long."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    cut_log(fd, LOG_LIMIT)
    return fd


def cut_log(fd: int, limit: int) -> None:
    """Cut a log to its last half if it is longer than ``limit``."""
    size = os.fstat(fd).st_size
    if size > limit:
        kept = os.pread(fd, limit // 2, size - limit // 2)
        os.ftruncate(fd, 0)
        os.write(fd, b"[the log was cut here]\n" + kept)
