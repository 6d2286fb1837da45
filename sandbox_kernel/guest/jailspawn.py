"""Starts processes for process 1 of the local jail, which is alone in having the right to.

A *command* is hostile from its first instruction on. It gets a layer of Landlock of its own: its
processes cannot get at the memory of any that they have not started, also not in the moment in
which those begin. A *guest* program is ours, and is forked without another interpreter.
"""

from __future__ import annotations

import errno
import json
import os
import signal

from . import landlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Actions = list[tuple[Any, ...]]
    """What to make the standard streams of, as for ``os.posix_spawn``."""

_DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)


def spawn(argv: list[str], environ: dict[str, str], actions: Actions, layer: int) -> int:
    """Start a command in a session of its own, looking it up in the PATH of its environment.

    ``layer`` is the Landlock layer to put on it, -1 for none. OSError, with words for the host,
    if it cannot be run.
    """
    failed, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _begin(actions)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if layer >= 0:
                landlock.enter(layer)
            _execute(argv, environ)
        except OSError as error:
            os.write(theirs, json.dumps([error.errno, error.strerror]).encode())
        except BaseException as error:  # noqa: BLE001  (the child must not go on as process 1 does)
            os.write(theirs, json.dumps([errno.EINVAL, repr(error)[:1000]]).encode())
        finally:
            os._exit(127)
    os.close(theirs)
    with open(failed, "rb") as file:
        reason = file.read()  # ends when the command's program begins
    if reason:
        os.waitpid(pid, 0)
        raise OSError(*json.loads(reason))
    return pid


def _execute(argv: list[str], environ: dict[str, str]) -> None:
    program = argv[0]
    candidates = [program]
    if "/" not in program:
        folders = environ.get("PATH", os.defpath).split(":")
        candidates = [os.path.join(folder or ".", program) for folder in folders]
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for candidate in candidates:
        try:
            os.execve(candidate, argv, environ)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                raise
            if failure.errno == errno.ENOENT:
                failure = error
    where = "" if "/" in program else f" on the PATH {environ.get('PATH', os.defpath)}"
    raise OSError(failure.errno, f"{os.strerror(failure.errno or 0)}{where}")


def fork(arguments: list[str], environ: dict[str, str], actions: Actions) -> int:
    """Run the guest program in a session of its own, without starting another interpreter."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _begin(actions)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environ)
        from .__main__ import main as guest

        code = guest(arguments)
    except BaseException as error:  # noqa: BLE001  (the child must not go on as process 1 does)
        os.write(2, f"the guest program failed: {error!r}\n".encode())
    finally:
        os._exit(code)


def _begin(actions: Actions) -> None:
    """In the child: a session, signals and streams that are not process 1's."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in _DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
    for action, *rest in actions:
        if action == os.POSIX_SPAWN_DUP2:
            os.dup2(*rest)
        else:
            os.dup2(os.open(*rest[1:]), rest[0])
