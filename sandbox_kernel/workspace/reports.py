"""Values of saved workspaces: saves, quotas, policies, and the reports of each operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")
Hash = bytes


@dataclass(frozen=True)
class Quota:
    """Limits of one workspace. Holes count for an export, and for a save beyond a bound."""

    max_bytes: int = 20 * 2**30
    max_files: int = 500_000


@dataclass(frozen=True)
class Progress:
    """How far a transfer is. ``total`` is 0 while unknown."""

    phase: str
    """``scan``, ``receive``, ``send``, ``apply`` or ``write``."""
    files: int
    bytes: int
    total: int = 0


OnProgress = Callable[[Progress], object]
"""Called on the background loop, or in the caller's thread (import, export). Must not block."""


@dataclass(frozen=True)
class SaveInfo:
    """One save of a workspace, as the store keeps it."""

    id: str
    """Sorts by time."""
    workspace: str
    root: str
    """Hash of the root folder's tree."""
    created: float
    parent: str = ""
    """Id of the save before; empty for the first."""
    kind: str = "persist"
    """``persist``, ``import`` or ``restore``."""
    notebook: str = ""
    backend: str = ""
    sandbox: str = ""
    kernel: str = ""
    """Name of the kernelspec."""
    files: int = 0
    bytes: int = 0
    problems: Sequence[str] = ()
    """Files that were not saved, or not exactly: special files, unreadable or changing ones."""
    packs: Sequence[str] = ()
    """Packs that held its objects when it was made: a hint for readers."""
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def planned(cls, workspace: str, backend: str = "", sandbox: str = "", **more: Any) -> SaveInfo:
        """A save that ``Store.publish`` has yet to complete."""
        return cls("", workspace, "", 0.0, backend=backend, sandbox=sandbox, **more)

    @property
    def tree(self) -> Hash:
        """The root, as the functions of ``trees`` take it."""
        return bytes.fromhex(self.root)


@dataclass(frozen=True)
class FailedSave:
    """A save that failed."""

    id: str
    """Sorts among the ids of saves."""
    created: float
    backend: str
    sandbox: str
    message: str


@dataclass(frozen=True)
class SaveReport:
    """The result of ``persist`` and ``import_folder``."""

    save: SaveInfo
    new: bool
    """False if nothing had changed; ``save`` is then the previous one, with the problems of now."""
    moved_bytes: int
    """Bytes received over the wire."""
    new_bytes: int
    """Bytes that were new to the store."""
    seconds: float
    also: Sequence[str] = ()
    """Files that the mirror could not write to the host."""

    @property
    def problems(self) -> Sequence[str]:
        return [*self.save.problems, *self.also]

    def __str__(self) -> str:
        if not self.new:
            return f"{self.save.workspace}: nothing has changed since {self.save.id}"
        return (
            f"{self.save.workspace}: saved as {self.save.id}, {self.save.files} files, "
            f"{self.new_bytes} new bytes, {self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class HydrateReport:
    """The result of ``hydrate``. ``save`` is None if the workspace had no save."""

    save: SaveInfo | None
    files: int
    """Files written."""
    deleted: int
    moved_bytes: int
    seconds: float
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class Change:
    """One line of a diff: ``kind`` is ``added``, ``removed``, ``changed`` or ``meta``."""

    kind: str
    path: str
    size_before: int = 0
    size_after: int = 0


@dataclass(frozen=True)
class ExportReport:
    """The result of ``export``."""

    save: SaveInfo
    written: Sequence[str]
    deleted: Sequence[str]
    unchanged: int
    skipped: Sequence[str] = ()
    """Files that were left out, and why."""
    trash: str = ""
    """The folder with replaced and deleted files; empty if there are none."""


@dataclass(frozen=True)
class Baseline:
    """The state of a host folder at its last import or export."""

    root: bytes = b""
    """The tree; empty if there is no baseline."""
    apart: Sequence[str] = ()
    """Paths that the tree is wrong about (written by older versions)."""
    made: Sequence[str] = ()
    """Files that an export created: they are the sandbox's, not the host's."""
    replaced: Sequence[str] = ()
    """Files of the host that an export has overwritten."""
    taken: float = 0.0
    """When the folder was read or written."""


@dataclass(frozen=True)
class UpdateReport:
    """The result of ``update_from_folder``."""

    save: SaveInfo
    taken: Sequence[str] = ()
    """New and changed files of the host."""
    deleted: Sequence[str] = ()
    """Files deleted on the host."""
    conflicts: Sequence[str] = ()
    """Files changed on the host and in the sandbox; the workspace keeps the sandbox's."""
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class UploadPolicy:
    """Which files of a notebook's folder go into a new sandbox: none, all, or some globs."""

    mode: str = "none"
    """``none``, ``folder`` or ``globs``."""
    globs: Sequence[str] = ()
    """In gitignore's syntax, relative to the folder; only for ``globs``."""
    hidden: bool = False
    """For ``folder``: include names that begin with a dot, such as .git and .env. Without it only
    those that ``.sandboxignore`` includes (``!.streamlit/``)."""

    @classmethod
    def parse(cls, value: str | Sequence[str]) -> UploadPolicy:
        """``"none"``, ``"folder"``, or globs as a list or a comma-separated string."""
        if isinstance(value, str):
            if value in ("", "none"):
                return cls()
            if value == "folder":
                return cls("folder")
            value = [part.strip() for part in value.split(",")]
        globs = tuple(part for part in value if part)
        return cls("globs", globs) if globs else cls()


def parsed(kind: type[T], values: dict[str, Any]) -> T:
    """A dataclass from a stored file, which a later version may have written."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in values.items() if key in names})
