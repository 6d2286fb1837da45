"""A save becomes a host folder, with care: what is written was made by hostile code."""

from __future__ import annotations

from pathlib import Path

from sandbox_kernel.workspace.reports import ExportReport
from sandbox_kernel.workspace.store import Store


def export(
    store: Store,
    name: str,
    folder: str | Path,
    *,
    at: str = "",
    overwrite: bool = False,
    delete: bool = False,
    mirror: bool = False,
) -> ExportReport:
    """Write a save (the latest, or ``at``) into a folder of the host. Blocks: call it in a thread.

    Only what differs from the folder's baseline (its last import or export) is written. A file
    that has changed on the host since then is never written over: ExportConflict lists those, and
    nothing is written at all, unless ``overwrite`` is given. ``mirror``: conflicting files are left
    alone and listed in ``skipped``, and all others are written (for a write-back after every save).
    ``delete`` also removes host files that the sandbox deleted since the baseline, if the host has
    not changed them. No file outside ``folder`` is touched, whatever symlinks are there.
    """
    raise NotImplementedError
