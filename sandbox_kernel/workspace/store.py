"""The store: workspaces and their saves."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox_kernel.workspace.reports import Change, SaveInfo


class Store:
    """Workspaces by name, each with its saves. Make one with ``Store.open``. Thread-safe; all calls
    block (S3 may take long), so a loop calls them in a thread."""

    @classmethod
    def open(cls, url: str = "") -> Store:
        """The store at a URL that fsspec knows (``s3://bucket/folder``) or in a local folder; by
        default ``$SANDBOX_KERNEL_STORE``, else ``<data dir>/store``. Made if it is not there."""
        raise NotImplementedError

    def names(self, *, retired: bool = False) -> Sequence[str]:
        """Names of workspaces with a save, sorted. Retired ones only if asked for."""
        raise NotImplementedError

    def saves(self, name: str) -> Sequence[SaveInfo]:
        """All saves of a workspace, oldest first; empty if there is none."""
        raise NotImplementedError

    def latest(self, name: str) -> SaveInfo | None:
        """The newest save, or None."""
        raise NotImplementedError

    def find(self, name: str, at: str = "") -> SaveInfo:
        """The newest save, or the one whose id is or begins with ``at``. WorkspaceNotFound."""
        raise NotImplementedError

    def diff(self, before: SaveInfo | None, after: SaveInfo) -> Sequence[Change]:
        """What changed from one save to another (None: from nothing), by path."""
        raise NotImplementedError

    def restore(self, name: str, at: str) -> SaveInfo:
        """Make an earlier save's files the newest save. Nothing of the history is lost."""
        raise NotImplementedError

    def rename(self, name: str, new: str, notebook: str = "") -> bool:
        """Give a workspace another name (a notebook was moved). False if it has no saves.
        WorkspaceExists if ``new`` has saves and is not retired. Safe to repeat."""
        raise NotImplementedError

    def copy(self, name: str, new: str, notebook: str = "") -> bool:
        """A second workspace that begins with the newest save of the first. False if it has none."""
        raise NotImplementedError

    def retire(self, name: str) -> bool:
        """The notebook was deleted: hide the workspace, and let ``gc`` delete it after its grace
        time. False if there is none."""
        raise NotImplementedError

    def revive(self, name: str) -> bool:
        """Undo ``retire``. False if it was not retired."""
        raise NotImplementedError

    def remove(self, name: str) -> bool:
        """Delete a workspace's saves now; ``gc`` frees what only they used. False if none."""
        raise NotImplementedError
