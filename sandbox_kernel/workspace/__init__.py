"""The workspace outlives the sandbox: saves of a sandbox's files, and their way back.

The word has two meanings in this project. The *mounted workspace* is a folder of the host that the
local jail shows at /workspace (``SandboxSpec.workspace``). What is here is the *saved workspace*: a
history of saves under a name, in a store, for every backend. docs/workspace.md tells the rest.

names       names of workspaces, and the name that belongs to a notebook
identity    which notebook a workspace belongs to
reports     what persist, hydrate, export and the others give back
blobs       files of the store: a local folder, or any fsspec file system
packs       objects packed into files of the store
trees       folders as objects: reading and validating them
ids         ids of saves
changes     what differs between two trees
store       workspaces and their saves; history, verify
claims      who uses a store just now
collect     garbage collection
ignore      what is not saved (.sandboxignore)
transfer    persist, hydrate and upload: the calls that everybody makes
receive     the host's half of a persist
send        the host's half of a hydrate
leftovers   what a local sandbox has left becomes a save
imports     a host folder becomes a save
exports     a save becomes a host folder, with care
updates     what has changed in a host folder comes into a workspace
objects     objects that are made on the host
onhost      files of the host, compared with what the store has of them
links       what a sandbox must not write on the host, and symlinks to it
trash       what an export takes away is kept
"""

from sandbox_kernel.workspace.exports import export
from sandbox_kernel.workspace.imports import import_folder
from sandbox_kernel.workspace.leftovers import Leftovers, save_leftovers
from sandbox_kernel.workspace.names import name_for_notebook
from sandbox_kernel.workspace.reports import (
    Change,
    ExportReport,
    HydrateReport,
    Limits,
    Progress,
    SaveInfo,
    SaveReport,
    UploadPolicy,
)
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.transfer import hydrate, persist, upload

__all__ = [
    "Change",
    "ExportReport",
    "HydrateReport",
    "Leftovers",
    "Limits",
    "Progress",
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
