"""Where a record was made: which host, which boot of it, which pid namespace.

A folder of records can be shared: one home folder on two hosts, one volume in two containers.
Process numbers and sockets in it mean something only where they were made, so callers
ask ``where`` before they act on them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Where = Literal["here", "before", "elsewhere"]


def here() -> dict[str, str]:
    """This place, for a record."""
    return {
        "host": socket.gethostname(),
        "machine": _read("/etc/machine-id"),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "pids": os.readlink("/proc/self/ns/pid"),
    }


def where(place: Mapping[str, Any]) -> Where:
    """Whether a record's processes are ``here``, ended with an earlier boot of this host
    (``before``), or belong to another place. Records of earlier versions have no place: here."""
    ours = here()
    same = {key: place.get(key) == ours[key] for key in ours}
    if not place or (same["boot"] and same["pids"]):
        return "here"  # whatever the host is called by now
    return "before" if same["host"] and same["machine"] and not same["boot"] else "elsewhere"


def in_words(place: Mapping[str, Any]) -> str:
    """For people: the host's name, or that it is another container on this host."""
    name = str(place.get("host", "?"))[:100]
    return f"another container on {name}" if name == socket.gethostname() else f"the host {name}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
