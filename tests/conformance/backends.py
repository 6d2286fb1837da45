"""The rows of the conformance suite: one a backend, with what the suite must know about it.

A backend that is not listed here gets a row with the defaults, so a third party's backend can be
tested without a change: ``pytest tests/conformance --backend NAME``.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox_kernel.sandboxes.base import SandboxInfo


def _kill_first_process(info: SandboxInfo) -> None:
    os.kill(info.detail["pid"], signal.SIGKILL)


def _kill_all_processes(info: SandboxInfo) -> None:
    for pid in info.detail["pids"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Row:
    """What the suite expects of one backend."""

    name: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every spec that the suite makes, e.g. the image."""
    capabilities: frozenset[str] = frozenset()
    """Capabilities that must be there; the suite asks the client itself for all others."""
    terminals: bool = True
    """Whether ``open_stream`` takes ``tty``."""
    crash: Callable[[SandboxInfo], None] | None = None
    """Ends a sandbox behind the backend's back, where the test can."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Values for limits, where the backend does not take the suite's own."""
    emulator: str = ""
    """The package below tests/emulators that stands in for the service."""
    key: str = ""
    """The variable with the service's API key: where it is set, `-m live` uses the service."""
    lease_pauses: bool = False
    """The end of a lease pauses the sandbox instead of ending it."""


ROWS = {
    row.name: row
    for row in (
        Row(
            "local",
            capabilities=frozenset(
                {
                    *("memory_mib", "cpus", "processes", "open_files", "disk_mib"),
                    *("volume", "readable", "python", "byte_exact_streams", "reattach"),
                }
            ),
            crash=_kill_first_process,
        ),
        Row(
            "boxlite",
            capabilities=frozenset(
                {
                    *("image", "memory_mib", "cpus", "disk_mib", "byte_exact_streams"),
                    *("reattach", "restart", "snapshot"),
                }
            ),
            crash=_kill_all_processes,
            limits={"disk_mib": 2048},
        ),
        Row(
            "microsandbox",
            capabilities=frozenset(
                {
                    *("image", "memory_mib", "cpus", "disk_mib", "byte_exact_streams"),
                    *("reattach", "pause", "restart", "snapshot", "memory", "fork"),
                }
            ),
            crash=_kill_first_process,
        ),
        Row(
            "superserve",
            capabilities=frozenset(
                {
                    *("image", "secrets", "egress", "delete_after_seconds", "hosted"),
                    *("byte_exact_streams", "reattach", "pause", "restart"),
                    *("snapshot", "memory", "fork"),
                }
            ),
            emulator="superserve",
            key="SUPERSERVE_API_KEY",
            lease_pauses=True,
        ),
        Row(
            "islo",
            capabilities=frozenset(
                {
                    *("image", "memory_mib", "cpus", "disk_mib", "egress", "options", "hosted"),
                    *("byte_exact_streams", "reattach", "pause", "restart"),
                }
            ),
            emulator="islo",
            key="ISLO_API_KEY",
            lease_pauses=True,
            limits={"disk_mib": 1024},
        ),
    )
}


def row(name: str) -> Row:
    """The row of a backend."""
    return ROWS.get(name) or Row(name)
