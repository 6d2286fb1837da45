"""The guest program as one zipapp, made from the installed package."""

from __future__ import annotations

import functools
import io
import zipfile
from importlib import resources
from importlib.resources.abc import Traversable

PACKAGE = "sandbox_guest"
_JAIL = "jail"
"""What the names of modules begin with that only the local jail runs, which has them already."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


@functools.cache
def guest_program() -> bytes:
    """A zip that ``python3 guest.pyz agent ...`` runs. The same sources give the same bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(
            archive,
            "__main__.py",
            b"import sys\nfrom %s.__main__ import main\nsys.exit(main())\n" % PACKAGE.encode(),
        )
        for path, content in sorted(_sources(resources.files("sandbox_kernel.guest"), PACKAGE)):
            _add(archive, path, content)
    return packed.getvalue()


def _add(archive: zipfile.ZipFile, path: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(path, _EPOCH), content, zipfile.ZIP_DEFLATED)


def _sources(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found = []
    for item in folder.iterdir():
        path = f"{prefix}/{item.name}"
        if item.is_dir() and item.name != "__pycache__":
            found += _sources(item, path)
        elif item.name.endswith(".py") and not item.name.startswith(_JAIL):
            found.append((path, item.read_bytes()))
    return found
