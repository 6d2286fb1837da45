"""Reads and writes OCI image layouts on disk.

A layout is a folder with ``oci-layout``, ``index.json`` and ``blobs/sha256/...``. Everything read
from one is bounded and checked against its digest.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from sandbox_kernel.errors import SpecError
from sandbox_kernel.images.archives import BadArchive, decompressed, entries
from sandbox_kernel.images.contents import Contents
from sandbox_kernel.images.layers import Entry, Hashing, Layer, write_layer

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_LISTS = (INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = (MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")
_MAX_JSON = 8 * 2**20
_MAX_LAYERS = 500
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MEMBERS = re.compile(r"oci-layout|index\.json|blobs/sha256/[0-9a-f]{64}")

Json = dict[str, Any]


@dataclass(frozen=True)
class Image:
    """One image of a layout."""

    digest: str
    manifest: Json
    config: Json

    @property
    def layers(self) -> list[Json]:
        return list(self.manifest["layers"])

    @property
    def size(self) -> int:
        return int(self.manifest["config"]["size"]) + sum(int(d["size"]) for d in self.layers)


class Layout:
    """An image layout in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> Layout:
        """A new layout without an image in an empty folder."""
        (path / "blobs" / "sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        return cls(path)

    def blob(self, digest: object) -> Path:
        """The path of the blob with that digest."""
        found = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
        if not found:
            raise SpecError(f"{self.path} names a blob by {str(digest)[:100]!r}, not by a sha256.")
        return self.path / "blobs" / "sha256" / found.group(1)

    def add_layer(self, wanted: Iterable[Entry]) -> Layer:
        """Write a layer and store it as a blob."""
        written = self.path / "layer"
        layer = write_layer(written, wanted)
        written.rename(self.blob(layer.digest))
        return layer

    def _add_json(self, kind: str, value: Json) -> Json:
        """Store a value as a blob; returns its descriptor."""
        data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        digest = _digest(data)
        self.blob(digest).write_bytes(data)
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    def image(self, architecture: str) -> Image:
        """The image for that architecture; the only one, if there is only one."""
        index = self._json(self.path / "index.json")
        for _ in range(4):
            wanted = _chosen(_descriptors(index, "manifests", self.path), architecture, self.path)
            value = self._blob_json(wanted)
            kind = wanted.get("mediaType") or value.get("mediaType")
            if kind in _LISTS:
                index = value
                continue
            if kind not in _MANIFESTS or not isinstance(value.get("config"), dict):
                raise SpecError(f"{self.path} holds no image but {str(kind)[:100]!r}.")
            if len(_descriptors(value, "layers", self.path)) > _MAX_LAYERS:
                raise SpecError(f"{self.path} has an image of more than {_MAX_LAYERS} layers.")
            return Image(str(wanted["digest"]), value, self._blob_json(value["config"]))
        raise SpecError(f"{self.path} has too deeply nested indexes.")

    def look_into(self, image: Image, contents: Contents) -> list[str]:
        """Check all layers of an image and add them to ``contents``; returns their diff ids."""
        found = []
        for descriptor in image.layers:
            path, where = self.blob(descriptor.get("digest")), f"Layer {descriptor.get('digest')}"
            if "tar" not in str(descriptor.get("mediaType")):
                raise SpecError(f"{where} is of the unknown kind {descriptor.get('mediaType')!r}.")
            if _file_digest(path) != descriptor["digest"]:
                raise BadArchive(f"{where} does not have that digest: the image is damaged.")
            found.append(read_layer(path, where, contents))
        listed = (image.config.get("rootfs") or {}).get("diff_ids")
        if listed != found:
            raise BadArchive(f"The layers of {self.path} are not those that its config names.")
        return found

    def _blob_json(self, descriptor: Json) -> Json:
        return self._json(self.blob(descriptor.get("digest")), str(descriptor["digest"]))

    def _json(self, path: Path, digest: str = "") -> Json:
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_JSON + 1)
        except FileNotFoundError:
            raise SpecError(
                f"{self.path} is no complete OCI layout: {path.name} is missing."
            ) from None
        if len(data) > _MAX_JSON:
            raise SpecError(f"{path} is too large to describe an image.")
        if digest and _digest(data) != digest:
            raise SpecError(f"{path} does not have its digest: the image is damaged.")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise SpecError(f"{path} does not describe an image.")
        return value

    def write_image(
        self, config: Json, base: Sequence[Json], layers: Sequence[Layer], name: str, facts: Json
    ) -> str:
        """Make an image of layers whose blobs are here, those of ``base`` first, the only one of
        the layout. Returns the digest of its manifest."""
        own = [{"mediaType": LAYER, "digest": la.digest, "size": la.size} for la in layers]
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._add_json(CONFIG, config),
            "layers": [*base, *own],
            "annotations": facts,
        }
        descriptor = {
            **self._add_json(MANIFEST, manifest),
            "platform": {"architecture": config["architecture"], "os": "linux"},
            "annotations": {
                "org.opencontainers.image.ref.name": "latest",
                "io.containerd.image.name": f"localhost/{name}:latest",
            },
        }
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [descriptor]}
        (self.path / "index.json").write_text(json.dumps(index, sort_keys=True))
        return str(descriptor["digest"])


def unpack_layout(archive: BinaryIO, where: str, folder: Path) -> Layout:
    """Unpack the layout in a tar archive into an empty folder. Skips all other files."""
    found = set()
    (folder / "blobs" / "sha256").mkdir(parents=True)
    for entry, content in entries(decompressed(archive, where), where):
        if content is None or not _MEMBERS.fullmatch(entry.name):
            continue
        found.add(entry.name)
        with (folder / entry.name).open("wb") as file:
            shutil.copyfileobj(content, file, 2**20)
    if not {"oci-layout", "index.json"} <= found:
        raise SpecError(
            f"{where} is no OCI archive: it lacks oci-layout or index.json. `docker save` writes "
            f"one since Docker 25; or give the files themselves as a rootfs."
        )
    return Layout(folder)


def read_layer(path: Path, where: str, contents: Contents) -> str:
    """Add a layer's files to ``contents``; returns its diff id. ``where`` names it in errors."""
    with path.open("rb") as file:
        plain = Hashing(decompressed(file, where))
        for entry, content in entries(cast("IO[bytes]", plain), where):
            if entry.ischr() or entry.isblk():
                raise BadArchive(f"{where} is refused: it has the device {entry.name!r}.")
            contents.add(entry, content)
        padding = 0
        try:
            while data := plain.read(2**20):  # the digest covers bytes behind the archive, too
                padding += len(data)
                if padding > 2**30:
                    raise BadArchive(f"{where} is refused: it has too much data behind its end.")
        except (OSError, EOFError, zlib.error) as error:
            raise BadArchive(f"{where} cannot be read: {error}") from error
        return plain.digest


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except FileNotFoundError:
        raise SpecError(f"The image is incomplete: {path} is missing.") from None


def _descriptors(value: Mapping[str, Any], key: str, where: Path) -> list[Json]:
    found = value.get(key)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise SpecError(f"{where} has no list of {key} where one must be.")
    return found


def _chosen(manifests: list[Json], architecture: str, where: Path) -> Json:
    """The manifest for an architecture, or the only one."""
    real = [m for m in manifests if _architecture(m) != "unknown"]
    fitting = [m for m in real if _architecture(m) == architecture]
    choice = fitting or (real if len(real) == 1 else [])
    if not choice:
        known = sorted({str(_architecture(m))[:50] for m in real})
        raise SpecError(
            f"{where} has no image for {architecture}, only for: {', '.join(known) or 'nothing'}."
        )
    return choice[0]


def _architecture(manifest: Json) -> Any:
    platform = manifest.get("platform")
    return platform.get("architecture") if isinstance(platform, dict) else None
