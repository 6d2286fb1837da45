"""A workspace as a tar archive whose members are relative to it, and what one may contain.

The sandbox packs and unpacks (``PACK``, ``UNPACK``, for its Python); the host decides. ``portable``
rewrites an archive that comes out of a sandbox before anybody gets it, and ``check`` judges one
before a byte of it reaches a sandbox. Members are folders, regular files and symlinks that stay
inside; a file with several names is packed once for each.
"""

from __future__ import annotations

import copy
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import IO

from sandbox_kernel.errors import QuotaExceeded, WorkspaceRefused
from sandbox_kernel.untrusted_text import printable

MAX_BYTES = 8 * 2**30
"""Of an archive, and of what is in it."""
MAX_MEMBERS = 1_000_000
_MAX_NAME = 4096
_MAX_HEADER = 2**20
_MAX_HOPS = 40
"""Symlinks that are followed for one path; Linux gives up after as many."""

PACK = """
import json, sys, tarfile
root, skipped = sys.argv[1], [tuple(one.split("/")) for one in json.loads(sys.argv[2])]
archive = tarfile.open(fileobj=sys.stdout.buffer, mode="w|")
def keep(member):
    archive.inodes.clear()
    parts = tuple(part for part in member.name.split("/") if part not in ("", "."))
    if any(parts[:len(one)] == one for one in skipped):
        return None
    return member if member.isreg() or member.isdir() or member.issym() else None
archive.add(root, arcname=".", filter=keep)
archive.close()
"""
"""Packs the folder that is its first argument to stdout, without the relative paths that its second
argument lists as JSON, and without what is no file, folder or symlink."""

UNPACK = """
import os, shutil, stat, sys, tarfile
root, links = os.path.realpath(sys.argv[1]), []
os.makedirs(root, exist_ok=True)
def place(name):
    path = os.path.normpath(os.path.join(root, name))
    if path != root and os.path.realpath(os.path.dirname(path)) != os.path.dirname(path):
        sys.exit("%s: a symlink is on the way" % name)
    return path
def free(path):
    if os.path.lexists(path):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
    for member in archive:
        path = place(member.name)
        if member.isdir():
            if path != root and not stat.S_ISDIR(getattr(os.lstat(path), "st_mode", 0)
                                                 if os.path.lexists(path) else 0):
                free(path)
                os.mkdir(path)
        elif member.isreg():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            free(path)
            with open(path, "xb") as file:
                shutil.copyfileobj(archive.extractfile(member), file, 2 ** 18)
            mode = member.mode & 0o755 | 0o600
            os.chmod(path, mode if member.mode & 0o100 else mode & ~0o111)
        elif member.issym():
            links.append((path, member.name, member.linkname))
for path, name, target in links:
    os.makedirs(os.path.dirname(place(name)), exist_ok=True)
    free(path)
    os.symlink(target, path)
"""
"""Unpacks a checked archive from stdin into the folder that is its first argument. What is there
under the same names is replaced."""


class _Header(tarfile.TarInfo):
    """A header of a member; the module ``tarfile`` reads the longer ones into memory, whole."""

    def _proc_gnulong(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        return self._bounded(archive, super()._proc_gnulong)  # type: ignore[misc]

    def _proc_pax(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        return self._bounded(archive, super()._proc_pax)  # type: ignore[misc]

    def _bounded(
        self, archive: tarfile.TarFile, read: Callable[[tarfile.TarFile], tarfile.TarInfo]
    ) -> tarfile.TarInfo:
        if self.size > _MAX_HEADER:
            raise tarfile.ReadError("a header is too large")
        return read(archive)


def check(archive: IO[bytes]) -> None:
    """WorkspaceRefused if an archive, possibly compressed, has anything but folders, files and
    symlinks that lie and lead inside; QuotaExceeded if it is too large."""
    _check_links(_members(archive, "r:*"))


def portable(archive: IO[bytes], target: IO[bytes], root: str) -> None:
    """Rewrite what a sandbox has packed (a plain tar), judged as by ``check`` but for where
    symlinks lead. Absolute ones into the workspace at ``root`` become relative, if that is
    certain to be the same: through folders and relative links of the archive only."""
    with tarfile.open(fileobj=target, mode="w") as out:
        packed: dict[str, tarfile.TarInfo] = {}
        links = []
        for member, data in _with_data(archive):
            packed[_key(member.name)] = member
            if member.issym():
                links.append(member)
                continue
            out.addfile(_bare(member), data)
        for member in links:
            written = _bare(member)
            relative = _relative_target(member, root)
            if relative is not None and _leads_to_packed(member.name, relative, packed):
                written.linkname = relative
            out.addfile(written)


def plain(archive: IO[bytes], target: IO[bytes]) -> None:
    """A checked archive without compression and without what is not needed of its headers."""
    with tarfile.open(fileobj=target, mode="w") as out:
        for member, data in _with_data(archive, mode="r:*"):
            out.addfile(_bare(member), data)


def _with_data(
    archive: IO[bytes], *, mode: str = "r:"
) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    try:
        with tarfile.open(fileobj=archive, mode=mode, tarinfo=_Header) as source:  # type: ignore[call-overload]
            for member in _judged(source):
                yield member, source.extractfile(member) if member.isreg() else None
    except (tarfile.TarError, EOFError) as error:
        raise WorkspaceRefused(f"The archive is damaged: {printable(str(error))}.") from error


def _members(archive: IO[bytes], mode: str) -> dict[str, tarfile.TarInfo]:
    return {_key(member.name): member for member, _ in _with_data(archive, mode=mode)}


def _judged(source: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    seen: dict[str, bool] = {}
    total = 0
    for member in source:
        key = _key(member.name)
        _check_member(member)
        if seen.get(key) is not None and not (seen[key] and member.isdir()):
            raise _refused(member, "two members have that name")
        seen[key] = member.isdir()
        total += member.size if member.isreg() else 0
        if len(seen) > MAX_MEMBERS or total > MAX_BYTES:
            raise QuotaExceeded(
                f"The archive has more than {MAX_MEMBERS} members or {MAX_BYTES} bytes; nothing "
                f"was unpacked."
            )
        yield member


def _check_member(member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute():
        raise _refused(member, "its path is absolute")
    if ".." in path.parts:
        raise _refused(member, "its path has '..'")
    if len(member.name) > _MAX_NAME or "\0" in member.name or "\\" in member.name:
        raise _refused(member, "no such name can be kept")
    if member.islnk():
        raise _refused(member, "it is a hard link")
    if member.issym():
        if not member.linkname or len(member.linkname) > _MAX_NAME or "\0" in member.linkname:
            raise _refused(member, "its target is no path")
    elif not (member.isdir() or member.isreg()) or member.issparse():
        raise _refused(member, "it is no plain file, folder or symlink")
    if not path.parts and not member.isdir():
        raise _refused(member, "the workspace itself is a folder")


def _check_links(members: Mapping[str, tarfile.TarInfo]) -> None:
    for key, member in members.items():
        if member.issym() and _resolved(member.name, member.linkname, members) is None:
            raise _refused(member, f"it leads outside, to {printable(member.linkname)[:200]!r}")
        parents = [str(one) for one in PurePosixPath(key).parents][:-1]
        for parent in parents:
            if parent in members and not members[parent].isdir():
                raise _refused(member, f"{printable(parent)!r} above it is no folder")


def _resolved(
    name: str, target: str, members: Mapping[str, tarfile.TarInfo], *, packed_only: bool = False
) -> tuple[str, ...] | None:
    """Where a symlink leads, inside the workspace, through the archive's own links as the kernel
    follows them; None if that is outside, or not known to be inside. With ``packed_only``, what
    the archive does not have is not known: at its place there may be anything later."""
    if target.startswith("/"):
        return None
    pending = [*reversed(PurePosixPath(name).parent.parts + PurePosixPath(target).parts)]
    found: list[str] = []
    hops = 0
    while pending:
        part = pending.pop()
        if part == "..":
            if not found:
                return None
            found.pop()
            continue
        member = members.get("/".join([*found, part]))
        if member is not None and member.issym():
            hops += 1
            if hops > _MAX_HOPS or member.linkname.startswith("/"):
                return None
            pending.extend(reversed(PurePosixPath(member.linkname).parts))
            continue
        if packed_only and (member is None or (pending and not member.isdir())):
            return None
        found.append(part)
    return tuple(found)


def _leads_to_packed(name: str, target: str, packed: Mapping[str, tarfile.TarInfo]) -> bool:
    return _resolved(name, target, packed, packed_only=True) is not None


def _relative_target(member: tarfile.TarInfo, root: str) -> str | None:
    """An absolute target into the workspace, from the link's own folder; its parts stay as they
    are, since ``..`` after a link means where that leads."""
    target, prefix = "/" + member.linkname.lstrip("/"), root.rstrip("/")
    if not member.linkname.startswith("/") or not (target + "/").startswith(prefix + "/"):
        return None
    inside = target[len(prefix) :].lstrip("/")
    climb = "/".join([".."] * len(PurePosixPath(member.name).parent.parts))
    return "/".join(part for part in (climb, inside) if part) or "."


def _bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Its header without owners of the sandbox and without anything that could override it."""
    bare = copy.copy(member)
    bare.pax_headers = {}
    bare.uid = bare.gid = 0
    bare.uname = bare.gname = ""
    bare.mode = member.mode & 0o777
    bare.type = member.type if not member.isreg() else tarfile.REGTYPE
    return bare


def _key(name: str) -> str:
    return PurePosixPath(name).as_posix()


def _refused(member: tarfile.TarInfo, why: str) -> WorkspaceRefused:
    return WorkspaceRefused(
        f"The archive has a member {printable(member.name)[:200]!r} that is refused: {why}. "
        f"Nothing was unpacked."
    )
