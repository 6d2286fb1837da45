"""The images that ``sandbox-kernel image build`` made, in ``<data dir>/images/<name>/``.

A new layout appears complete. A rebuild adds blobs, then replaces ``index.json`` atomically, then
deletes unused blobs. Backends that boot images call ``resolve``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.images.layers import folder_entries, made_file, normalised
from sandbox_kernel.images.oci import Image, Layout
from sandbox_kernel.images.target import OCI_ARCHITECTURES
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.spec import check_name
from sandbox_kernel.suggestions import did_you_mean

FACTS = "sandbox-kernel."
"""Prefix of our annotations of a manifest."""


@dataclass(frozen=True)
class StoredImage:
    """A stored image, for ``image list``."""

    name: str
    path: Path
    digest: str
    size: int
    architecture: str
    python: str
    """Its version, or "" if that is not known."""
    created: float


def images_dir() -> Path:
    return private_dir(data_dir() / "images")


def resolve(image: str) -> Path | None:
    """The layout that a spec's ``image`` names: a built image by name, or a folder with an
    ``oci-layout`` file by path. None: it must be in a registry."""
    if "/" not in image:
        with contextlib.suppress(SpecError):
            found = images_dir() / check_name(image, "An image name")
            if (found / "index.json").is_file():
                return found
    path = Path(image).expanduser()
    return path.absolute() if (path / "oci-layout").is_file() else None


def load(path: Path) -> Image:
    """The image of a layout (for this machine, if it has several)."""
    return Layout(path).image(this_architecture())


def list_images() -> list[StoredImage]:
    """All images that can be read, by name."""
    found = []
    for path in sorted(images_dir().iterdir()):
        if path.name.startswith(".") or not (path / "index.json").is_file():
            continue
        image = load(path)
        notes = image.manifest.get("annotations") or {}
        found.append(
            StoredImage(
                name=path.name,
                path=path,
                digest=image.digest,
                size=image.size,
                architecture=str(image.config.get("architecture", "")),
                python=str(notes.get(f"{FACTS}python", "")),
                created=(path / "index.json").stat().st_mtime,
            )
        )
    return found


def remove(name: str) -> bool:
    """Delete an image; False if there was none. Sandboxes made from it live on."""
    path = images_dir() / check_name(name, "An image name")
    with _locked(images_dir()):
        if not path.is_dir():
            return False
        gone = Path(tempfile.mkdtemp(prefix=".removed-", dir=images_dir()))
        path.rename(gone / path.name)
    shutil.rmtree(gone)
    return True


@contextlib.contextmanager
def building(root: Path) -> Iterator[Path]:
    """A new folder to build in, deleted afterwards like those that killed processes left."""
    for left in [*root.glob(".building-*"), *root.glob(".removed-*")]:
        with contextlib.suppress(OSError), _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _delete(left)
    folder = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
    with _locked(folder):
        try:
            yield folder
        finally:
            _delete(folder)


def keep(built: Layout, name: str) -> Path:
    """Give a layout its name, replacing an image of that name."""
    path = images_dir() / check_name(name, "An image name")
    with _locked(images_dir()):
        if not path.is_dir():
            built.path.rename(path)
            return path
        blobs, made = path / "blobs" / "sha256", built.path / "blobs" / "sha256"
        fresh = {blob.name for blob in made.iterdir()}
        for digest in fresh:
            os.replace(made / digest, blobs / digest)
        os.replace(built.path / "index.json", path / "index.json")
        for blob in list(blobs.iterdir()):
            if blob.name not in fresh:
                blob.unlink()
    return path


def export_folder(name: str, target: Path) -> None:
    """Copy an image's layout to a new or empty folder."""
    source = _existing(name)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SandboxError(f"{target} exists already. Name a new folder, or an empty one.")
    shutil.copytree(source, target, dirs_exist_ok=True)


def export_archive(name: str, file: IO[bytes]) -> None:
    """Write an image as an OCI archive for ``docker load``; the same image gives the same bytes."""
    source = _existing(name)
    image = load(source)

    def blob(digest: str) -> str:
        return f"blobs/sha256/{digest.removeprefix('sha256:')}"

    docker = [
        {
            "Config": blob(image.manifest["config"]["digest"]),
            "RepoTags": [f"localhost/{name}:latest"],
            "Layers": [blob(layer["digest"]) for layer in image.layers],
        }
    ]
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry, content in folder_entries(source):
            entry.mode = 0o755 if entry.isdir() else 0o644
            archive.addfile(normalised(entry, 0), content)
        entry, content = made_file("manifest.json", json.dumps(docker).encode())
        archive.addfile(normalised(entry, 0), content)


def export_file(name: str, target: Path) -> None:
    """Write the archive to a file, which appears when it is complete."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as file:
            export_archive(name, file)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _existing(name: str) -> Path:
    path = images_dir() / check_name(name, "An image name")
    if not (path / "index.json").is_file():
        raise SandboxError(
            f"There is no image {name!r}. "
            f"{did_you_mean(name, [image.name for image in list_images()])}"
        )
    return path


def this_architecture() -> str:
    """This machine, as the OCI calls it."""
    machine = os.uname().machine
    return OCI_ARCHITECTURES.get(machine, machine)


def _delete(folder: Path) -> None:
    # Some folders may be read-only for their owner.
    for parent, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(parent, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Only one process at a time changes a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)
