"""Reason and log of a box that has ended, kept on the host."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.sandboxes.untrusted_files import read_tail, remove_tree


class Notes:
    """Files of one sandbox, by its id. Reading a missing one gives an empty text."""

    def __init__(self, sandbox_id: str) -> None:
        self._id = sandbox_id

    @property
    def _folder(self) -> Path:
        return private_dir(data_dir() / "boxes") / self._id

    def read(self, name: str) -> str:
        return read_tail(self._folder / name)

    def write(self, name: str, text: str) -> None:
        (private_dir(self._folder) / name).write_text(text, errors="replace")

    def clear(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / name).unlink()

    def remove(self) -> None:
        remove_tree(self._folder)
