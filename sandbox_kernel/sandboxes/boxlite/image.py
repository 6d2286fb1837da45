"""From a spec's ``image`` to BoxLite's options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SpecError
from sandbox_kernel.images.image_store import resolve, this_architecture
from sandbox_kernel.spec import SandboxSpec

_MAX_JSON = 4 * 2**20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH for an image without one, which BoxLite would not run."""
_MAKE_ONE = "`sandbox-kernel image build --from debian -t NAME` makes one without Docker"


def find_image(spec: SandboxSpec) -> dict[str, Any]:
    """Options for boxlite.BoxOptions, for the image that a spec names: a folder with an OCI layout,
    an image built with ``sandbox-kernel image build``, or else a registry's reference. SpecError if
    it names none, or one for another machine."""
    if spec.image is None:
        raise SpecError(
            f"Sandbox {spec.name!r} was not created: a microVM needs an image with Python, and "
            f"image is not set. {_MAKE_ONE}; then set image to its name. A registry's image, such "
            f"as python:3.12-slim, works as well."
        )
    layout = resolve(spec.image)
    if layout is None and spec.image.startswith("/"):
        raise SpecError(
            f"Sandbox {spec.name!r} was not created: {spec.image} is no folder with an OCI "
            f"layout (it has no file oci-layout). {_MAKE_ONE}."
        )
    if layout is None:
        return {"image": spec.image}
    found, wanted = _architectures(layout), this_architecture()
    if found and wanted not in found:
        raise SpecError(
            f"Sandbox {spec.name!r} was not created: the image {spec.image} is for "
            f"{', '.join(sorted(found))}, and this machine is {wanted}. {_MAKE_ONE}."
        )
    return layout_options(layout)


def layout_options(layout: Path) -> dict[str, Any]:
    """Options for boxlite.BoxOptions, for a folder with an OCI layout."""
    return {"rootfs_path": str(layout), "env": [] if _has_path(layout) else [("PATH", _PATH)]}


def _architectures(layout: Path) -> set[str]:
    """The architectures of a layout's images; empty if unknown."""
    try:
        return {
            str((manifest.get("platform") or _config(layout, manifest))["architecture"])
            for manifest in _json(layout / "index.json")["manifests"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return set()  # BoxLite says what is wrong with it


def _has_path(layout: Path) -> bool:
    """Whether all images of a layout set PATH."""
    try:
        return all(
            any(str(item).startswith("PATH=") for item in inner.get("Env") or ())
            for manifest in _json(layout / "index.json")["manifests"]
            for inner in [_config(layout, manifest).get("config") or {}]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return True  # BoxLite says what is wrong with it


def _config(layout: Path, manifest: Any) -> Any:
    return _blob(layout, _blob(layout, manifest)["config"])


def _blob(layout: Path, descriptor: Any) -> Any:
    kind, _, digest = str(descriptor["digest"]).partition(":")
    if not (kind.isalnum() and digest.isalnum()):
        raise ValueError(f"not a digest: {kind}:{digest}")
    return _json(layout / "blobs" / kind / digest)


def _json(path: Path) -> Any:
    with path.open("rb") as file:
        return json.loads(file.read(_MAX_JSON))
