"""A host folder becomes a save."""

from __future__ import annotations

from pathlib import Path

from sandbox_kernel.workspace.reports import Limits, SaveReport, UploadPolicy
from sandbox_kernel.workspace.store import Store


def import_folder(
    store: Store,
    name: str,
    folder: str | Path,
    *,
    policy: UploadPolicy | None = None,
    notebook: str = "",
    limits: Limits | None = None,
) -> SaveReport:
    """Make a save of workspace ``name`` from a folder of the host. Blocks: call it in a thread.

    What was read is remembered as the folder's baseline, so that a later ``export`` to the same
    folder can tell which files have changed on the host since.
    """
    raise NotImplementedError
