"""The host folders of one local sandbox, and their removal.

<data dir>/sandboxes/<name>/    disk/home/, disk/workspace/, etc/, empty/, log, state, ended;
                                disk.img, if the jail has a file system of its own: then it is
                                mounted over disk/, for the jail alone
<data dir>/workspaces/<name>/   a named workspace, which outlives its sandboxes
<runtime dir>/<id>/             init.sock, through which only the host reaches jailinit
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_kernel.paths import data_dir, private_dir, runtime_dir
from sandbox_kernel.sandboxes.untrusted_files import remove_tree
from sandbox_kernel.spec import SandboxSpec


@dataclass(frozen=True)
class JailFolders:
    """Where one sandbox keeps what."""

    base: Path
    workspace: Path
    runtime: Path

    @classmethod
    def of(cls, spec: SandboxSpec, sandbox_id: str) -> JailFolders:
        base = data_dir() / "sandboxes" / spec.name
        workspace = base / "disk" / "workspace"
        if spec.volume is not None:
            workspace = data_dir() / "workspaces" / spec.volume
        return cls(base, workspace, runtime_dir() / sandbox_id)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> JailFolders:
        return cls(*(Path(values[name]) for name in ("base", "workspace", "runtime")))

    def to_json(self) -> dict[str, Any]:
        return {name: str(folder) for name, folder in vars(self).items()}

    disk = property(lambda self: self.base / "disk")
    image = property(lambda self: self.base / "disk.img")
    home = property(lambda self: self.disk / "home")
    etc = property(lambda self: self.base / "etc")
    trust = property(lambda self: self.base / "trust")
    empty = property(lambda self: self.base / "empty")
    log = property(lambda self: self.base / "log")
    state = property(lambda self: self.base / "state")
    ended = property(lambda self: self.base / "ended")

    def make(self) -> None:
        """Make them all. What an earlier sandbox of this name left behind is deleted first."""
        remove_tree(self.base)
        for folder in (
            *(self.base.parent, self.base, self.disk, self.home, self.etc, self.empty),
            *(self.workspace.parent, self.workspace, self.runtime),
        ):
            private_dir(folder)

    def remove(self) -> None:
        """Delete all but a named workspace. No error if they are gone."""
        remove_tree(self.base)
        remove_tree(self.runtime)
