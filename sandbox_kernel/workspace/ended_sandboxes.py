"""Saves the files that an ended local sandbox left on this machine.

The files are still hostile. The same helper as in a sandbox reads them, in its own process; if the
sandbox had a file system image, only that process has it mounted.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox_kernel.errors import WorkspaceError
from sandbox_kernel.guest.workspace.messages import Ended
from sandbox_kernel.host_programs import host_environment, own_python
from sandbox_kernel.workspace.conversation import STALLED_AFTER, Talk, quiet_close
from sandbox_kernel.workspace.receive import persist_over
from sandbox_kernel.workspace.reports import OnProgress, Quota, SaveInfo, SaveReport
from sandbox_kernel.workspace.store import Store

_SERVE = """
import socket, sys
from sandbox_kernel.guest.workspace.helper import WorkspaceServer
WorkspaceServer().serve(socket.socket(fileno=int(sys.argv[1])))
"""
_MOUNT = 'mount -t ext4 -o loop,ro,nosuid,nodev,noexec "$1" "$2" && shift 2 && exec "$@"'
_END_TIMEOUT = 30.0


@dataclass(frozen=True)
class Leftovers:
    """The files of an ended sandbox, on this machine."""

    folder: str
    image: str = ""
    """A file system image with the files, to be mounted at ``mount``."""
    mount: str = ""

    def __str__(self) -> str:
        return self.image or self.folder


def save_leftovers(
    store: Store,
    name: str,
    left: Leftovers,
    *,
    backend: str,
    sandbox: str,
    notebook: str = "",
    kernel: str = "",
    progress: OnProgress = lambda progress: None,
    cancelled: threading.Event | None = None,
) -> SaveReport:
    """As ``persist``, for the files of an ended sandbox. Blocks; ``cancelled`` cancels it."""
    latest = store.latest(name)
    if latest is not None and latest.files and not left.image and not os.listdir(left.folder):
        raise WorkspaceError(
            f"The folder {left} of the ended sandbox {sandbox!r} is empty, but the newest save of "
            f"workspace {name!r} has {latest.files} files. The empty folder was not saved."
        )
    save = SaveInfo.planned(name, backend, sandbox, notebook=notebook, kernel=kernel)
    if left.image:
        _wait_until_free(left.image)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = own_python("-c", _SERVE, str(theirs.fileno()))
            if left.image:
                mounted = ["sh", "-c", _MOUNT, "sh", left.image, left.mount]
                command = ["unshare", "--mount", "--", *mounted, *command]
            helper = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=host_environment(),
            )
        ours.settimeout(STALLED_AFTER)
        try:
            talk = Talk(ours, progress, cancelled or threading.Event())
            return persist_over(talk, store, save, left.folder, Quota())
        except Ended as error:
            raise WorkspaceError(
                f"The files of the ended sandbox {sandbox!r} in {left} cannot be read: {error}"
            ) from None
        finally:
            quiet_close(ours)
            try:
                helper.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait(_END_TIMEOUT)


def _wait_until_free(image: str) -> None:
    """Wait for the sandbox's mount to go, a moment after its last process."""
    limit = time.monotonic() + _END_TIMEOUT
    while any(_backing(loop) == image for loop in Path("/sys/block").glob("loop*")):
        if time.monotonic() > limit:
            raise WorkspaceError(f"The file system {image} is still in use. Try again later.")
        time.sleep(0.1)


def _backing(loop: Path) -> str:
    try:
        return (loop / "loop" / "backing_file").read_text().strip()
    except OSError:
        return ""
