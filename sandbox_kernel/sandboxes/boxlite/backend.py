"""Constants and capabilities of the backend, for the broker and its clients. Imports no SDK."""

from __future__ import annotations

import os
from pathlib import Path

from sandbox_kernel.errors import SandboxUnavailable
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.sandboxes.capabilities import GATEWAY_PARTS, Capabilities
from sandbox_kernel.sandboxes.recording_client import RecordedHandle

BACKEND = "boxlite"
SNAPSHOTS = "boxlite-snapshots"
"""Where the records of snapshots are kept, apart from those of sandboxes."""
WORKDIR = "/workspace"
PYTHON = "python3"
_MAX_SOCKET_PATH = 107

CAPABILITIES = Capabilities(
    *("image", "memory_mib", "cpus", "disk_mib", "egress", "secrets", "gateway"),
    *("byte_exact_streams", "reattach", "restart", "snapshot"),
    notes={
        "processes": "A VM bounds its memory, not its processes; set memory_mib.",
        "open_files": "A VM bounds its memory, not its open files; set memory_mib.",
        "volume": "A box's files live on its own disk; keep the sandbox, or copy files out.",
        "readable": "Nothing of the host is shown to a box; put the files into the image.",
        "python": "A box runs the Python of its image; choose the image.",
    },
    # A box has no network: BoxLite's own list of allowed hosts could not be shown to hold.
    egress_parts=GATEWAY_PARTS,
)


class BoxHandle(RecordedHandle):
    """A box's handle, in the broker and in the processes that use it."""

    backend = BACKEND
    workdir = WORKDIR
    python = PYTHON
    holds_lease = True


def home() -> Path:
    """BOXLITE_HOME, else a folder of our own, apart from the user's own use of BoxLite."""
    override = os.environ.get("BOXLITE_HOME")
    found = Path(override).absolute() if override else private_dir(data_dir() / "boxlite")
    # A box's sockets lie below it, and a Unix socket's path has at most 107 bytes.
    if len(os.fsencode(found)) + len("/boxes/123456789012/sockets/ready.sock") > _MAX_SOCKET_PATH:
        raise SandboxUnavailable(
            f"The path {found} is too long for BoxLite's sockets. Set BOXLITE_HOME to a shorter "
            f"one."
        )
    return found


def remote() -> bool:
    return bool(os.environ.get("BOXLITE_REST_URL"))
