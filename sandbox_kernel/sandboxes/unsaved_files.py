"""Which sandboxes hold files that could not be saved: a note in the sandbox's record says so, or
the sandbox has ended when the process that would have saved them was gone.

Such a sandbox is held by no process. It stays until its files are saved
(``sandbox-kernel workspace save``, or the next start of its notebook) or until the user removes it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sandbox_kernel.errors import SandboxNotFound
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.unattended import has_ended, user_of

KEY = "unsaved"
IN_USE = "files"
"""Where the files belong of a sandbox that is in use, for the case that its process is killed."""
_NOBODY = "the process that was to save them has ended, and so has the sandbox."


@dataclass(frozen=True)
class Unsaved:
    """What a sandbox waits for."""

    backend: str
    sandbox: str
    workspace: dict[str, Any]
    """Of the kernel that was here, as JSON types; ``name`` is where its files are to be saved."""
    reason: str
    store: str = ""
    """Which store it was; empty: the default one."""
    kernel: str = ""
    """Name of the kernelspec."""
    kept: bool = True
    """The sandbox is there for nothing else, and goes when its files are saved."""
    place: str = ""
    """The folder or image of this machine that has the files; empty: the sandbox itself."""
    since: float = field(default_factory=time.time)
    process: Sequence[int] = ()
    """The process of this machine that makes the last save now: its number and its start."""
    elsewhere: bool = False
    """Another host's, or from before a restart of this one, as the record says: not noted here."""

    @property
    def name(self) -> str:
        """Of the workspace."""
        return str(self.workspace.get("name", ""))

    @property
    def notebook(self) -> str:
        return str(self.workspace.get("notebook", ""))

    def __str__(self) -> str:
        return (
            f"Files of workspace {self.name!r} are in sandbox {self.sandbox!r} ({self.backend}) "
            f"only, because they could not be saved: {self.reason}"
        )


_FIELDS = {f.name for f in fields(Unsaved)} - {"backend", "sandbox", "elsewhere"}


def unsaved_in(record: Record) -> Unsaved | None:
    """What a record says; None if all is saved, as far as is known, or a process will save it."""
    noted = _read(record, KEY)
    if noted is not None or not has_ended(record) or user_of(record) is not None:
        return noted
    left = belongs_to(record)
    return replace(left, reason=_NOBODY) if left is not None else None


def belongs_to(record: Record) -> Unsaved | None:
    """Where the files of a sandbox are saved that is, or was, in use; None if nowhere."""
    return _read(record, IN_USE)


def _read(record: Record, key: str) -> Unsaved | None:
    found = record.kernel.get(key)
    if not isinstance(found, dict) or not isinstance(found.get("workspace"), dict):
        return None
    known = {key: value for key, value in found.items() if key in _FIELDS}
    return Unsaved(
        record.backend,
        record.name,
        **{"reason": "", **known},
        elsewhere=record.where == "elsewhere",
    )


def note(unsaved: Unsaved) -> bool:
    """Write it down. False if there is no such sandbox any more."""
    return _set(unsaved.backend, unsaved.sandbox, {KEY: asdict(unsaved)})


def current(unsaved: Unsaved) -> Unsaved | None:
    """What its record says now; None if all is saved, or the sandbox is gone."""
    try:
        return unsaved_in(Records().load(unsaved.backend, unsaved.sandbox))
    except SandboxNotFound:
        return None


def clear(backend: str, sandbox: str, *, for_good: bool = False) -> None:
    """Its files are saved, or a process answers for it again. ``for_good``: it will have no files
    to save any more. No error if there is no note."""
    keys = {KEY, IN_USE} if for_good else {KEY}
    with contextlib.suppress(SandboxNotFound):
        if not keys.isdisjoint(Records().load(backend, sandbox).kernel):
            _set(backend, sandbox, dict.fromkeys(keys))


def _set(backend: str, sandbox: str, values: dict[str, dict[str, Any] | None]) -> bool:
    try:
        with Records().edit(backend, sandbox) as record:
            for key, value in values.items():
                record.kernel.pop(key, None)
                if value is not None:
                    record.kernel[key] = {name: value[name] for name in _FIELDS}
    except SandboxNotFound:
        return False
    return True


def all_unsaved(backends: Sequence[str]) -> Iterator[Unsaved]:
    """All of this user's, the oldest of each backend first."""
    for backend in backends:
        for record in Records().list(backend):
            found = unsaved_in(record)
            if found is not None:
                yield found


def unsaved_of(backends: Sequence[str], name: str) -> list[Unsaved]:
    """Those of a workspace, a sandbox, or the notebook at a path."""
    path = os.path.abspath(name)
    return [
        one
        for one in all_unsaved(backends)
        if name in (one.name, one.sandbox) or (one.notebook and one.notebook == path)
    ]
