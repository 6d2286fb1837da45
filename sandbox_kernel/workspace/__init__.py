"""Saved workspaces: a history of saves of a sandbox's files, by name, in a store.

A kernel's files outlive its sandbox here, with every backend. docs/workspace.md describes it. A
*volume* (``SandboxSpec.volume``) is something else: a host folder that the local jail shows at
/workspace.
"""

from sandbox_kernel.workspace.ended_sandboxes import Leftovers, save_leftovers
from sandbox_kernel.workspace.exports import export
from sandbox_kernel.workspace.imports import import_folder
from sandbox_kernel.workspace.receive import persist
from sandbox_kernel.workspace.reports import (
    Change,
    ExportReport,
    HydrateReport,
    Progress,
    Quota,
    SaveInfo,
    SaveReport,
    UploadPolicy,
)
from sandbox_kernel.workspace.send import hydrate, upload
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.workspaces import name_for_notebook

__all__ = [
    "Change",
    "ExportReport",
    "HydrateReport",
    "Leftovers",
    "Progress",
    "Quota",
    "SaveInfo",
    "SaveReport",
    "Store",
    "UploadPolicy",
    "export",
    "hydrate",
    "import_folder",
    "name_for_notebook",
    "persist",
    "save_leftovers",
    "upload",
]
