"""A host folder that a jail sees live as its workspace, and what in it the jail must not see.

``Launch`` asks for the mounts when it starts a jail, and has them checked before anything runs in
it. What ``folder_contents`` finds is covered by mounts of their own, which code in the jail can
neither open, rename nor delete. docs/files.md says what covers cannot do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_kernel.errors import SpecError
from sandbox_kernel.guest.workspace.ignore_file import IGNORE_FILE
from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.sandboxes.local.folder_contents import Contents, Identity, look_through
from sandbox_kernel.sandboxes.local.hidden_paths import (
    check_not_private,
    contains,
    is_environment,
)
from sandbox_kernel.sandboxes.local.mounts import Bind
from sandbox_kernel.sandboxes.local.placeholders import GUARDED_FILES, GUARDED_FOLDERS
from sandbox_kernel.spec import SandboxSpec

MOST_COVERS = 1000
_MOST_BYTES = 500_000
"""Of their paths: they are on bubblewrap's command line."""
_NO_FILE = "/dev/null"
"""On a mount without devices it cannot be opened."""


def check_folder(spec: SandboxSpec) -> str:
    """The real path of a spec's folder, if it may be shown. SpecError."""
    assert spec.folder is not None
    real = os.path.realpath(spec.folder)
    refused = f"Sandbox {spec.name!r} was not created: the folder {spec.folder}"
    if not os.path.isdir(real):
        raise SpecError(f"{refused} does not exist.")
    for own in (data_dir(), runtime_dir()):
        if contains(os.path.realpath(own), real):
            raise SpecError(f"{refused} is part of sandbox-kernel's own files.")
    check_not_private(real, refused)
    if spec.folder_writable:
        _check_writable(real, refused)
    return real


def _check_writable(real: str, refused: str) -> None:
    """No process of the host may run what the sandbox can write."""
    instead = "Choose files=mount-ro or files=copy"
    if is_environment(real):
        raise SpecError(
            f"{refused} is a Python environment, whose programs run on the host. {instead}."
        )
    for name in (*GUARDED_FOLDERS, *GUARDED_FILES):
        if os.path.islink(os.path.join(real, name)):
            # Nothing can be mounted over a link itself.
            raise SpecError(
                f"{refused} cannot be shown writable: {name} in it is a symbolic link, so the "
                f"sandbox's code could put its own in its place, and programs on this machine obey "
                f"that. {instead}."
            )
    for place in map(os.path.realpath, sys.path):
        if contains(real, place) and not _is_hidden(os.path.relpath(place, real)):
            raise SpecError(
                f"{refused} cannot be shown writable: this Python process imports modules from "
                f"{place}, so the sandbox's code could get out through them. {instead}, or start "
                f"the process with PYTHONSAFEPATH=1."
            )


def _is_hidden(path: str) -> bool:
    return path != "." and any(part.startswith(".") for part in path.split("/"))


@dataclass(frozen=True)
class SharedFolder:
    """The mounts that show a folder, and what they must have led to."""

    source: str
    target: str
    mounts: Sequence[Bind]
    contents: Contents
    empty: Path

    def check(self, jail: str) -> None:
        """Look through the root folder of a jail in which nothing runs yet: each mount shows what
        was meant, and each cover is where it belongs. While bubblewrap made them, another sandbox
        may have put links and other folders in their places. SpecError."""
        hides = {_identity(str(self.empty)), _identity(_NO_FILE)}
        for mount in self.mounts:
            path = os.path.relpath(mount.target, self.target)
            folder, name = os.path.split("" if path == "." else path)
            covers = mount.source in (str(self.empty), _NO_FILE)
            try:
                fd = os.open(f"{jail}{self.target}/{folder}", os.O_PATH | os.O_DIRECTORY)
                try:
                    above, found = (
                        os.fstat(fd),
                        os.stat(name or ".", dir_fd=fd, follow_symlinks=False),
                    )
                finally:
                    os.close(fd)
            except OSError as error:
                raise self._moved(path) from error
            known = self.contents.folders
            right = hides if covers else {known["" if path == "." else path]}
            if (above.st_dev, above.st_ino) != known[folder] or _of(found) not in right:
                raise self._moved(path)

    def _moved(self, path: str) -> SpecError:
        return SpecError(
            f"The folder {self.source} was changed while a sandbox was started that was to be "
            f"shown it ({path}). Try again."
        )


def share(spec: SandboxSpec, target: str, empty: Path, *, contested: bool) -> SharedFolder:
    """Show a spec's folder at ``target``. Changes nothing. ``contested``: another sandbox may write
    there. SpecError if there is too much to cover."""
    real = check_folder(spec)
    contents = look_through(real, contested=contested)
    mounts = [Bind(real, target, writable=spec.folder_writable)]
    for path, is_folder in contents.covered:
        mounts.append(Bind(str(empty) if is_folder else _NO_FILE, os.path.join(target, path)))
    if spec.folder_writable:
        # A mount point can be neither renamed nor replaced, by code in the jail.
        fixed = contents.fixed.difference(contents.environments)
        mounts += [Bind(f"{real}/{p}", f"{target}/{p}", writable=True) for p in sorted(fixed)]
        # Visible, but programs of the host run what is in them.
        mounts += [Bind(f"{real}/{p}", f"{target}/{p}") for p in contents.environments]
    if len(mounts) > MOST_COVERS or _length(mounts) > _MOST_BYTES:
        raise SpecError(
            f"Sandbox {spec.name!r} was not created: more than {MOST_COVERS} files of "
            f"{spec.folder} would have to be covered, such as {contents.covered[-1][0]}. Name a "
            f"folder that holds many of them in {IGNORE_FILE}: it is covered as one."
        )
    return SharedFolder(real, target, mounts, contents, empty)


def _length(mounts: Iterable[Bind]) -> int:
    return sum(len(os.fsencode(mount.source + mount.target)) for mount in mounts)


def _identity(path: str) -> Identity:
    return _of(os.stat(path, follow_symlinks=False))


def _of(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino
