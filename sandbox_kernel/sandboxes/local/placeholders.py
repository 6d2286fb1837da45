"""Names that do not exist yet in a folder which a jail may write: an empty placeholder is covered
instead, or code in the jail could make them. ``LocalClient`` makes and removes them."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from sandbox_kernel.errors import SpecError

GUARDED_FOLDERS = (".git", ".vscode", ".idea", ".husky", ".github", ".devcontainer")
GUARDED_FILES = (".env", ".envrc", ".pre-commit-config.yaml", ".sandboxignore")
"""Names in the top folder that programs of the host obey unasked."""

Placeholder = tuple[str, int, int]
"""Its path, device and inode; or twice 0 while it is being made."""


def missing_in(real: str) -> list[Placeholder]:
    """Those that have to be made."""
    paths = [os.path.join(real, name) for name in (*GUARDED_FOLDERS, *GUARDED_FILES)]
    return [(path, 0, 0) for path in paths if not os.path.lexists(path)]


def make_placeholders(wanted: Sequence[Placeholder]) -> list[Placeholder]:
    """Make them; those that nobody else has made meanwhile."""
    made: list[Placeholder] = []
    for path, *_ in wanted:
        try:
            if os.path.basename(path) in GUARDED_FOLDERS:
                os.mkdir(path, 0o700)
            else:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                os.close(os.open(path, flags, 0o600))
        except FileExistsError:
            continue
        except OSError as error:
            remove_placeholders(made)
            raise SpecError(
                f"The folder {os.path.dirname(path)} cannot be shown writable: {error}. Choose "
                f"files=mount-ro."
            ) from error
        found = os.lstat(path)
        made.append((path, found.st_dev, found.st_ino))
    return made


def remove_placeholders(made: Sequence[Placeholder]) -> None:
    """Remove those that are still as they were made: empty."""
    for path, device, inode in made:
        try:
            found = os.lstat(path)
            if inode and (found.st_dev, found.st_ino) != (device, inode):
                continue  # somebody has put something else in its place
            if stat.S_ISDIR(found.st_mode):
                os.rmdir(path)
            elif stat.S_ISREG(found.st_mode) and found.st_size == 0:
                os.unlink(path)
        except OSError:
            continue  # it is used, or gone
