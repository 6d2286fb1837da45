"""Command: what to run in a sandbox, and with which environment, folder and kind of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Command:
    """One command for ``SandboxHandle.open_command``, ``run_command`` or ``spawn_command``."""

    argv: Sequence[str]
    """Program and arguments; no shell parses them."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the sandbox's own."""
    cwd: str | None = None
    """Working folder; None for the sandbox's ``workdir``."""
    tty: tuple[int, int] | None = None
    """Rows and columns of its terminal; None for pipes."""
    duplex: bool = False
    """Ask for ``ExecStream.socket``, which a backend may not have."""
    main: bool = False
    """For a spawned command: the sandbox ends with it, if the backend can do that."""

    @property
    def program(self) -> str:
        return self.argv[0]

    def with_defaults(self, env: Mapping[str, str], cwd: str) -> Command:
        """The same command with the sandbox's variables and working folder filled in."""
        return replace(self, env={**env, **self.env}, cwd=self.cwd or cwd)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(replace(self, env=dict(self.env))), "argv": list(self.argv)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Command:
        """The inverse of ``to_json``; other keys are ignored."""
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        tty = known.get("tty")
        return cls(**{**known, "tty": (tty[0], tty[1]) if tty else None})
