"""Files that a local sandbox which has ended has left on this machine become a save.

They are as hostile as ever, and are looked at as in a sandbox: by the same helper, in a process of
its own. If the sandbox had a file system of its own, that process sees its image mounted, and
nobody else does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox_kernel.errors import WorkspaceError
from sandbox_kernel.guest.workspace.messages import Ended
from sandbox_kernel.programs import host_environment, own_python
from sandbox_kernel.workspace.receive import quiet_close
from sandbox_kernel.workspace.reports import Limits, OnProgress, SaveInfo, SaveReport
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.transfer import STALLED_AFTER, persist_over

_SERVE = """
import socket, sys
from sandbox_kernel.guest.workspace.helper import Workspace
Workspace().serve(socket.socket(fileno=int(sys.argv[1])))
"""
_MOUNT = 'mount -t ext4 -o loop,ro,nosuid,nodev,noexec "$1" "$2" && shift 2 && exec "$@"'
_END_TIMEOUT = 30.0


@dataclass(frozen=True)
class Leftovers:
    """Where the files of a sandbox are that has ended."""

    folder: str
    image: str = ""
    """A file system that has them, if it is mounted at ``mount``."""
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
    limits: Limits | None = None,
    progress: OnProgress = lambda progress: None,
    go_on: Callable[[], object] = lambda: None,
) -> SaveReport:
    """As ``persist``. Blocks. ``go_on`` is called before the save appears, and raises if nobody
    wants it any more; ``progress`` is called in this thread."""
    latest = store.latest(name)
    if latest is not None and latest.files and not left.image and not os.listdir(left.folder):
        raise WorkspaceError(
            f"The folder {left}, which sandbox {sandbox!r} has left, is empty, and the newest "
            f"save of workspace {name!r} has {latest.files} files: it was not saved over that."
        )
    facts = SaveInfo(
        id="",
        workspace=name,
        root="",
        created=0.0,
        notebook=notebook,
        kernel=kernel,
        backend=backend,
        sandbox=sandbox,
    )
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
            return persist_over(
                ours,
                store,
                facts,
                left.folder,
                limits=limits or Limits(),
                progress=progress,
                go_on=go_on,
            )
        except Ended as error:
            raise WorkspaceError(
                f"What sandbox {sandbox!r} has left in {left} cannot be read: {error}"
            ) from None
        finally:
            quiet_close(ours)
            try:
                helper.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait(_END_TIMEOUT)


def _wait_until_free(image: str) -> None:
    """Until the sandbox's own mount is gone, which takes a moment after its last process."""
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
