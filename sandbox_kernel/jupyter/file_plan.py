"""How a kernel's files get into its sandbox, and where they are saved: what ``files`` means here.

The provisioner makes a plan for each new sandbox. With ``files=none``, the earlier settings
``upload`` and ``mirror`` decide. A mount needs a backend that can show a folder of the host; on
others the kernel gets a copy, and a notice says so.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sandbox_kernel.errors import SpecError
from sandbox_kernel.jupyter.kernel_command import check_out_of_reach
from sandbox_kernel.jupyter.kernel_workspace import (
    KernelWorkspace,
    folder_of,
    notebook_in,
    workspace_of,
)
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.local.hidden_paths import check_not_private
from sandbox_kernel.spec import KernelConfiguration


@dataclass(frozen=True)
class FilePlan:
    """What is to be done for one sandbox."""

    configuration: KernelConfiguration
    """With the mount in its spec, if there is one."""
    folder: str
    """The notebook's on the host, or the one that the kernel was started for."""
    workspace: KernelWorkspace | None = None
    upload: str | tuple[str, ...] = "none"
    """What comes in of the folder if there is no workspace."""
    unused: str = ""
    """The saved workspace of the notebook, if there may be one, where the folder is shown."""
    notices: Sequence[str] = field(default_factory=tuple)


def plan_files(
    configuration: KernelConfiguration,
    env: Mapping[str, str],
    cwd: str | None,
    kernel_name: str,
    argv: Sequence[str],
) -> FilePlan:
    """The plan for a kernel with this environment, folder and command line. SpecError if the
    kernel's interpreter would be in the sandbox's reach, or the folder must not be."""
    notebook = configuration.notebook or notebook_in(env)
    folder = os.path.dirname(notebook) if notebook else folder_of(cwd)
    if configuration.files != "none":
        check_not_private(folder, f"The kernel was not started: the folder {folder}")
    notices = [notice] if (notice := fallback_notice(configuration)) else []
    if configuration.files == "mount-ro" and notices:
        configuration = replace(configuration, files="none")
        return FilePlan(configuration, folder, upload="folder", notices=notices)
    if configuration.mounts and not notices:
        unused = _saved_as(notebook) if notebook else ""
        return replace(_mounted(configuration, folder, argv), unused=unused)
    if configuration.files != "none":
        configuration = _as_copy(configuration)
    workspace = workspace_of(configuration, env, cwd, kernel_name)
    if workspace is None and configuration.mirror and configuration.persist:
        workspace = _passing_workspace(configuration, folder, kernel_name)
    if workspace is not None and workspace.mirror:
        check_out_of_reach(configuration, argv, workspace.folder)
    upload = configuration.upload if configuration.persist else "none"
    return FilePlan(configuration, folder, workspace, upload, notices=notices)


def _saved_as(notebook: str) -> str:
    from sandbox_kernel.workspace import name_for_notebook  # lazy: start-up time

    return name_for_notebook(notebook)


def _as_copy(configuration: KernelConfiguration) -> KernelConfiguration:
    """The same in the terms of ``upload`` and ``mirror``."""
    return replace(configuration, files="none", upload="folder", mirror=True)


def fallback_notice(configuration: KernelConfiguration) -> str:
    """What the user should know about ``files`` on this backend; empty if it does as it says."""
    if not configuration.mounts or load_backend(configuration.backend).capabilities.folder:
        return ""
    back = (
        "results come back when the notebook is saved and when the kernel is shut down"
        if configuration.files == "mount"
        else "nothing comes back"
    )
    return (
        f"The backend {configuration.backend!r} cannot show a folder of this machine, so "
        f"files={configuration.files} gives each new sandbox a copy of the notebook's folder, and "
        f"{back}."
    )


def with_folder(
    configuration: KernelConfiguration, folder: str | None = None
) -> KernelConfiguration:
    """For sandboxes without the provisioner, of the launcher and of ``sandbox-kernel run``: what
    ``files`` asks for in the spec. Without ``folder``, the one where that was started. SpecError.
    """
    if configuration.files == "none":
        return configuration
    if not configuration.mounts:
        raise SpecError(
            f"files={configuration.files} needs a saved workspace, which only kernels have that "
            f"Jupyter starts through the provisioner. Choose mount-ro or mount, or install the "
            f"kernel without --launcher."
        )
    writable = configuration.files == "mount"
    spec = replace(configuration.spec, folder=folder_of(folder), folder_writable=writable)
    return replace(configuration, files="none", spec=spec)


def _mounted(configuration: KernelConfiguration, folder: str, argv: Sequence[str]) -> FilePlan:
    writable = configuration.files == "mount"
    if writable:
        check_out_of_reach(configuration, argv, folder, "files=mount")
    spec = replace(configuration.spec, folder=folder, folder_writable=writable)
    return FilePlan(replace(configuration, files="none", spec=spec), folder)


def _passing_workspace(
    configuration: KernelConfiguration, folder: str, kernel_name: str
) -> KernelWorkspace:
    """A workspace for one kernel whose notebook nobody knows. Kernels that run in the same folder
    at the same time do not overwrite each other's results: each compares with what it got."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:8]
    return KernelWorkspace(
        name=f"folder-{digest}-{secrets.token_hex(4)}",
        folder=folder,
        named=True,
        upload=configuration.upload,
        mirror=configuration.mirror,
        mirror_delete=configuration.mirror_delete,
        kernel_name=kernel_name,
        passing=True,
    )
