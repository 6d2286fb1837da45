"""Rules for egress that were changed while a sandbox runs: a file beside its record.

``sandbox-kernel policy set`` writes it. The process that carries the sandbox's connections looks at
it every second, and at its start, and notes in the record which version is in force. The file names
its sandbox's id, so that it means nothing to another sandbox of that name.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.paths import private_dir
from sandbox_kernel.records import Record, Records

IN_FORCE = "egress"
"""In a record's ``kernel``: which change its gateway has carried out, and what went wrong."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Change:
    """A change of rules. ``policy`` None: back to those that the sandbox was made with."""

    revision: str
    policy: EgressPolicy | None


def write_change(record: Record, policy: EgressPolicy | None) -> Change:
    """Have these rules for the sandbox of this record, as soon as its gateway sees them."""
    change = Change(secrets.token_hex(8), policy)
    plain = None if policy is None else policy.to_json()
    text = json.dumps({"sandbox_id": record.id, "revision": change.revision, "egress": plain})
    if len(text) > _MOST_BYTES:
        raise SpecError(f"The rules are longer than {_MOST_BYTES >> 20} MiB.")
    path = Records().rules_path(record.backend, record.name)
    private_dir(path.parent)
    write_atomically(path, text)
    return change


def read_change(backend: str, name: str, sandbox_id: str) -> Change | None:
    """The present change of a sandbox; None if there is none. SandboxError if it cannot be read."""
    return _read(Records().rules_path(backend, name), sandbox_id)


def carried_out(record: Record, change: Change) -> str | None:
    """Whether the sandbox's gateway has carried out this change: None if not yet, else what went
    wrong, or an empty string."""
    noted = record.kernel.get(IN_FORCE)
    if not isinstance(noted, dict) or noted.get("revision") != change.revision:
        return None
    return str(noted.get("error", ""))


class ChangeWatch:
    """Looks for changes, for the gateway of one sandbox. Blocks for moments only; ``read`` is for
    a thread."""

    def __init__(self, backend: str, name: str, sandbox_id: str) -> None:
        self._path = Records().rules_path(backend, name)
        self._id = sandbox_id
        self._seen: tuple[int, ...] | None = None

    def is_due(self) -> bool:
        """Whether the file is another one than ``read`` has seen."""
        return self._signature() != self._seen

    def read(self) -> Change | None:
        self._seen = self._signature()
        return _read(self._path, self._id)

    def _signature(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        except OSError:
            return ()  # it is there, and reading it says what is wrong
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path, sandbox_id: str) -> Change | None:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SandboxError(f"The rules in {path} cannot be read: {error.strerror}.") from None
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"they are longer than {_MOST_BYTES >> 20} MiB")
        found: Any = json.loads(data)
        revision, plain = str(found["revision"]), found["egress"]
        if found["sandbox_id"] != sandbox_id:
            return None
        return Change(revision, None if plain is None else EgressPolicy.read(plain))
    except (ValueError, KeyError, TypeError, RecursionError, SpecError) as error:
        raise SandboxError(f"The rules in {path} are damaged: {error}") from None
