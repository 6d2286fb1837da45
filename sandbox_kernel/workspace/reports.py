"""What is told about saves, transfers and exports, and what may be asked of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

DEFAULT_MAX_BYTES = 20 * 2**30
DEFAULT_MAX_FILES = 500_000


@dataclass(frozen=True)
class Limits:
    """Quotas of one workspace. Holes of sparse files do not count, up to a bound (``trees``); for
    an export they do."""

    max_bytes: int = DEFAULT_MAX_BYTES
    max_files: int = DEFAULT_MAX_FILES


@dataclass(frozen=True)
class Progress:
    """How far a transfer is. ``total`` is 0 while it is not known."""

    phase: str
    """``scan``, ``receive``, ``send``, ``apply`` or ``write``."""
    files: int
    bytes: int
    total: int = 0


OnProgress = Callable[[Progress], object]
"""Called now and then while a transfer runs, on the background loop (by ``import_folder`` and
``export``: by the caller's thread). It must not block."""


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
    """Id of the save that this one followed; empty for the first."""
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
    """What could not be saved as it was: special files, permissions, files that kept changing."""
    packs: Sequence[str] = ()
    """Packs that hold its objects: a hint for readers."""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FailedSave:
    """A save that could not be made."""

    id: str
    """As it would have been: it sorts among the ids of saves."""
    created: float
    backend: str
    sandbox: str
    message: str


@dataclass(frozen=True)
class SaveReport:
    """What ``persist`` and ``import_folder`` did."""

    save: SaveInfo
    new: bool
    """False if nothing had changed: ``save`` is then the one that was there before."""
    moved_bytes: int
    """Bytes that came through the wire."""
    new_bytes: int
    """Bytes of file contents that the store did not have."""
    seconds: float
    also: Sequence[str] = ()
    """What the save itself does not know: what of it could not be written to the host."""

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
    """What ``hydrate`` did. ``save`` is None if the workspace had no save."""

    save: SaveInfo | None
    files: int
    """Files that were written."""
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
    """What ``export`` wrote."""

    save: SaveInfo
    written: Sequence[str]
    deleted: Sequence[str]
    unchanged: int
    skipped: Sequence[str] = ()
    """What has no place on the host as it is, and why."""
    trash: str = ""
    """The folder in which what was replaced or deleted is kept; empty if there was nothing."""


@dataclass(frozen=True)
class Baseline:
    """What a host folder had at its last import or export, as the store keeps it."""

    root: bytes = b""
    """The tree; empty if there was no import or export."""
    apart: Sequence[str] = ()
    """Paths for which that is not so (of older versions)."""
    made: Sequence[str] = ()
    """Files that an export made where none was: the sandbox's, not the host's."""
    replaced: Sequence[str] = ()
    """Files of the host that an export has written over since."""
    taken: float = 0.0
    """When the folder was read or written."""


@dataclass(frozen=True)
class UpdateReport:
    """What ``update_from_folder`` brought into a workspace."""

    save: SaveInfo
    taken: Sequence[str] = ()
    """New and changed files of the host."""
    deleted: Sequence[str] = ()
    """What was deleted on the host."""
    conflicts: Sequence[str] = ()
    """What was changed on the host and in the sandbox: the workspace keeps the sandbox's."""
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class UploadPolicy:
    """What of a notebook's folder goes into a new sandbox: nothing, all, or some globs."""

    mode: str = "none"
    """``none``, ``folder`` or ``globs``."""
    globs: Sequence[str] = ()
    """In gitignore's syntax, relative to the folder; only for ``globs``."""
    hidden: bool = False
    """For ``folder``: also names that begin with a dot, such as .git and .env. Else only those
    that ``.sandboxignore`` asks for (``!.streamlit/``)."""

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
