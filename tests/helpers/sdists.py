"""Source distributions of other projects, whose tests run on our code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

CACHE = Path(sys.prefix)
"""Git ignores the virtual environment, and `make distclean` removes it."""


def unpacked_sdist(
    name: str, version: str, folder: Path, *, python: str | Path = sys.executable
) -> Path:
    """Its unpacked files, downloaded by the pip of ``python`` if they are not there."""
    unpacked = folder / name
    if not unpacked.exists():
        download = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", "download"]
        wanted = [f"{name}=={version}", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*download, "-d", str(folder / "sdists"), *wanted], check=True)
        [sdist] = (folder / "sdists").glob(f"{name.replace('-', '[-_]')}-{version}.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        shutil.move(folder / "unpacked" / sdist.name.removesuffix(".tar.gz"), unpacked)
    return unpacked
