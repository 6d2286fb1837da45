"""Builds an image for kernels from a base, as an OCI layout (``sandbox-kernel image build``).

The layers of an OCI image are kept; other bases become one layer. A layer on top has ipykernel, the
requested packages and an empty /workspace. Nothing of the base is run or unpacked, so a build needs
neither root nor Docker, and may be for another architecture.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sandbox_kernel import __version__
from sandbox_kernel.errors import SpecError
from sandbox_kernel.images import image_store
from sandbox_kernel.images.archives import decompressed, entries
from sandbox_kernel.images.contents import Contents
from sandbox_kernel.images.debian import make_debian, tidied
from sandbox_kernel.images.interpreter import PATH, Interpreter, find_interpreter
from sandbox_kernel.images.layers import (
    Entry,
    Layer,
    fixed_time,
    folder_entries,
    made_file,
    made_folder,
    without_live_folders,
)
from sandbox_kernel.images.oci import Json, Layout, read_layer, unpack_layout
from sandbox_kernel.images.wheels import KERNEL, Note, packages_for, uncached_packages_for
from sandbox_kernel.spec import check_name

DEBIAN = "debian"
PIP = "pip"
"""Debian's own image has none, and `%pip install` is what people try first."""
WORKSPACE = "workspace"
_OF_LAYOUTS = re.compile(r"(blobs|oci-layout|index\.json|manifest\.json|repositories)(/.*)?")
_SCRIPT = re.compile(rb"#!.*python.*\n|#!/bin/sh\n'''exec' .*\n' '''\n")


@dataclass
class _Base:
    """The base of an image."""

    contents: Contents = field(default_factory=Contents)
    config: Json = field(default_factory=dict)
    descriptors: list[Json] = field(default_factory=list)
    """Layers of an OCI image, which are kept."""
    diff_ids: list[str] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    """Layers that were made here."""


@dataclass(frozen=True)
class Built:
    """The result of a build."""

    path: Path
    digest: str
    interpreter: Interpreter


def build_image(
    name: str,
    source: str = DEBIAN,
    *,
    requirements: Path | None = None,
    python: str | None = None,
    note: Note = lambda line: None,
) -> Built:
    """Build an image and store it under a name, replacing one of that name.

    ``source`` is ``debian``, a root file system (folder or archive), an OCI layout (folder or
    archive) or the name of a stored image. A failure leaves nothing behind.
    """
    check_name(name, "An image name")
    asked = _read_requirements(requirements)
    with image_store.building(image_store.images_dir()) as folder:
        layout = Layout.create(folder / "layout")
        base = _read_base(source, layout, folder, note)
        found = find_interpreter(base.contents, _search_path(base.config), python)
        _check_architecture(base.config, found)
        always = [PIP] if source == DEBIAN else []
        always += [] if found.has_ipykernel else [KERNEL]
        packages = _packages(found, asked, requirements, always, folder, note)
        note("Writing the image ...")
        additions = _additions(base, found, packages)
        first = next(additions, None)  # a base that has everything gets no layer
        top = [] if first is None else [layout.add_layer(itertools.chain([first], additions))]
        layers = [*base.layers, *top]
        digest = layout.write_image(
            _config(base, found, layers),
            base.descriptors,
            layers,
            name,
            {
                f"{image_store.FACTS}python": found.target.version,
                f"{image_store.FACTS}version": __version__,
            },
        )
        return Built(image_store.keep(layout, name), digest, found)


# --- the base


def _read_base(source: str, layout: Layout, folder: Path, note: Note) -> _Base:
    if source == DEBIAN:
        return _from_rootfs(make_debian(folder, note), layout, note, debian=True)
    stored = image_store.resolve(source)
    if stored is not None:
        return _from_layout(Layout(stored), layout, note)
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_rootfs(path, layout, note)
    if not path.is_file():
        raise SpecError(
            f"There is nothing to build from at {source!r}: --from takes {DEBIAN!r}, a folder or "
            f"archive with a root file system, an OCI layout or archive, or the name of an image."
        )
    if not _holds_layout(path):
        return _from_rootfs(path, layout, note)
    note(f"Reading {path} ...")
    with path.open("rb") as file:
        return _from_layout(unpack_layout(file, str(path), folder / "base"), layout, note)


def _holds_layout(path: Path) -> bool:
    seen = False
    with path.open("rb") as file:
        for entry, _ in entries(decompressed(file, str(path)), str(path)):
            if entry.name and not _OF_LAYOUTS.fullmatch(entry.name):
                return False
            seen = True
    return seen


def _from_layout(source: Layout, layout: Layout, note: Note) -> _Base:
    note("Looking into the layers of the base ...")
    image = source.image(image_store.this_architecture())
    base = _Base(config=image.config, descriptors=image.layers)
    base.diff_ids = source.look_into(image, base.contents)
    for descriptor in image.layers:
        shutil.copyfile(source.blob(descriptor["digest"]), layout.blob(descriptor["digest"]))
    return base


def _from_rootfs(path: Path, layout: Layout, note: Note, *, debian: bool = False) -> _Base:
    base = _Base()
    note("Packing the root file system ...")
    found = without_live_folders(_rootfs_entries(path))
    base.layers = [layout.add_layer(tidied(found) if debian else found)]
    read_layer(layout.blob(base.layers[0].digest), str(path), base.contents)
    return base


def _rootfs_entries(path: Path) -> Iterator[Entry]:
    if path.is_dir():
        yield from folder_entries(path)
    else:
        with path.open("rb") as file:
            yield from entries(decompressed(file, str(path)), str(path))


# --- what is added


def _read_requirements(path: Path | None) -> list[str] | None:
    """The lines of a requirements file; None if it names files or indexes: only pip can read it."""
    if path is None:
        return []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"The requirements {path} cannot be read: {error}") from None
    found = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    try:
        plain = all(Requirement(line).url is None for line in found if line)
    except InvalidRequirement:
        plain = False
    return [line for line in found if line] if plain else None


def _packages(
    found: Interpreter,
    asked: list[str] | None,
    requirements: Path | None,
    always: list[str],
    folder: Path,
    note: Note,
) -> Path | None:
    """A folder with the packages to install, or None."""
    if asked is None:
        made = folder / "packages"
        made.mkdir()
        uncached_packages_for(found.target, ["-r", str(requirements), *always], made, note)
        return made
    wanted = [*asked, *always]
    return packages_for(found.target, wanted, note=note) if wanted else None


def _additions(base: _Base, found: Interpreter, packages: Path | None) -> Iterator[Entry]:
    """The entries of the layer on top, in a fixed order."""
    contents = base.contents
    if packages is not None:
        yield from _programs(contents, found, packages / "bin")
        place = _existing(contents, found.packages)
        yield from _missing_folders(contents, place)
        yield from _superseded(contents, place, packages)
        for entry, content in folder_entries(packages):
            if entry.name.split("/")[0] == "bin":
                continue
            entry.name = f"{place}/{entry.name}"
            if entry.islnk():
                entry.linkname = f"{place}/{entry.linkname}"
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.uid = entry.gid = entry.mtime = 0
            yield entry, content
    if not contents.is_folder(WORKSPACE):
        uid, gid = _user(base)
        yield made_folder(WORKSPACE, uid=uid, gid=gid)


def _programs(contents: Contents, found: Interpreter, folder: Path) -> Iterator[Entry]:
    """The programs of the packages, for the image's interpreter."""
    if not folder.is_dir():
        return
    place = _existing(contents, found.programs)
    yield from _missing_folders(contents, place)
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.is_symlink():
            content = _SCRIPT.sub(f"#!{found.path}\n".encode(), path.read_bytes(), count=1)
            yield made_file(f"{place}/{path.name}", content, mode=0o755)


def _superseded(contents: Contents, place: str, packages: Path) -> Iterator[Entry]:
    """Whiteouts for the metadata of other versions of these packages in the base."""
    fresh = {path.name for path in packages.glob("*.dist-info")}
    names = {canonicalize_name(name.split("-")[0]) for name in fresh}
    for name in contents.names(place) if contents.is_folder(place) else ():
        stem, _, kind = name.rpartition(".")
        described = canonicalize_name(stem.split("-")[0])
        if kind in ("dist-info", "egg-info") and described in names and name not in fresh:
            yield made_file(f"{place}/.wh.{name}", b"")


def _existing(contents: Contents, path: str) -> str:
    """The path with links resolved: a layer must not replace a link by a folder."""
    missing: list[str] = []
    folder = path.strip("/")
    while folder and not contents.is_folder(folder):
        folder, _, name = folder.rpartition("/")
        missing.insert(0, name)
    return "/".join([*filter(None, [contents.resolve(folder) or ""]), *missing])


def _missing_folders(contents: Contents, path: str) -> Iterator[Entry]:
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        folder = "/".join(parts[:depth])
        if not contents.is_folder(folder):
            yield made_folder(folder)


# --- the configuration


def _config(base: _Base, found: Interpreter, layers: Sequence[Layer]) -> Json:
    created = datetime.fromtimestamp(fixed_time(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    inner = {k: v for k, v in _inner(base.config).items() if k not in ("Entrypoint", "Cmd")}
    env = [v for v in _strings(inner.get("Env")) if not v.startswith("PATH=")]
    inner["Env"] = [f"PATH={':'.join(_search_path(base.config))}", *env]
    inner["WorkingDir"] = f"/{WORKSPACE}"
    inner["Cmd"] = ["python3"]
    history = base.config.get("history")
    own = {"created": created, "created_by": f"sandbox-kernel {__version__} image build"}
    return {
        **{k: v for k, v in base.config.items() if k in ("variant", "author")},
        "created": created,
        "architecture": found.target.architecture,
        "os": "linux",
        "config": inner,
        "rootfs": {
            "type": "layers",
            "diff_ids": [*base.diff_ids, *(layer.diff_id for layer in layers)],
        },
        "history": [*(history if isinstance(history, list) else []), *(own for _ in layers)],
    }


def _search_path(config: Json) -> list[str]:
    for variable in _strings(_inner(config).get("Env")):
        if variable.startswith("PATH="):
            found = [p for p in variable.removeprefix("PATH=").split(":") if p.startswith("/")]
            return found[:100] or list(PATH)
    return list(PATH)


def _check_architecture(config: Json, found: Interpreter) -> None:
    said = config.get("architecture")
    if said is not None and said != found.target.architecture:
        raise SpecError(
            f"The base says that it is for {str(said)[:50]!r}, but its {found.path} is for "
            f"{found.target.architecture!r}. Use an image for one architecture."
        )


def _user(base: _Base) -> tuple[int, int]:
    """uid and gid that the base runs as; root if they are not known."""
    user, _, group = str(_inner(base.config).get("User") or "0").partition(":")
    for line in base.contents.read("etc/passwd").decode(errors="replace").splitlines():
        name, _, uid, gid, *_ = [*line.split(":"), "", "", "", ""]
        if user in (name, uid) and uid.isdigit() and gid.isdigit():
            return int(uid), int(group) if group.isdigit() else int(gid)
    number = int(user) if user.isdigit() else 0
    return number, int(group) if group.isdigit() else number


def _inner(config: Json) -> Json:
    found = config.get("config")
    return found if isinstance(found, dict) else {}


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
