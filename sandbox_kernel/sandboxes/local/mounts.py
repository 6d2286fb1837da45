"""Mounts of a jail: what it sees of the host, and in which order bubblewrap must make them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from sandbox_kernel.errors import SpecError

_MAX_LINKS = 40


@dataclass(frozen=True)
class Bind:
    """A file or folder of the host's that the jail sees at ``target``, read-only by default."""

    source: str
    target: str
    writable: bool = False


@dataclass(frozen=True)
class Symlink:
    """A symbolic link that the jail has at ``target``, with the text ``source``."""

    source: str
    target: str


@dataclass(frozen=True)
class Cover:
    """Hides what is at ``target``: an empty folder, for other mounts to lie in, or a closed
    file."""

    target: str
    is_file: bool = False


Mount = Bind | Symlink | Cover

_OWN_PLACES = ("/", "/tmp", "/run", "/var")  # noqa: S108
_OWN_LINKS = (Symlink("../tmp", "/var/tmp"), Symlink("../run", "/var/run"))  # noqa: S108


def mounts_in_order(binds: Iterable[Mount]) -> list[Mount]:
    """Parents before what lies in them, each target once and without links on the way to it; with
    the links that every jail has.

    bwrap makes the mount points itself, but earlier versions would follow a link that the jail
    has in the host's root, not in the jail's, and later ones refuse it; so targets are resolved
    here. Links go first, so that a folder which is shown can have them already; but those below a
    cover lie on top of that.
    """
    binds = [*_OWN_LINKS, *binds]
    made = {m.target: m.source for m in binds if isinstance(m, Symlink)}
    shown = {m.target: m.source for m in binds if isinstance(m, Bind)}
    shown.update((m.target, "") for m in binds if isinstance(m, Cover))
    read = functools.partial(_link_inside, made, shown)
    mounts: dict[str, Mount] = {}
    for mount in binds:
        if not mount.target.startswith("/"):
            raise SpecError(
                f"The jail shows files at absolute paths only, not at {mount.target!r}."
            )
        if isinstance(mount, Symlink):
            parent, name = os.path.split(mount.target)
            target = os.path.join(follow_links(parent, read)[1], name)
        else:
            target = follow_links(mount.target, read)[1]
        if target in _OWN_PLACES or target.split("/")[1] in ("proc", "dev"):
            raise SpecError(
                f"The host's {target} cannot be shown in the jail: the jail has a {target} of its "
                f"own. Name the folders in it that are needed."
            )
        mounts[target] = replace(mount, target=target)
    covered = [mount.target for mount in mounts.values() if isinstance(mount, Cover)]

    def order(mount: Mount) -> tuple[bool, int]:
        below = any(mount.target.startswith(f"{cover}/") for cover in covered)
        depth = mount.target.rstrip("/").count("/")
        return not isinstance(mount, Symlink) or below, depth

    return sorted(mounts.values(), key=order)


def _read_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None  # it is no link, or not there


def follow_links(
    path: str, read: Callable[[str], str | None] = _read_link
) -> tuple[list[Symlink], str]:
    """The symbolic links on the way to what ``path`` names, and its real path. ``read`` gives the
    text of the link at a path the way to which has none; None if it is no link."""
    links: list[Symlink] = []
    done, rest = "/", _parts(path)
    while rest:
        step = os.path.normpath(os.path.join(done, rest.pop(0)))
        text = read(step)
        if text is None:
            done = step
            continue
        links.append(Symlink(text, step))
        if len(links) > _MAX_LINKS:
            raise SpecError(f"{path} cannot be shown in the jail: its links go round in a circle.")
        done = "/" if text.startswith("/") else done
        rest = _parts(text) + rest
    return links, done


def mounted_in(folders: Iterable[str]) -> list[str]:
    """The mounts of this process below some folders: a line of /proc/self/mountinfo each."""
    below = tuple(f"{folder}/" for folder in folders)
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as lines:
        return [line for line in lines if line.split(" ", 5)[4].startswith(below)]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _link_inside(made: Mapping[str, str], shown: Mapping[str, str], step: str) -> str | None:
    """The text of a link as the jail sees it: one that is made, or one in a shown folder."""
    if step in made:
        return made[step]
    folder, below = os.path.split(step)
    while folder != "/":
        if folder in shown:
            return _read_link(os.path.join(shown[folder], below)) if shown[folder] else None
        folder, name = os.path.split(folder)
        below = os.path.join(name, below)
    return None
