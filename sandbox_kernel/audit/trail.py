"""Which events of a sandbox are kept, where, and who has caused them."""

from __future__ import annotations

import functools
import json
import logging
import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sandbox_kernel.audit.event_log import SUFFIX, AuditLog, Event, now, numbered
from sandbox_kernel.paths import data_dir, private_dir

log = logging.getLogger(__name__)

ALL, EGRESS, NONE = "all", "egress", "none"
KEEPS = (ALL, EGRESS, NONE)
"""Values of the setting ``audit``."""
FOLDER = "audit"
_ABOUT_EGRESS = ("egress", "secret", "policy")
_MOST_WORDS, _MOST_LETTERS = 32, 120
_OURS, _COMMAND = Path(__file__).parent.parent, "sandbox-kernel"
_MOST_UNUSED = 16 * 1024


class _Settings(Protocol):
    @property
    def audit(self) -> str: ...
    @property
    def audit_command(self) -> str | None: ...


class Audited(Protocol):
    """A sandbox; ``SandboxHandle`` is one."""

    @property
    def backend(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> _Settings: ...


class Trail:
    """The audit of one sandbox, as this process writes it. Cheap to make; touches nothing."""

    def __init__(
        self,
        backend: str,
        name: str,
        *,
        keeps: str = ALL,
        command: str | None = None,
        data: Path | None = None,
    ) -> None:
        """``data`` is the data folder, if it is another one than the environment names."""
        self.sandbox = name
        self._backend = backend
        self._keeps = keeps
        self._command = command
        self._data = data
        self._log: AuditLog | None = None

    @classmethod
    def of(cls, sandbox: Audited) -> Trail:
        spec = sandbox.spec
        return cls(sandbox.backend, sandbox.name, keeps=spec.audit, command=spec.audit_command)

    def note(self, kind: str, **facts: Any) -> None:
        """Record an event, and who has caused it: this process. Facts that are None or empty are
        left out."""
        given = {key: value for key, value in facts.items() if value not in (None, "", (), {})}
        self({"time": now(), "kind": kind, "sandbox": self.sandbox, **given, "by": by()})

    def __call__(self, event: Event) -> None:
        """Record an event as it is. For the gateway, which does what the sandbox causes."""
        if self._keeps == NONE:
            return
        if self._keeps == EGRESS and event.get("kind") not in _ABOUT_EGRESS:
            return
        try:
            if self._log is None:
                self._log = self._opened()
        except Exception as error:  # noqa: BLE001  an audit that fails must not end what it audits
            _tell_once(str(error))
        else:
            self._log(event)
        if self._command:
            from sandbox_kernel.audit.shipping import ship  # lazy: start-up time

            ship(self._command, event)

    @property
    def path(self) -> Path:
        return audit_path(self._backend, self.sandbox, self._data)

    def _opened(self) -> AuditLog:
        data = self._data or data_dir()
        if data.is_dir():
            private_dir(data / FOLDER)
        return AuditLog(self.path)


def note(sandbox: Audited, kind: str, **facts: Any) -> None:
    """Record an event of a sandbox, and that this process has caused it."""
    Trail.of(sandbox).note(kind, **facts)


def note_command(sandbox: Audited, argv: Sequence[str]) -> None:
    """Record that somebody runs a command in a sandbox. Not for commands of our own."""
    Trail.of(sandbox).note("exec", argv=_words(argv))


def audit_path(backend: str, name: str, data: Path | None = None) -> Path:
    """The audit of a sandbox, which outlives it."""
    return (data or data_dir()) / FOLDER / f"{backend}-{name}{SUFFIX}"


@functools.lru_cache(maxsize=16)
def _tell_once(problem: str) -> None:
    log.warning("The audit cannot be written: %s Work goes on without it.", problem)


def forget_unused(path: Path) -> None:
    """Delete the audit of a sandbox that was made ahead, and that nobody has used."""
    try:
        if numbered(path, 1).exists() or path.stat().st_size > _MOST_UNUSED:
            return
        kinds = {json.loads(line).get("kind") for line in path.read_bytes().splitlines()}
        if kinds <= {"created"}:
            path.unlink()
    except (OSError, ValueError, AttributeError):
        return  # it stays


def _words(argv: Sequence[str]) -> list[str]:
    shown = [_word(str(word)) for word in argv[:_MOST_WORDS]]
    return shown if len(argv) <= _MOST_WORDS else [*shown, "..."]


def _word(word: str) -> str:
    """Long ones are code, as for ``python -c``, or data: only their size is recorded."""
    short = len(word) <= _MOST_LETTERS and "\n" not in word
    return word if short else f"({len(word)} characters)"


def without_values(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A spec for an event. Of what may hold secrets only the names are left."""
    shown = {key: value for key, value in spec.items() if key != "audit_command"}
    for key in ("env", "options", "secrets"):
        if key in shown:
            shown[key] = sorted(map(_name, shown[key]))
    return shown


def _name(entry: Any) -> str:
    """Of a variable, or of a secret, which may be declared in some detail."""
    named = entry.get("name", "?") if isinstance(entry, Mapping) else entry
    return str(named).partition("=")[0]


def by() -> dict[str, Any]:
    """Who this process is."""
    return dict(_by(os.getpid()))


@functools.lru_cache(maxsize=1)
def _by(pid: int) -> dict[str, Any]:
    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return {"user": user[:_MOST_LETTERS], "pid": pid, "program": _program(sys.argv)}


def _program(argv: Sequence[str]) -> str:
    """``jupyter-lab``, ``papermill``, ``sandbox-kernel exec``. Never more of the command line: it
    may hold anything."""
    path = Path(argv[0] if argv and argv[0] not in ("", "-c", "-m") else sys.executable)
    name = path.parent.name if path.stem in ("__main__", "main") else path.name
    if path.is_relative_to(_OURS) and path.parent != _OURS:
        return f"{_COMMAND} {name.removesuffix('.py')}"  # a helper process
    if path.is_relative_to(_OURS):
        name = _COMMAND
    if name == _COMMAND and len(argv) > 1 and argv[1].isalpha():
        name = f"{name} {argv[1]}"
    return name[:_MOST_LETTERS]
