"""Records of live sandboxes, on disk, so that another process can find, re-attach or remove them.

One JSON file a sandbox, ``<data dir>/records/<backend>/<name>.json``, mode 0600, replaced
atomically. It is made with link(2), which fails if the name is taken, so it also decides who owns a
name. It says on which host, since which boot and in which pid namespace it was made
(``host_identity``).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandbox_kernel import host_identity
from sandbox_kernel.atomic_write import write_atomically, written_aside
from sandbox_kernel.errors import SandboxError, SandboxExists, SandboxNotFound
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.spec import SandboxSpec, check_name

log = logging.getLogger("sandbox_kernel")

VERSION = 1
_SPARE, _BLOCK = 4096, 4096
"""Spare bytes in a record's file, for changes that are made when the disk is full."""
_RULES = ".egress"
_editing = threading.RLock()
"""Records are read, changed and written again in any thread of this process."""


@dataclass
class Record:
    """The facts about one sandbox that are on disk."""

    backend: str
    name: str
    id: str
    spec: dict[str, Any]
    created: float = field(default_factory=time.time)
    data: dict[str, Any] = field(default_factory=dict)
    """The backend's own facts (folders, pids, provider ids)."""
    kernel: dict[str, Any] = field(default_factory=dict)
    """The kernel's facts (session token, connection), written by the provisioner."""
    place: dict[str, str] = field(default_factory=dict)
    """Where it was made; empty in records of earlier versions."""
    folder: str = field(default="", compare=False)
    """Where the record itself is, once it is on disk: the environment may name another folder by
    the time that it is removed. Not part of the file."""
    version: int = VERSION

    @property
    def where(self) -> host_identity.Where:
        return host_identity.where(self.place)

    def sandbox_spec(self) -> SandboxSpec:
        return SandboxSpec.from_mapping(self.spec, where=f"the record of sandbox {self.name!r}")


class Records:
    """The store of records. Cheap to make; every call reads or writes the disk. It stays in the
    folder that the environment names when it is first used."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    def _folder(self, backend: str) -> Path:
        """May be missing: reading and deleting make no folder."""
        self._root = self._root or data_dir() / "records"
        return self._root / check_name(backend, "A backend name")

    def _path(self, backend: str, name: str) -> Path:
        return self._folder(backend) / f"{check_name(name)}.json"

    def reserve(self, record: Record) -> None:
        """Write a first record, or SandboxExists if the name is taken."""
        record.place = record.place or host_identity.here()
        path = self._path(record.backend, record.name)
        for folder in (path.parent.parent, path.parent):
            private_dir(folder)
        content = _text(record).encode()
        with written_aside(path.parent, content, prefix=f".{path.stem}-") as temporary:
            try:
                os.link(temporary, path)  # atomic, and fails if the name is taken
            except FileExistsError:
                raise SandboxExists(
                    f"A sandbox named {record.name!r} exists already in the backend "
                    f"{record.backend!r}. Choose another name, or remove it with "
                    f"`sandbox-kernel rm {record.name}`."
                ) from None
        record.folder = str(path.parent)

    def save(self, record: Record) -> None:
        """Replace a record, where it is."""
        folder = Path(record.folder) if record.folder else private_dir(self._folder(record.backend))
        path, text = folder / f"{check_name(record.name)}.json", _text(record)
        try:
            write_atomically(path, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _write_in_place(path, text):
                raise
        record.folder = str(folder)

    def load(self, backend: str, name: str) -> Record:
        path = self._path(backend, name)
        try:
            return self._read(path)
        except FileNotFoundError:
            raise SandboxNotFound(
                f"No sandbox named {name!r} in the backend {backend!r}. "
                f"`sandbox-kernel ps` lists what there is."
            ) from None

    def current(self, record: Record) -> Record | None:
        """The record as it is on disk now; None if the sandbox was removed, or replaced by another
        of its name."""
        folder = Path(record.folder) if record.folder else self._folder(record.backend)
        try:
            found = self._read(folder / f"{check_name(record.name)}.json")
        except FileNotFoundError:
            return None
        return found if found.id == record.id else None

    def note(self, record: Record, **facts: Any) -> None:
        """Add the backend's facts to a sandbox's record as it is on disk now. ``record`` itself is
        left alone, and nothing is written for a sandbox that was removed."""
        with _editing:
            found = self.current(record)
            if found is not None:
                found.data.update(facts)
                self.save(found)

    @contextlib.contextmanager
    def edit(self, backend: str, name: str) -> Iterator[Record]:
        """A record to change, which is then saved; no other thread changes or deletes it
        meanwhile. SandboxNotFound if there is none. Blocks: not for an event loop."""
        with _editing:
            record = self.load(backend, name)
            before = _text(record)
            yield record
            if _text(record) != before:
                self.save(record)

    def list(self, backend: str) -> list[Record]:
        """All readable records of a backend, oldest first; an unreadable one is logged."""
        found = []
        for path in self._folder(backend).glob("*.json"):
            try:
                found.append(self._read(path))
            except FileNotFoundError:
                continue  # removed by another process since the listing
            except SandboxError as error:
                log.warning("%s", error)
        return sorted(found, key=lambda r: r.created)

    def delete(self, backend: str, name: str) -> None:
        """Forget a sandbox. No error if it is forgotten already."""
        with _editing:
            path = self._path(backend, name)
            path.with_suffix(_RULES).unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    def rules_path(self, backend: str, name: str) -> Path:
        """Where a sandbox's rules for egress are if they have changed since it was made; the file
        ends with the record."""
        return self._path(backend, name).with_suffix(_RULES)

    @staticmethod
    def _read(path: Path) -> Record:
        try:
            values = json.loads(path.read_text())
            if values.get("version") != VERSION:
                raise ValueError(f"version {values.get('version')!r}, not {VERSION}")
            return Record(**{**values, "folder": str(path.parent)})
        except (ValueError, TypeError, AttributeError) as error:
            raise SandboxError(
                f"The record {path} cannot be read ({error}). If no sandbox of that name runs, "
                f"delete the file."
            ) from error


def _text(record: Record) -> str:
    values = asdict(record)
    del values["folder"]
    text = json.dumps(values)
    return text.ljust(-(-(len(text) + _SPARE) // _BLOCK) * _BLOCK)


def _write_in_place(path: Path, text: str) -> bool:
    """On a full disk: replace a record by one that fits into its file. False if it does not. A
    single write, so only a crash of the machine can cut it."""
    data = text.rstrip().encode()
    with path.open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if len(data) > size:
            return False
        written = file.write(data.ljust(size))
        os.fsync(file.fileno())
    return written == size


def _after_fork_in_child() -> None:
    global _editing
    _editing = threading.RLock()  # a thread of the parent may hold the other one


os.register_at_fork(after_in_child=_after_fork_in_child)
