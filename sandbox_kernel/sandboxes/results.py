"""What the methods of the sandbox surface return: plain values, without behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ExecResult:
    """Outcome of a command that ran to its end. Signal N gives the exit code -N."""

    stdout: str
    stderr: str = ""
    exit_code: int = 0
    truncated: bool = False

    @property
    def output(self) -> str:
        """stdout followed by stderr."""
        return self.stdout + self.stderr

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True)
class SandboxInfo:
    """The state of a sandbox at one moment, for ``ps``, for error messages and for tests."""

    name: str
    id: str
    backend: str
    status: str
    """``running``, ``paused``, ``stopped``, ``gone``; ``unknown`` for a provider's own status."""
    created: float
    limits: Mapping[str, str] = field(default_factory=dict)
    """Spec field -> the value in force and by what, e.g. ``"512 MiB (cgroup v2)"``."""
    egress: str = ""
    """Which way what leaves it takes: a value of capabilities.EgressWay; empty if not known."""
    oom_kills: int = 0
    """How often the memory limit killed something in the sandbox."""
    last_kill: str = ""
    """Why the sandbox itself last killed something (memory, disk), in words."""
    killed: Mapping[int, str] = field(default_factory=dict)
    """What the sandbox itself killed recently: pid inside the sandbox -> why, in words."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """What the backend adds, e.g. host pids."""


@dataclass(frozen=True)
class Usage:
    """What a sandbox uses now, measured from outside."""

    memory: int
    """Bytes."""
    processes: int
    cpu_seconds: float
    """Of the running processes, since each began."""


@dataclass(frozen=True)
class SnapshotInfo:
    """A kept state of a sandbox; ``SandboxClient.restore`` makes sandboxes from it."""

    name: str
    backend: str
    sandbox: str
    """Name of the sandbox that it was taken from."""
    created: float
    memory: bool
    """Whether it holds the running processes, or the files only."""


@dataclass(frozen=True)
class Diagnosis:
    """One line of ``sandbox-kernel doctor``."""

    ok: bool | None
    """True: works. False: does not, so the backend cannot be used. None: works, with a remark."""
    what: str
    fix: str = ""
