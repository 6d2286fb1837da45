"""From a spec's ``image`` to BoxLite's options."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SpecError
from sandbox_kernel.images.image_store import resolve
from sandbox_kernel.spec import SandboxSpec

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MAX_JSON = 4 * 2**20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH for an image without one, which BoxLite would not run."""
_MAKE_ONE = "`sandbox-kernel image build --from debian -t NAME` makes one without Docker"


@dataclass(frozen=True)
class BoxImage:
    """Either a folder with an OCI layout, or a registry's reference."""

    layout: Path | None = None
    reference: str | None = None

    def options(self) -> dict[str, Any]:
        """For boxlite.BoxOptions."""
        if self.layout is not None:
            env = [] if _has_path(self.layout) else [("PATH", _PATH)]
            return {"rootfs_path": str(self.layout), "env": env}
        assert self.reference is not None
        return {"image": self.reference}


def find_image(spec: SandboxSpec) -> BoxImage:
    """The image that a spec names: a folder with an OCI layout, an image built with
    ``sandbox-kernel image build``, or else a registry's reference. SpecError if it names none,
    or one for another machine."""
    if spec.image is None:
        raise SpecError(
            f"Sandbox {spec.name!r} was not created: a microVM needs an image with Python, and "
            f"image is not set. {_MAKE_ONE}; then set image to its name. A registry's image, such "
            f"as python:3.12-slim, works as well."
        )
    if "/" in spec.image and Path(spec.image).is_absolute():
        layout: Path | None = Path(spec.image)
        if not (Path(spec.image) / "oci-layout").is_file():
            raise SpecError(
                f"Sandbox {spec.name!r} was not created: {spec.image} is no folder with an OCI "
                f"layout (it has no file oci-layout). {_MAKE_ONE}."
            )
    else:
        layout = resolve(spec.image)
    if layout is None:
        return BoxImage(reference=spec.image)
    _check_architecture(spec, layout)
    return BoxImage(layout=layout)


def _check_architecture(spec: SandboxSpec, layout: Path) -> None:
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    found = _architectures(layout)
    if found and wanted not in found:
        raise SpecError(
            f"Sandbox {spec.name!r} was not created: the image {spec.image} is for "
            f"{', '.join(sorted(found))}, and this machine is {wanted}. {_MAKE_ONE}."
        )


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
            any(str(item).startswith("PATH=") for item in _env(_config(layout, manifest)))
            for manifest in _json(layout / "index.json")["manifests"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return True  # BoxLite says what is wrong with it


def _env(config: Any) -> Any:
    return (config.get("config") or {}).get("Env") or ()


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
