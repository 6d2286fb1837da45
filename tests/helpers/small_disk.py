"""A small disk that a test, or somebody beside it, can fill: a tmpfs, which only root can mount."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@dataclass(frozen=True)
class SmallDisk:
    """A mounted disk of its own."""

    path: Path

    @property
    def _beside(self) -> Path:
        return self.path / "beside"

    def fill(self) -> None:
        """Somebody else takes all that is left of it."""
        with self._beside.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        self._beside.unlink()


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """A disk of this size, mounted at a new folder. Its end does not wait for who still uses it."""
    path.mkdir()
    options = f"size={size},mode=700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "small", str(path)]
    mounted = subprocess.run(mount, check=False, stderr=subprocess.PIPE, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
