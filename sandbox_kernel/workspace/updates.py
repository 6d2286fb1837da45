"""What has changed in a host folder since its baseline comes into the workspace.

Three trees are compared, as for an export, but the other way round: the folder as it is now, its
baseline, and the newest save. What only the host has changed is taken. What both have changed stays
as the sandbox has it, and is listed.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from sandbox_kernel.errors import WorkspaceError
from sandbox_kernel.guest.workspace.folders import Root
from sandbox_kernel.workspace.claims import claiming
from sandbox_kernel.workspace.exports import parts_of
from sandbox_kernel.workspace.imports import scan_folder
from sandbox_kernel.workspace.objects import add_tree
from sandbox_kernel.workspace.reports import Baseline, Limits, SaveInfo, UpdateReport, UploadPolicy
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, plain, same_contents, walk


@claiming
def update_from_folder(
    store: Store,
    name: str,
    folder: str | Path,
    policy: UploadPolicy,
    *,
    notebook: str = "",
    limits: Limits | None = None,
) -> UpdateReport:
    """Bring what has changed in a host folder since its last import or export into workspace
    ``name``, which has a save, as its next save. Blocks: call it in a thread.

    ``notebook``, a file in the folder, is always taken as the host has it.
    """
    path = os.path.realpath(folder)
    taken = time.time()
    latest, hints = store.begin(name)
    if latest is None:
        raise WorkspaceError(f"The workspace {name!r} has no save that could be updated.")
    store.check(latest)
    known = store.baseline(name, path)
    before = plain(walk(store.read, known.root)) if known.root else {}
    for apart in known.apart:
        before.pop(apart, None)
    found = scan_folder(store, path, policy, limits, before=before, taken=known.taken)
    work = _Update(
        dict(walk(store.read, bytes.fromhex(latest.root))),
        before,
        plain(walk(store.read, found.root)),
        set(known.made),
        os.path.relpath(os.path.realpath(notebook), path) if notebook else "",
    )
    root = Root(path)
    try:
        work.compare(root)
    finally:
        root.close()
    save = latest
    if work.taken or work.deleted:
        tree, packs = add_tree(store, work.merged)
        save = _publish(store, latest, tree, [*hints, *found.packs, *packs], notebook)
    if work.now != before or not known.root:
        tree, _ = add_tree(store, work.now)
        changed = {*work.taken, *work.agreed}
        made, replaced = (
            [p for p in paths if p not in changed] for paths in (known.made, known.replaced)
        )
        store.set_baseline(name, path, Baseline(tree, (), made, replaced, taken))
    return UpdateReport(save, work.taken, work.deleted, work.conflicts, found.problems)


def _publish(
    store: Store, latest: SaveInfo, tree: bytes, packs: list[str], notebook: str
) -> SaveInfo:
    made = SaveInfo(
        id="",
        workspace=latest.workspace,
        root=tree.hex(),
        created=0.0,
        kind="import",
        parent=latest.id,
        notebook=notebook or latest.notebook,
        packs=packs,
    )
    totals = store.check(made)
    return store.publish(replace(made, files=totals.files, bytes=totals.bytes))


@dataclass
class _Update:
    merged: dict[str, Entry]
    """The save, which becomes the next one; with hard links."""
    before: dict[str, Entry]
    host: dict[str, Entry]
    made: set[str]
    notebook: str
    now: dict[str, Entry] = field(default_factory=dict)
    """The next baseline."""
    taken: list[str] = field(default_factory=list)
    agreed: list[str] = field(default_factory=list)
    """What both have changed in the same way."""
    deleted: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    def compare(self, root: Root) -> None:
        ours = plain(self.merged.items())
        self.now = dict(self.before)
        for path, entry in self.host.items():
            if not same_contents(entry, self.before.get(path)):
                self._changed(path, entry, ours.get(path))
        for path, entry in self.before.items():
            if path not in self.host and path not in self.made and entry.kind != "d":
                self._missing(path, entry, ours.get(path), root)
        gone = {*self.taken, *self.deleted}
        for path, entry in list(self.merged.items()):
            if entry.kind == "h" and entry.target in gone:
                self.merged[path] = ours[path]  # it keeps its contents

    def _changed(self, path: str, entry: Entry, mine: Entry | None) -> None:
        was = self.before.get(path)
        if same_contents(entry, mine):
            self.now[path] = entry
            self.agreed.append(path)
        elif self._blocked(path) or (mine is not None and "d" in (mine.kind, entry.kind)):
            self.conflicts.append(path)
        elif mine is None or same_contents(mine, was) or path == self.notebook:
            self.merged[path] = self.now[path] = entry
            self.taken.append(path)
        else:
            self.conflicts.append(path)

    def _missing(self, path: str, was: Entry, mine: Entry | None, root: Root) -> None:
        """In the baseline, but not among what the policy lets through: it may be there still."""
        try:
            if root.status(parts_of(path)) is not None:
                return
        except (FileNotFoundError, NotADirectoryError):
            pass  # what was a folder is none now
        except OSError as error:
            if error.errno != errno.ELOOP:
                return  # a folder that cannot be looked into may have it still
        del self.now[path]
        if same_contents(mine, was):
            del self.merged[path]
            self.deleted.append(path)

    def _blocked(self, path: str) -> bool:
        """Whether something that is no folder is where one would have to be."""
        above = accumulate(path.split("/")[:-1], "{}/{}".format)
        return any(up in self.merged and self.merged[up].kind != "d" for up in above)
