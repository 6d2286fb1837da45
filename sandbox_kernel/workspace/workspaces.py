"""Workspaces and their saves, as small JSON files of the store.

    workspaces/<name>/saves/<id>.json       one file a save; the newest is the workspace's state
    workspaces/<name>/failures/<id>.json    a save that failed, and why
    workspaces/<name>/baselines/<x>.json    a host folder's tree at its last import or export
    workspaces/<name>/retired.json          since when the workspace's notebook has been gone
    workspaces/<name>/notebook.json         which notebook it belongs to (``notebook_identity``)

No file is changed in place and no two writers write the same one, so the saves of two processes are
both there.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import os
import re
import secrets
import time
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from sandbox_kernel.errors import StoreDamaged, WorkspaceExists, WorkspaceNotFound
from sandbox_kernel.spec import NOTEBOOK, check_name
from sandbox_kernel.suggestions import closest
from sandbox_kernel.workspace.blobs import Blobs
from sandbox_kernel.workspace.reports import Baseline, FailedSave, SaveInfo, parsed

MOST_FAILURES = 20
_RACES = 5
_LONGEST_SLUG = 48
_ID = re.compile(r"[0-9]{8}t[0-9]{6}-[0-9]{9}-[0-9a-f]{6}")


class Workspaces:
    """Workspaces by name. ``Store`` adds the files of their saves."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs
        self.url = blobs.url

    # --- saves

    def names(self, *, retired: bool = False) -> Sequence[str]:
        """Names of workspaces with a save, sorted; of retired ones only if asked for."""
        found = self.blobs.folders("workspaces")
        return [name for name in found if self.ids(name) and (retired or not self.retired(name))]

    def ids(self, name: str) -> list[str]:
        """Ids of all saves of a workspace, oldest first."""
        return [id_ for id_ in self._ids(name, "saves") if _ID.fullmatch(id_)]

    def saves(self, name: str) -> Sequence[SaveInfo]:
        """All saves of a workspace, oldest first."""
        return [self.load(name, id_) for id_ in self.ids(name)]

    def latest(self, name: str) -> SaveInfo | None:
        """The newest save, or None."""
        for _ in range(_RACES):
            ids = self.ids(name)
            if not ids:
                return None
            with suppress(WorkspaceNotFound):  # removed just now
                return self.load(name, ids[-1])
        raise WorkspaceNotFound(f"Another process is removing the saves of {name!r}.")

    def find(self, name: str, at: str = "") -> SaveInfo:
        """The newest save, or the one whose id starts or ends with ``at``. WorkspaceNotFound."""
        ids = self.ids(name)
        if not ids:
            close = closest(name, self.blobs.folders("workspaces"))
            hint = f"Did you mean {close!r}? " if close else ""
            raise WorkspaceNotFound(
                f"The store {self.url} has no workspace {name!r}. {hint}"
                f"`sandbox-kernel workspace list` shows all."
            )
        if not at:
            return self.load(name, ids[-1])
        found = [id_ for id_ in ids if id_.startswith(at)] or [i for i in ids if i.endswith(at)]
        if len(found) != 1:
            several = f"{len(found)} saves" if found else "no save"
            raise WorkspaceNotFound(
                f"The workspace {name!r} has {several} {at!r}. "
                f"`sandbox-kernel workspace log {name}` lists them."
            )
        return self.load(name, found[0])

    def load(self, name: str, id_: str) -> SaveInfo:
        """One save, by its whole id. WorkspaceNotFound, StoreDamaged."""
        path = _path(name, "saves", id_)
        try:
            values = self._json(path)
        except FileNotFoundError:
            raise WorkspaceNotFound(f"The save {id_} of {name!r} has just been removed.") from None
        try:
            if values.pop("sha256", None) != _checksum(values):
                raise ValueError("wrong checksum")
            if len(bytes.fromhex(values["root"])) != 32:
                raise ValueError("invalid root")
            return parsed(SaveInfo, values)
        except (TypeError, ValueError, KeyError) as error:
            raise StoreDamaged(f"The save {path} in {self.url} is damaged: {error}.") from error

    def _put_save(self, save: SaveInfo) -> None:
        values = asdict(save)
        self._put(_path(save.workspace, "saves", save.id), {**values, "sha256": _checksum(values)})

    def _delete_save(self, name: str, id_: str) -> None:
        self.blobs.delete(_path(name, "saves", id_))

    def note_failure(self, name: str, backend: str, sandbox: str, error: Exception) -> None:
        """Record a failed save in the workspace's history, which keeps the last few."""
        id_ = new_id(max(self.ids(name), default=""))
        failed = FailedSave(id_, time.time(), backend, sandbox, str(error))
        self._put(_path(name, "failures", id_), asdict(failed))
        for old in self._ids(name, "failures")[:-MOST_FAILURES]:
            self.blobs.delete(_path(name, "failures", old))

    def failures(self, name: str) -> Sequence[FailedSave]:
        """The recorded failures, oldest first."""
        found = []
        for id_ in self._ids(name, "failures"):
            path = _path(name, "failures", id_)
            try:
                found.append(parsed(FailedSave, self._json(path)))
            except FileNotFoundError:
                continue  # deleted just now
            except TypeError as error:
                raise StoreDamaged(f"{path} in {self.url} is damaged: {error}.") from error
        return found

    # --- renaming and removing

    def rename(self, name: str, new: str, notebook: str = "") -> bool:
        """Rename a workspace, because its notebook moved. False if it has no saves.
        WorkspaceExists if ``new`` has saves and is not retired. Safe to repeat."""
        check_workspace_name(new)
        ids = self.ids(name)
        if not ids:
            return False
        if not set(self.ids(new)) <= set(ids):
            self._make_room(new)
        while ids:  # saves may appear meanwhile
            for id_ in ids:
                with suppress(WorkspaceNotFound):  # removed just now
                    self.move_save(self.load(name, id_), new, notebook)
            ids = self.ids(name)
        for kind in ("baselines", "failures"):
            for id_ in self._ids(name, kind):
                self.blobs.put(_path(new, kind, id_), self.blobs.get(_path(name, kind, id_)))
        self.revive(new)
        self._forget(name)
        return True

    def move_save(self, save: SaveInfo, new: str, notebook: str = "") -> None:
        """Move one save to another workspace. No error if it is there already."""
        if save.id in self.ids(save.workspace):
            self._copy_save(save, new, notebook)
            self._delete_save(save.workspace, save.id)

    def copy(self, name: str, new: str, notebook: str = "") -> bool:
        """Start a second workspace with the newest save of the first. False if there is none;
        WorkspaceExists if ``new`` has saves and is not retired."""
        save = self.latest(name)
        if save is None:
            return False
        if self.ids(new):
            self._make_room(new)
        self._copy_save(replace(save, parent=""), new, notebook)
        return True

    def _copy_save(self, save: SaveInfo, new: str, notebook: str) -> None:
        self._put_save(replace(save, workspace=new, notebook=notebook or save.notebook))

    def _make_room(self, name: str) -> None:
        if not self.retired(name):
            raise WorkspaceExists(
                f"A workspace {name!r} exists already. Remove it first with "
                f"`sandbox-kernel workspace rm {name}`."
            )
        self.remove(name)

    def retire(self, name: str) -> bool:
        """The notebook was deleted: hide its workspace until ``gc``. False if there is none."""
        if not self.ids(name):
            return False
        self._put(f"workspaces/{name}/retired.json", {"since": time.time()})
        return True

    def retired(self, name: str) -> float:
        """Since when a workspace has been retired; 0 if it is not."""
        try:
            return float(self._json(f"workspaces/{name}/retired.json").get("since", 0.0))
        except FileNotFoundError:
            return 0.0

    def revive(self, name: str) -> bool:
        """Undo ``retire``. False if it was not retired."""
        if not self.retired(name):
            return False
        self.blobs.delete(f"workspaces/{name}/retired.json")
        return True

    def remove(self, name: str, at: str = "") -> bool:
        """Delete one save, or a workspace; ``gc`` frees the space. False if there was none."""
        ids = [self.find(name, at).id] if at else self.ids(name)
        for id_ in ids:
            self._delete_save(name, id_)
        if not at:
            self._forget(name)
        return bool(ids)

    def _forget(self, name: str) -> None:
        """Delete the files beside the saves of a workspace."""
        for kind in ("baselines", "failures"):
            for id_ in self._ids(name, kind):
                self.blobs.delete(_path(name, kind, id_))
        for file in ("retired.json", "notebook.json"):
            self.blobs.delete(f"workspaces/{name}/{file}")

    # --- baselines

    def baseline(self, name: str, folder: str) -> Baseline:
        """The baseline of a host folder; an empty one if there is none."""
        try:
            found = self._json(_path(name, "baselines", _folder_key(folder)))
        except FileNotFoundError:
            return Baseline()
        return parsed(Baseline, {**found, "root": bytes.fromhex(found["root"])})

    def set_baseline(self, name: str, folder: str, baseline: Baseline) -> None:
        value = {**asdict(baseline), "folder": folder, "root": baseline.root.hex()}
        self._put(_path(name, "baselines", _folder_key(folder)), value)

    def roots(self, name: str) -> Iterator[bytes]:
        """The trees of all saves and baselines of a workspace."""
        for id_ in self.ids(name):
            with suppress(WorkspaceNotFound):  # removed just now
                yield self.load(name, id_).tree
        for id_ in self._ids(name, "baselines"):
            with suppress(FileNotFoundError):
                yield bytes.fromhex(self._json(_path(name, "baselines", id_))["root"])

    # --- small files

    def _ids(self, name: str, kind: str) -> list[str]:
        found = self.blobs.names(f"workspaces/{check_workspace_name(name)}/{kind}")
        return sorted(file.removesuffix(".json") for file in found if file.endswith(".json"))

    def _json(self, path: str) -> dict[str, Any]:
        data = self.blobs.get(path)
        try:
            value = json.loads(data)
            if not isinstance(value, dict):
                raise TypeError("not a JSON object")
        except (ValueError, TypeError) as error:
            raise StoreDamaged(f"The file {path} in {self.url} is damaged: {error}.") from error
        return value

    def _put(self, path: str, value: dict[str, Any]) -> None:
        self.blobs.put(path, json.dumps(value, indent=1).encode() + b"\n")


def check_workspace_name(name: str) -> str:
    """The name itself, or SpecError: names become file names in the store."""
    return check_name(name, "A workspace name")


def name_for_notebook(path: str) -> str:
    """The workspace of a notebook, named after its path, such as ``work-demo-3f2a9c41``."""
    plain = unicodedata.normalize("NFKD", path.removesuffix(NOTEBOOK))
    plain = plain.encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[-_LONGEST_SLUG:].strip("-")
    identity = f"\0{path}".encode("utf-8", "surrogateescape")
    digest = hashlib.sha256(identity).hexdigest()[:8]
    return check_workspace_name(f"{slug or 'notebook'}-{digest}")


def new_id(after: str) -> str:
    """An id for a save. Ids sort by time, this one behind ``after`` even if the clock went back."""
    now = time.time_ns()
    if after and _format_id(now)[:25] <= after[:25]:
        then = time.strptime(after[:15], "%Y%m%dt%H%M%S")
        now = calendar.timegm(then) * 10**9 + int(after[16:25]) + 1
    return _format_id(now)


def _format_id(now: int) -> str:
    seconds, rest = divmod(now, 10**9)
    stamp = time.strftime("%Y%m%dt%H%M%S", time.gmtime(seconds))
    return f"{stamp}-{rest:09d}-{secrets.token_hex(3)}"


def _path(name: str, kind: str, id_: str) -> str:
    return f"workspaces/{check_workspace_name(name)}/{kind}/{id_}.json"


def _folder_key(folder: str) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]


def _checksum(values: dict[str, Any]) -> str:
    plain = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()
