"""A warm process: an interpreter that imports ipykernel, and then waits to be forked.

This module imports little and runs first in an agent: the kernel's imports take longest, so they
begin before the agent's own.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping

from .warm import FD_VARIABLE, MAX_REQUEST, PACKAGES_VARIABLE, SAVED_VARIABLE

LAUNCHER = "ipykernel_launcher"
CONNECTION_FILE = "connection.json"

_BLOCKING_FLAGS = ("-I", "-E", "-s", "-S", "-c")


def kernel_command(argv: list[str], folder: str) -> list[str]:
    """The command line to run: ``{connection_file}`` becomes the connection file's path."""
    path = os.path.join(folder, CONNECTION_FILE)
    return [argument.replace("{connection_file}", path) for argument in argv]


def kernel_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a kernel: the agent's, changed by ``env``."""
    environment = {**os.environ, **env}
    environment.pop(PACKAGES_VARIABLE, None)
    return environment


def start_environment(command: list[str], environment: dict[str, str]) -> dict[str, str]:
    """The environment for a plain start. If the image lacks packages, ``warm/sitecustomize.py``
    adds them first and then restores ``environment``."""
    packages = os.environ.get(PACKAGES_VARIABLE)
    options = command[: command.index("-m")] if "-m" in command else command
    python = bool(command) and os.path.basename(command[0]).startswith("python")
    if not packages or not python or any(flag in options for flag in _BLOCKING_FLAGS):
        return environment
    return {**environment, **_first_steps(environment), PACKAGES_VARIABLE: packages}


def _first_steps(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make an interpreter run ``warm/sitecustomize.py`` first."""
    saved = environment.get("PYTHONPATH", "")
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm")
    return {SAVED_VARIABLE: saved, "PYTHONPATH": os.pathsep.join(filter(None, [here, saved]))}


def can_be_warm(command: list[str]) -> bool:
    """Is this the command line of a kernel that can be forked from a warm one?"""
    if LAUNCHER not in command or command.index(LAUNCHER) < 2:
        return False
    at = command.index(LAUNCHER)
    return command[at - 1] == "-m" and not any(flag in command[:at] for flag in _BLOCKING_FLAGS)


class WarmProcess:
    """The process, and the socket on which it takes requests."""

    def __init__(self, command: list[str], pid: int, sock: socket.socket) -> None:
        self.command = command
        self.pid = pid
        self.socket = sock

    @classmethod
    def start(cls, command: list[str]) -> WarmProcess | None:
        """Start it; None if ``command`` is not ipykernel's. A command that fails ends at once, and
        the plain start reports why."""
        if not can_be_warm(command):
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for sock in (ours, theirs):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_REQUEST)
            variables = {FD_VARIABLE: str(theirs.fileno()), **_first_steps(os.environ)}
            pid = os.fork()
            if not pid:
                _become(command, {**os.environ, **variables}, theirs.fileno())
        ours.setblocking(False)
        return cls(command, pid, ours)

    def close(self) -> None:
        self.socket.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _become(command: list[str], environment: dict[str, str], fd: int) -> None:
    """In the child: run the command. posix_spawn would leave a signal ignored that a plain start
    does not."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.set_inheritable(fd, True)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        os.execvpe(command[0], command, environment)
    finally:
        os._exit(127)
