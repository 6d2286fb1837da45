"""A host folder that a jail sees live as its workspace, and what in it the jail must not see.

``Launch`` asks for the mounts when it starts a jail. Hidden names, keys and what ``.sandboxignore``
names are covered by mounts of their own, which code in the jail can neither open, rename nor
delete. A folder counts as one cover, whatever is in it. Links are left: they lead to what the jail
sees anyway, or nowhere. docs/security.md says what covers cannot do.
"""

from __future__ import annotations

import fnmatch
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox_kernel.errors import SpecError
from sandbox_kernel.guest.workspace.ignore_file import IGNORE_FILE, IgnoreRefused, read_ignore
from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.private_names import HIDDEN, KEYS
from sandbox_kernel.sandboxes.local.hidden_paths import contains, exposes, is_environment
from sandbox_kernel.sandboxes.local.mounts import Bind, Mount
from sandbox_kernel.spec import SandboxSpec

MOST_COVERS = 1000
MOST_ENTRIES = 500_000
_NO_FILE = "/dev/null"
"""On a mount without devices it cannot be opened."""

Ignored = Callable[[str], bool]
"""Whether a path relative to the folder is covered; a folder's ends with a slash."""


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
    reason = exposes(real)
    if reason:
        raise SpecError(
            f"{refused} cannot be shown: it is, or holds, {reason}. Move the notebook to a folder "
            f"of its own, or set files=none."
        )
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
    for place in map(os.path.realpath, sys.path):
        if contains(real, place) and not _is_hidden(os.path.relpath(place, real)):
            raise SpecError(
                f"{refused} cannot be shown writable: this Python process imports modules from "
                f"{place}, so the sandbox's code could get out through them. {instead}, or start "
                f"the process with PYTHONSAFEPATH=1."
            )


def _is_hidden(path: str) -> bool:
    return path != "." and any(part.startswith(".") for part in path.split("/"))


def folder_mounts(spec: SandboxSpec, target: str, empty: Path) -> list[Mount]:
    """The mounts that show a spec's folder at ``target``. Changes nothing. SpecError if there is
    too much to cover."""
    real = check_folder(spec)
    found: list[Mount] = [Bind(real, target, writable=spec.folder_writable)]
    for path, is_folder in _covered(real):
        source = str(empty) if is_folder else _NO_FILE
        found.append(Bind(source, os.path.join(target, path)))
        if len(found) > MOST_COVERS:
            raise SpecError(
                f"Sandbox {spec.name!r} was not created: more than {MOST_COVERS} files of "
                f"{spec.folder} would have to be covered, such as {path}. Name a folder that "
                f"holds many of them in {IGNORE_FILE}: it is covered as one."
            )
    if spec.folder_writable:
        # Visible, but programs of the host run what is in them.
        environments = (path for path in _environments(real) if not _is_hidden(path))
        found += [Bind(os.path.join(real, p), os.path.join(target, p)) for p in environments]
    return found


def _covered(top: str) -> Iterator[tuple[str, bool]]:
    """What is covered in a folder, by relative path, and whether it is a folder."""
    ignored = _rules(top)
    for path, is_folder in _walk(top, lambda path: not ignored(f"{path}/")):
        if ignored(f"{path}/" if is_folder else path):
            yield path, is_folder


def _environments(top: str) -> Iterator[str]:
    def is_plain(path: str) -> bool:
        return not is_environment(os.path.join(top, path))

    for path, is_folder in _walk(top, is_plain):
        if is_folder and not is_plain(path):
            yield path


def _walk(top: str, enters: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """All files and folders but links, by relative path; below folders only if ``enters`` says."""
    waiting, left = [""], MOST_ENTRIES
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(os.path.join(top, folder)), key=lambda entry: entry.name)
        except OSError:
            continue  # what this user cannot list, the jail cannot either
        left -= len(entries)
        if left < 0:
            raise SpecError(
                f"{top} has more than {MOST_ENTRIES} files, too many to look for what must be "
                f"covered. Name folders that the notebook does not need in {IGNORE_FILE}."
            )
        for entry in entries:
            path = os.path.join(folder, entry.name)
            if entry.is_symlink():
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            yield path, is_folder
            if is_folder and enters(path):
                waiting.append(path)


def _rules(top: str) -> Ignored:
    from pathspec import GitIgnoreSpec  # lazy: start-up time

    try:
        lines = read_ignore(top).decode(errors="surrogateescape").splitlines()
        named = GitIgnoreSpec.from_lines(lines)
    except IgnoreRefused as error:
        raise SpecError(str(error)) from error
    except ValueError as error:
        raise SpecError(f"{IGNORE_FILE} in {top} has an invalid pattern: {error}") from error
    own = {
        os.path.relpath(real, top)
        for real in map(os.path.realpath, (data_dir(), runtime_dir()))
        if contains(top, real)
    }

    def ignored(path: str) -> bool:
        plain = path.rstrip("/")
        name = os.path.basename(plain)
        return (
            name.startswith(HIDDEN[0])
            or any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in KEYS)
            or plain in own
            or named.match_file(path)
        )

    return ignored


# --- names that do not exist yet

GUARDED_FOLDERS = (".git", ".vscode", ".idea", ".husky", ".github", ".devcontainer")
GUARDED_FILES = (".env", ".envrc", ".pre-commit-config.yaml")
"""Names in the top folder that programs of the host obey unasked. Where they are missing, an empty
placeholder is covered instead, or code in the jail could make them."""

Placeholder = tuple[str, int, int]
"""Its path, device and inode."""


def make_placeholders(real: str) -> list[Placeholder]:
    """Make the missing ones. For a folder that is shown writable."""
    made: list[Placeholder] = []
    for name in (*GUARDED_FOLDERS, *GUARDED_FILES):
        path = os.path.join(real, name)
        try:
            if name in GUARDED_FOLDERS:
                os.mkdir(path, 0o700)
            else:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                os.close(os.open(path, flags, 0o600))
        except FileExistsError:
            continue
        except OSError as error:
            remove_placeholders(made)
            raise SpecError(
                f"The folder {real} cannot be shown writable: {error}. Choose files=mount-ro."
            ) from error
        found = os.lstat(path)
        made.append((path, found.st_dev, found.st_ino))
    return made


def remove_placeholders(made: list[Placeholder]) -> None:
    """Remove those that are still as they were made: empty."""
    for path, device, inode in made:
        try:
            found = os.lstat(path)
            if (found.st_dev, found.st_ino) != (device, inode):
                continue  # somebody has put something else in its place
            if stat.S_ISDIR(found.st_mode):
                os.rmdir(path)
            elif found.st_size == 0:
                os.unlink(path)
        except OSError:
            continue  # it is used, or gone
