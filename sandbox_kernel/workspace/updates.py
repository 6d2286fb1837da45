"""Changes in a host folder since its baseline come into the workspace.

The reverse of an export, it compares three trees: the folder, its baseline and the newest save.
Files that only the host has changed are taken. Files that both have changed stay as the sandbox has
them, and are listed.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_kernel.errors import WorkspaceError
from sandbox_kernel.guest.workspace.nofollow import Root
from sandbox_kernel.workspace.imports import add_tree, publish_tree, scan_folder
from sandbox_kernel.workspace.reports import Baseline, SaveInfo, UpdateReport, UploadPolicy
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, is_blocked, plain, same_contents, walk


def update_from_folder(
    store: Store, name: str, folder: str | Path, policy: UploadPolicy, *, notebook: str
) -> UpdateReport:
    """Save the changes of a host folder since its last import or export in workspace ``name``,
    which must have a save. Blocks: call it in a thread.

    Of ``notebook``, a file in the folder, the host's version always wins.
    """
    with store.saving():
        path = os.path.realpath(folder)
        taken = time.time()
        latest, hints = store.begin(name)
        if latest is None:
            raise WorkspaceError(f"The workspace {name!r} has no save to update.")
        store.check(latest)
        known = store.baseline(name, path)
        before = store.baseline_files(known)
        found = scan_folder(store, path, policy, before=before, taken=known.taken)
        work = _Update(
            dict(walk(store.read, latest.tree)),
            before,
            plain(walk(store.read, found.root)),
            set(known.made),
            os.path.relpath(os.path.realpath(notebook), path) if notebook else "",
        )
        with closing(Root(path)) as root:
            work.compare(root)
        save = latest
        if work.taken or work.deleted:
            tree, packs = add_tree(store, work.merged)
            save = SaveInfo.planned(
                name, kind="import", parent=latest.id, notebook=notebook or latest.notebook
            )
            save = publish_tree(store, save, tree, [*hints, *found.packs, *packs])
        if work.now != before or not known.root:
            tree, _ = add_tree(store, work.now)
            changed = {*work.taken, *work.agreed}
            made, replaced = (
                [p for p in paths if p not in changed] for paths in (known.made, known.replaced)
            )
            store.set_baseline(name, path, Baseline(tree, (), made, replaced, taken))
        return UpdateReport(save, work.taken, work.deleted, work.conflicts, found.problems)


@dataclass
class _Update:
    merged: dict[str, Entry]
    """The newest save, which becomes the next one; with hard links."""
    before: dict[str, Entry]
    host: dict[str, Entry]
    made: set[str]
    notebook: str
    now: dict[str, Entry] = field(default_factory=dict)
    """The next baseline."""
    taken: list[str] = field(default_factory=list)
    agreed: list[str] = field(default_factory=list)
    """Files that both have changed in the same way."""
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
                self.merged[path] = ours[path]  # keep its contents

    def _changed(self, path: str, entry: Entry, mine: Entry | None) -> None:
        was = self.before.get(path)
        if same_contents(entry, mine):
            self.now[path] = entry
            self.agreed.append(path)
        elif is_blocked(self.merged, path) or (mine is not None and "d" in (mine.kind, entry.kind)):
            self.conflicts.append(path)
        elif mine is None or same_contents(mine, was) or path == self.notebook:
            self.merged[path] = self.now[path] = entry
            self.taken.append(path)
        else:
            self.conflicts.append(path)

    def _missing(self, path: str, was: Entry, mine: Entry | None, root: Root) -> None:
        """A file of the baseline that the policy did not select: it may still be there."""
        try:
            if root.status(path) is not None:
                return
        except (FileNotFoundError, NotADirectoryError):
            pass  # its folder is gone
        except OSError as error:
            if error.errno != errno.ELOOP:
                return  # an unreadable folder may still have it
        del self.now[path]
        if same_contents(mine, was):
            del self.merged[path]
            self.deleted.append(path)
