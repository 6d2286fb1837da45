"""What comes into a new sandbox before the first cell: saved files, and those of the folder."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

from sandbox_kernel.errors import SandboxError, WorkspaceError
from sandbox_kernel.jupyter.configuration import KernelConfiguration
from sandbox_kernel.jupyter.workspaces import KernelWorkspace, folder_of, open_store
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.text import printable

if TYPE_CHECKING:  # it takes time to import, and most kernels have no workspace
    from sandbox_kernel.workspace import SaveInfo, Store, UploadPolicy

_MOST_TOLD = 20


async def bring_files(
    kernel: SandboxedKernel,
    workspace: KernelWorkspace | None,
    configuration: KernelConfiguration,
    cwd: str | None,
    log: Log,
) -> tuple[KernelWorkspace | None, list[str]]:
    """Called by the provisioner when it has made a sandbox. The kernel's workspace, if it has one,
    with what the store knows of it, and what the user should be told, which is in the log, too. On
    the background loop."""
    if workspace is not None:
        workspace, told = await bring_in(kernel, workspace, log)
    elif configuration.persist:
        told = await _without_workspace(kernel, configuration, folder_of(cwd), log)
    else:
        told = []
    for line in told:
        log.warning("%s", line)
    return workspace, told


async def _without_workspace(
    kernel: SandboxedKernel, configuration: KernelConfiguration, folder: str, log: Log
) -> list[str]:
    """A kernel without a workspace has the files of its folder as well, if they are wanted."""
    if configuration.upload != "none":
        from sandbox_kernel.workspace import UploadPolicy

        policy = UploadPolicy.parse(configuration.upload)
        if policy.mode != "none":
            await _bring_folder(kernel, folder, policy, log)
    if not configuration.mirror:
        return []
    return [
        f"Nothing is written back to {folder}, although mirror is set: this kernel has no "
        f"workspace. Name one: SANDBOX_KERNEL_WORKSPACE=NAME, or the path of the notebook."
    ]


async def bring_in(
    kernel: SandboxedKernel, workspace: KernelWorkspace, log: Log
) -> tuple[KernelWorkspace, list[str]]:
    """Before the first cell of a new sandbox: the files of the latest save, and what the policy
    lets through of the folder beside the notebook, as far as it has changed since. The workspace,
    with what the store knows of it, and what the user should be told. On the background loop."""
    from sandbox_kernel.workspace import UploadPolicy, hydrate, upload

    policy = UploadPolicy.parse(workspace.upload)
    try:
        store = await asyncio.to_thread(open_store)
        workspace, told = await asyncio.to_thread(_claim, store, workspace)
        latest = await asyncio.to_thread(_latest, store, workspace.name)
        if latest is not None and workspace.folder and policy.mode != "none":
            told += await asyncio.to_thread(_update, store, workspace, policy, log)
            latest = await asyncio.to_thread(store.find, workspace.name)
        if latest is not None:
            log.info(
                "Bringing workspace %s into sandbox %s: %d files, %.1f MB",
                *(workspace.name, kernel.handle.name, latest.files, latest.bytes / 1e6),
            )
            report = await hydrate(kernel, store, workspace.name)
            log.info(
                "Workspace %s is in sandbox %s: %d files, %.2f s",
                *(workspace.name, kernel.handle.name, report.files, report.seconds),
            )
        elif workspace.folder and policy.mode != "none":
            first = await upload(
                kernel,
                store,
                workspace.name,
                workspace.folder,
                policy,
                notebook=workspace.notebook,
            )
            if first is not None:
                log.info("%d files of %s were uploaded", first.files, workspace.folder)
    except SandboxError as error:
        raise WorkspaceError(
            f"The files of workspace {workspace.name!r} could not be brought into sandbox "
            f"{kernel.handle.name!r}: {error} To start the kernel without them, and without "
            f"saving, set SANDBOX_KERNEL_PERSIST=false."
        ) from error
    return workspace, told


def _claim(store: Store, workspace: KernelWorkspace) -> tuple[KernelWorkspace, list[str]]:
    """A workspace that has its name from its notebook's path must be that notebook's."""
    from sandbox_kernel.workspace import identity, name_for_notebook

    if not workspace.notebook or workspace.name != name_for_notebook(workspace.notebook):
        return workspace, []
    id_, told = identity.claim(store, workspace.name, workspace.notebook)
    return replace(workspace, id=id_), [f"{line}." for line in told]


def _update(store: Store, workspace: KernelWorkspace, policy: UploadPolicy, log: Log) -> list[str]:
    """What has changed in the folder comes into the workspace; what did not, in words."""
    from sandbox_kernel.workspace.updates import update_from_folder

    report = update_from_folder(
        store, workspace.name, workspace.folder, policy, notebook=workspace.notebook
    )
    log.info(
        "Of %s, %d files and folders are new or changed, and %d are gone",
        *(workspace.folder, len(report.taken), len(report.deleted)),
    )
    for problem in report.problems[:_MOST_TOLD]:
        log.warning("Not uploaded: %s", problem)
    if not report.conflicts:
        return []
    more = ", ..." if len(report.conflicts) > _MOST_TOLD else ""
    return [
        f"{len(report.conflicts)} files have changed in {workspace.folder} and in workspace "
        f"{workspace.name}: {', '.join(map(printable, report.conflicts[:_MOST_TOLD]))}{more}. The "
        f"kernel has those of the workspace. To get one of the folder's, delete it here, shut the "
        f"kernel down, and start it again."
    ]


async def _bring_folder(
    kernel: SandboxedKernel, folder: str, policy: UploadPolicy, log: Log
) -> None:
    """For a kernel without a workspace: what the policy lets through of a folder. It is not saved.
    On the background loop."""
    from sandbox_kernel.workspace import Store, upload

    with tempfile.TemporaryDirectory(prefix="sandbox-kernel-upload-") as place:
        store = await asyncio.to_thread(Store.open, place)
        try:
            report = await upload(kernel, store, "upload", folder, policy)
        except SandboxError as error:
            raise WorkspaceError(
                f"The files of {folder} could not be brought into sandbox "
                f"{kernel.handle.name!r}: {error} To start the kernel without them, set "
                f"SANDBOX_KERNEL_UPLOAD=none."
            ) from error
    log.info("%d files of %s were uploaded", report.files if report else 0, folder)


def _latest(store: Store, name: str) -> SaveInfo | None:
    return store.latest(name) if not store.retired(name) else None
