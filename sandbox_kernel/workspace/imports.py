"""A host folder becomes a save."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from sandbox_kernel.errors import QuotaExceeded, WorkspaceError
from sandbox_kernel.guest.workspace.helper import IGNORE_FILE, MAX_IGNORE
from sandbox_kernel.guest.workspace.known import Folder
from sandbox_kernel.guest.workspace.layout import pack
from sandbox_kernel.guest.workspace.scan import Rules, Scan, TooMuch
from sandbox_kernel.text import printable
from sandbox_kernel.workspace import ignore
from sandbox_kernel.workspace.packs import CHUNK_KIND, TREE_KIND, PackWriter
from sandbox_kernel.workspace.reports import (
    Limits,
    OnProgress,
    Progress,
    SaveInfo,
    SaveReport,
    UploadPolicy,
)
from sandbox_kernel.workspace.store import Store

_HIDDEN = f".*\n!{IGNORE_FILE}\n".encode()


def import_folder(
    store: Store,
    name: str,
    folder: str | Path,
    *,
    policy: UploadPolicy | None = None,
    notebook: str = "",
    limits: Limits | None = None,
    progress: OnProgress = lambda progress: None,
) -> SaveReport:
    """Make a save of workspace ``name`` from a folder of the host. Blocks: call it in a thread.

    What was read is remembered as the folder's baseline, so that a later ``export`` to the same
    folder can tell which files have changed on the host since.
    """
    started = time.monotonic()
    path = os.path.realpath(folder)
    limits = limits or Limits()
    policy = policy or UploadPolicy("folder", hidden=True)
    base, hints = store.begin(name)
    writer = store.writer()
    sink = _Sink(store, writer, progress)
    scan = Scan(
        Folder(),
        _rules(path, policy),
        sink,
        full=False,
        max_files=limits.max_files,
        max_bytes=limits.max_bytes,
        prune=policy.mode == "globs",
    )
    try:
        root = scan.run(path)
    except TooMuch as error:
        writer.abandon()
        biggest = ", ".join(f"{printable(what)} ({size})" for size, what in error.offenders)
        raise QuotaExceeded(
            f"The folder {path} has {error}; {limits.max_files} files and {limits.max_bytes} bytes "
            f"are allowed. Biggest: {biggest}. List what is not needed in {IGNORE_FILE}, choose "
            f"files by globs, or raise the quota."
        ) from None
    except OSError as error:
        writer.abandon()
        raise WorkspaceError(f"The folder {path} cannot be read: {error}") from error
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    save = SaveInfo(
        id="",
        workspace=name,
        root=root.hex(),
        created=0.0,
        kind="import",
        parent=base.id if base is not None else "",
        notebook=notebook,
        problems=scan.problems,
        packs=[*hints, *sink.elsewhere, *writer.names],
    )
    totals = store.check(save)
    new = base is None or base.root != save.root
    if new or base is None:
        save = store.publish(replace(save, files=totals.files, bytes=totals.bytes))
    else:
        save = base
    store.set_baseline(name, path, root)
    return SaveReport(save, new, 0, writer.plain_bytes, time.monotonic() - started)


def _rules(folder: str, policy: UploadPolicy) -> Rules:
    if policy.mode == "globs":
        return Rules(ignore.only(policy.globs))
    try:
        with open(os.path.join(folder, IGNORE_FILE), "rb") as file:
            text = file.read(MAX_IGNORE)
    except FileNotFoundError:
        text = b""
    except OSError as error:
        raise WorkspaceError(f"{IGNORE_FILE} in {folder} cannot be read: {error}") from error
    return Rules(ignore.rules(text if policy.hidden else _HIDDEN + text))


class _Sink:
    """Stores what a scan finds, if the store lacks it."""

    def __init__(self, store: Store, writer: PackWriter, progress: OnProgress) -> None:
        self.elsewhere: set[str] = set()
        self._store = store
        self._writer = writer
        self._seen: set[bytes] = set()
        self._progress = progress

    def chunk(self, hash_: bytes, data: bytes) -> None:
        self._add(CHUNK_KIND, hash_, data)

    def known_chunk(self, hash_: bytes, size: int, path: str, index: int) -> None:
        """Nothing is known before an import."""

    def tree(self, hash_: bytes, data: bytes) -> None:
        self._add(TREE_KIND, hash_, data)

    def progress(self, files: int, size: int) -> None:
        self._progress(Progress("scan", files, size))

    def _add(self, kind: int, hash_: bytes, data: bytes) -> None:
        if hash_ in self._seen:
            return
        self._seen.add(hash_)
        at = self._store.packs.find(hash_)
        if at is not None:
            self.elsewhere.add(at.pack)
            return
        codec, packed = pack(data)
        self._writer.add(kind, hash_, codec, packed, len(data))
