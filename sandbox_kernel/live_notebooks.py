"""Live notebooks on disk: the kernels that ``sandbox_kernel.Notebook`` has started, and their jobs.

For another process that goes on with one: after its starter has died, or let go of it. In
``<data dir>/notebooks``, which only this user can read, each has two files: ``<name>.json`` says
where the kernel is and how to talk to it (with the key that signs its messages), ``<name>.jobs``
which cells were queued, sent and ended, one line for each, written before it happens.

The sandbox's own record (``records.py``) says which process uses it. A notebook ends with its
sandbox: what is here of others is deleted by whoever looks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandbox_kernel import host_identity
from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.errors import SandboxError, SandboxNotFound
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.unattended import has_ended, user_of

log = logging.getLogger("sandbox_kernel")

VERSION = 1
_NOTEBOOK = ".ipynb"


@dataclass
class LiveNotebook:
    """A notebook whose sandbox exists."""

    sandbox: str
    backend: str
    sandbox_id: str
    kernel_id: str
    kernel_name: str
    path: str
    """Where it is recorded; empty if nowhere."""
    kernelspec: dict[str, Any] = field(repr=False)
    """As in ``kernel.json``, for restarts."""
    provisioner: dict[str, Any] = field(repr=False)
    """For ``SandboxProvisioner.load_provisioner_info``."""
    connection_file: str = ""
    cwd: str | None = None
    created: float = field(default_factory=time.time)
    place: dict[str, str] = field(default_factory=host_identity.here)
    version: int = VERSION

    @property
    def owner(self) -> int | None:
        """The process that uses it now; None if it waits for one."""
        record = self.record()
        return user_of(record) if record is not None else None

    def record(self) -> Record | None:
        """The sandbox's record; None if it is gone."""
        try:
            record = Records().load(self.backend, self.sandbox)
        except SandboxNotFound:
            return None
        return record if record.id == self.sandbox_id and not has_ended(record) else None

    def save(self) -> None:
        write_atomically(self._path("json"), json.dumps(asdict(self)))

    def forget(self) -> None:
        """Its sandbox has ended. Idempotent."""
        for ending in ("json", "jobs"):
            self._path(ending).unlink(missing_ok=True)
        if self.connection_file:
            Path(self.connection_file).unlink(missing_ok=True)

    def journal(self) -> Journal:
        return Journal(self._path("jobs"))

    def _path(self, ending: str) -> Path:
        name = hashlib.sha256(f"{self.backend}/{self.sandbox_id}".encode()).hexdigest()[:32]
        return _folder() / f"{name}.{ending}"


class Journal:
    """What became of a notebook's jobs, as far as its processes knew. Each line is written with one
    system call, so what was noted is there even if the process is killed in the next moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def note(self, **facts: Any) -> None:
        """OSError if the disk is full."""
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._fd = os.open(self.path, flags, 0o600)
        data = json.dumps(facts).encode() + b"\n"
        if os.write(self._fd, data) != len(data):
            raise OSError(f"{self.path} could not be written in whole")

    def read(self) -> Iterator[dict[str, Any]]:
        """A line that was cut off is left out."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        for line in lines:
            with contextlib.suppress(ValueError):
                facts = json.loads(line)
                if isinstance(facts, dict):
                    yield facts

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def live_notebooks() -> list[LiveNotebook]:
    """Those of this user and this machine, the oldest first. Blocks for a moment."""
    found = []
    for path in _folder().glob("*.json"):
        notebook = _read(path)
        if notebook is None or host_identity.where(notebook.place) == "elsewhere":
            continue
        if notebook.record() is None:
            notebook.forget()
        else:
            found.append(notebook)
    return sorted(found, key=lambda notebook: notebook.created)


def notebook_at(path: str) -> LiveNotebook | None:
    """The latest one that is recorded in this file."""
    path = os.path.realpath(path)
    return next((one for one in reversed(live_notebooks()) if one.path == path), None)


def find_notebook(wanted: str) -> LiveNotebook:
    """By its sandbox's name, a beginning of it that no other has, or its own path. SandboxNotFound
    if there is none."""
    every = live_notebooks()
    if wanted.endswith(_NOTEBOOK) and (found := notebook_at(wanted)) is not None:
        return found
    named = [one for one in every if one.sandbox == wanted]
    named = named or [one for one in every if wanted and one.sandbox.startswith(wanted)]
    if len(named) == 1:
        return named[0]
    names = ", ".join(one.sandbox for one in named or every) or "none"
    if named:
        raise SandboxNotFound(f"{wanted!r} may be several notebooks: {names}. Name one in full.")
    raise SandboxNotFound(
        f"No notebook is live in a sandbox {wanted!r}, or is recorded there; live are: {names}. "
        f"Open one with Notebook.open()."
    )


def _read(path: Path) -> LiveNotebook | None:
    try:
        values = json.loads(path.read_text())
        if values.get("version") != VERSION:
            raise ValueError(f"version {values.get('version')!r}, not {VERSION}")
        return LiveNotebook(**values)
    except FileNotFoundError:
        return None  # another process has deleted it since the listing
    except (ValueError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s). Delete it if it stays.", path, error)
        return None
    except SandboxError as error:
        log.warning("%s", error)
        return None


def _folder() -> Path:
    return private_dir(data_dir() / "notebooks")
