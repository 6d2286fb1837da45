"""Folders of a test's own, in place of the user's."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.spec import SETTINGS

_SPARES = SETTINGS["warm_spares"].variable


def keep_no_spares() -> None:
    """Tests see that nothing is left behind, and count what there is. Those of spares delete the
    variable."""
    os.environ[_SPARES] = "0"


@contextlib.contextmanager
def own_folders() -> Iterator[Path]:
    """A folder for sandbox-kernel's ``data`` and ``run``. Its path is short: it holds sockets."""
    folder = Path(tempfile.mkdtemp(prefix="sk-")).resolve()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SANDBOX_KERNEL_DATA_DIR", str(folder / "data"))
            patch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", str(folder / "run"))
            patch.setenv(_SPARES, "0")
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
