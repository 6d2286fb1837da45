"""Brings files into a new sandbox before the first cell: saved ones, and those of the folder."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sandbox_kernel import audit
from sandbox_kernel.errors import SandboxError, WorkspaceError
from sandbox_kernel.jupyter.file_plan import FilePlan
from sandbox_kernel.jupyter.kernel_workspace import KernelWorkspace, open_store
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.untrusted_text import printable

if TYPE_CHECKING:  # lazy: start-up time, and most kernels have no workspace
    from sandbox_kernel.workspace import HydrateReport, Store, UploadPolicy

_MOST_LISTED = 20


async def bring_files(
    kernel: SandboxedKernel, plan: FilePlan
) -> tuple[KernelWorkspace | None, list[str]]:
    """The provisioner calls it for a new sandbox. The kernel's workspace, if it has one, with its
    id in the store, and warnings for the user, which are also logged. On the background loop."""
    workspace, warnings = plan.workspace, list(plan.notices)
    if workspace is not None:
        workspace, more = await _bring_workspace(kernel, workspace)
        warnings += more
    elif plan.unused:
        warnings += await asyncio.to_thread(_unused, plan)
    elif plan.upload != "none":
        from sandbox_kernel.workspace import UploadPolicy

        policy = UploadPolicy.parse(plan.upload)
        if policy.mode != "none":
            warnings += await _bring_folder(kernel, plan.folder, policy)
    for line in warnings:
        kernel.log.warning("Sandbox %s: %s", kernel.handle.name, line)
    return workspace, warnings


def _unused(plan: FilePlan) -> list[str]:
    """Whether the notebook has a saved workspace that a mount leaves aside."""
    try:
        latest = open_store().latest(plan.unused)
    except SandboxError:
        return []  # nothing is read from the store, and nothing is lost in it
    if latest is None or not latest.files:
        return []
    return [
        f"The notebook has a saved workspace, {plan.unused}, with {latest.files} files. It is not "
        f"used: with a mount, the notebook's folder is the workspace. It stays as it is; "
        f"`sandbox-kernel workspace export {plan.unused} FOLDER` writes its files to a folder, and "
        f"`sandbox-kernel workspace rm {plan.unused}` deletes it."
    ]


async def _bring_workspace(
    kernel: SandboxedKernel, workspace: KernelWorkspace
) -> tuple[KernelWorkspace, list[str]]:
    """Bring the latest save into a sandbox, with the changes of the notebook's folder since then
    that ``upload`` selects; without a save, the selected files of the folder."""
    from sandbox_kernel.workspace import UploadPolicy, hydrate, upload

    policy, log = UploadPolicy.parse(workspace.upload), kernel.log
    folder = workspace.folder if policy.mode != "none" else ""
    try:
        store = await asyncio.to_thread(open_store)
        workspace, warnings = await asyncio.to_thread(_claim, store, workspace)
        retired = await asyncio.to_thread(store.retired, workspace.name)
        latest = None if retired else await asyncio.to_thread(store.latest, workspace.name)
        if latest is not None and folder:
            warnings += await asyncio.to_thread(_update, store, workspace, policy, log)
            latest = await asyncio.to_thread(store.find, workspace.name)
        if latest is not None:
            log.info(
                "Bringing workspace %s into sandbox %s: %d files, %.1f MB",
                *(workspace.name, kernel.handle.name, latest.files, latest.bytes / 1e6),
            )
            report = await hydrate(kernel, store, workspace.name)
            facts = {"save": latest.id, "files": report.files, "seconds": report.seconds}
            audit.note(kernel.handle, "hydrated", workspace=workspace.name, **facts)
            log.info(
                "Workspace %s is in sandbox %s: %d files, %.2f s",
                *(workspace.name, kernel.handle.name, report.files, report.seconds),
            )
        elif folder:
            name, notebook = workspace.name, workspace.notebook
            first = await upload(kernel, store, name, folder, policy, notebook=notebook)
            warnings += _uploaded(kernel, first, folder)
    except SandboxError as error:
        raise WorkspaceError(
            f"The files of workspace {workspace.name!r} could not be brought into sandbox "
            f"{kernel.handle.name!r}: {error} To start the kernel without them, and without "
            f"saving, set SANDBOX_KERNEL_PERSIST=false."
        ) from error
    return workspace, warnings


def _uploaded(kernel: SandboxedKernel, report: HydrateReport | None, folder: str) -> list[str]:
    """Note what has come in. A warning about what has not."""
    files = report.files if report else 0
    audit.note(kernel.handle, "uploaded", folder=folder, files=files)
    kernel.log.info("Uploaded %d files of %s to sandbox %s", files, folder, kernel.handle.name)
    imported = report.save.problems if report and report.save else ()
    return _left_out([*imported, *(report.problems if report else ())], folder)


def _left_out(problems: Sequence[str], folder: str) -> list[str]:
    if not problems:
        return []
    more = ", ..." if len(problems) > _MOST_LISTED else ""
    listed = ", ".join(map(printable, problems[:_MOST_LISTED]))
    return [f"{len(problems)} files of {folder} were not brought into the sandbox: {listed}{more}."]


def _claim(store: Store, workspace: KernelWorkspace) -> tuple[KernelWorkspace, list[str]]:
    """Make sure that a workspace which is named after its notebook belongs to it."""
    from sandbox_kernel.workspace import name_for_notebook, notebook_identity

    if not workspace.notebook or workspace.name != name_for_notebook(workspace.notebook):
        return workspace, []
    id_, changes = notebook_identity.claim(store, workspace.name, workspace.notebook)
    return replace(workspace, id=id_), [f"{line}." for line in changes]


def _update(store: Store, workspace: KernelWorkspace, policy: UploadPolicy, log: Log) -> list[str]:
    """Save the changes of the folder in the workspace. A warning about conflicts."""
    from sandbox_kernel.workspace.updates import update_from_folder

    name, folder = workspace.name, workspace.folder
    report = update_from_folder(store, name, folder, policy, notebook=workspace.notebook)
    log.info(
        "Workspace %s: %d files of %s are new or changed, %d are deleted",
        *(name, len(report.taken), folder, len(report.deleted)),
    )
    warnings = _left_out(report.problems, folder)
    if not report.conflicts:
        return warnings
    more = ", ..." if len(report.conflicts) > _MOST_LISTED else ""
    return [
        *warnings,
        f"{len(report.conflicts)} files have changed in {folder} and in workspace {name}: "
        f"{', '.join(map(printable, report.conflicts[:_MOST_LISTED]))}{more}. The kernel has the "
        f"workspace's versions. To use one of the folder's, delete the file here, shut the kernel "
        f"down, and start it again.",
    ]


async def _bring_folder(kernel: SandboxedKernel, folder: str, policy: UploadPolicy) -> list[str]:
    """Bring the selected files of a folder into a sandbox, through a temporary store. A warning
    about what does not come."""
    from sandbox_kernel.workspace import Store, upload

    place = await asyncio.to_thread(tempfile.mkdtemp, prefix="sandbox-kernel-upload-")
    try:
        store = await asyncio.to_thread(Store.open, place)
        report = await upload(kernel, store, "upload", folder, policy)
    except SandboxError as error:
        raise WorkspaceError(
            f"The files of {folder} could not be brought into sandbox {kernel.handle.name!r}: "
            f"{error} To start the kernel without them, set SANDBOX_KERNEL_UPLOAD=none "
            f"(or SANDBOX_KERNEL_FILES=none)."
        ) from error
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, place, ignore_errors=True))
    return _uploaded(kernel, report, folder)
