"""The saved workspace of a kernel: which it is, how it comes into a new sandbox, when it is saved.

A kernel has one if it was given a name (``workspace``, ``SANDBOX_KERNEL_WORKSPACE``), or if it
runs a notebook whose path is known (``JPY_SESSION_NAME``, which Jupyter Server sets, or
``SANDBOX_KERNEL_WORKSPACE``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandbox_kernel.errors import SandboxError, SandboxPaused, StoreError, WorkspaceError
from sandbox_kernel.jupyter.configuration import KernelConfiguration
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.tunnel.background import run

if TYPE_CHECKING:  # it takes time to import, and most kernels have no workspace
    from sandbox_kernel.workspace import SaveInfo, SaveReport, Store

LAST_SAVE_TIMEOUT = 120.0


@dataclass(frozen=True)
class KernelWorkspace:
    """Where a kernel's files are saved."""

    name: str
    notebook: str = ""
    """Path of the notebook on the host; empty if it is not known."""
    folder: str = ""
    """The host folder that is beside the notebook, for the first opening and for ``mirror``."""
    named: bool = False
    """The user chose the name, so it does not follow the notebook."""
    upload: str | tuple[str, ...] = "none"
    mirror: bool = False


def workspace_of(
    configuration: KernelConfiguration, env: Mapping[str, str], cwd: str | None
) -> KernelWorkspace | None:
    """The workspace of a kernel that is started so; None if it has none."""
    notebook = configuration.notebook or env.get("JPY_SESSION_NAME", "")
    if not notebook.endswith(NOTEBOOK):
        notebook = ""
    notebook = os.path.abspath(notebook) if notebook else ""
    name = configuration.spec.workspace
    if not (name or notebook) or not configuration.persist:
        return None
    if not name:
        from sandbox_kernel.workspace import name_for_notebook

        name = name_for_notebook(notebook)
    return KernelWorkspace(
        name=name,
        notebook=notebook,
        folder=os.path.dirname(notebook) if notebook else cwd or "",
        named=configuration.spec.workspace is not None or bool(configuration.notebook),
        upload=configuration.upload,
        mirror=configuration.mirror,
    )


def from_dict(values: Mapping[str, Any] | None) -> KernelWorkspace | None:
    """What ``dataclasses.asdict`` made of it."""
    if values is None:
        return None
    upload = values["upload"]
    return KernelWorkspace(
        **{**values, "upload": upload if isinstance(upload, str) else tuple(upload)}
    )


def open_store() -> Store:
    """The store of this process. Blocks; WorkspaceError if it cannot be used."""
    return _store(
        os.environ.get("SANDBOX_KERNEL_STORE", ""), os.environ.get("SANDBOX_KERNEL_DATA_DIR")
    )


@functools.lru_cache(maxsize=4)
def _store(url: str, data_dir: str | None) -> Store:
    from sandbox_kernel.workspace import Store

    return Store.open(url)


async def bring_in(kernel: SandboxedKernel, workspace: KernelWorkspace, log: Log) -> None:
    """Before the first cell of a new sandbox: the files of the latest save or, if there is none,
    what the policy lets through of the folder beside the notebook. On the background loop."""
    from sandbox_kernel.workspace import UploadPolicy, hydrate, upload

    policy = UploadPolicy.parse(workspace.upload)
    try:
        store = await asyncio.to_thread(open_store)
        latest = await asyncio.to_thread(_latest, store, workspace.name)
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


def _latest(store: Store, name: str) -> SaveInfo | None:
    return store.latest(name) if not store.retired(name) else None


async def save(
    kernel: SandboxedKernel,
    workspace: KernelWorkspace,
    kernel_name: str,
    log: Log,
    *,
    wake: bool = True,
) -> SaveReport:
    """Save the files of a kernel now, also if it must be resumed for that, unless it is not to be
    woken. A failure is noted in the workspace's history, too. On any loop."""
    from sandbox_kernel.workspace import export, persist

    store = await asyncio.to_thread(open_store)
    try:
        if kernel.tunnel.paused and not wake:
            raise SandboxPaused(
                f"Sandbox {kernel.handle.name!r} is paused, and its files were not saved before. "
                f"Run a cell, which resumes it, and save again."
            )
        report = await persist(
            kernel, store, workspace.name, notebook=workspace.notebook, kernel=kernel_name
        )
    except SandboxError as error:
        with contextlib.suppress(StoreError):  # then it is the store that has failed
            await asyncio.to_thread(
                store.note_failure, workspace.name, kernel.handle.backend, kernel.handle.name, error
            )
        raise
    log.info("%s", report)
    if workspace.mirror and workspace.folder:
        written = await asyncio.to_thread(
            export, store, workspace.name, workspace.folder, delete=True, mirror=True
        )
        if written.skipped:
            log.warning(
                "%d files of workspace %s were not written to %s: %s",
                *(len(written.skipped), workspace.name, workspace.folder),
                ", ".join(written.skipped[:20]),
            )
    return report


async def save_or_tell(
    kernel: SandboxedKernel, workspace: KernelWorkspace, kernel_name: str, log: Log
) -> bool:
    """The last save, before the sandbox is paused, left or removed. Its failure is told, and ends
    nothing. Whether the files are saved. On any loop."""
    if kernel.tunnel.failure is not None:
        log.warning(
            "Workspace %s was not saved: its sandbox cannot be reached (%s)",
            *(workspace.name, kernel.tunnel.failure),
        )
        return False
    try:
        await asyncio.wait_for(run(save(kernel, workspace, kernel_name, log)), LAST_SAVE_TIMEOUT)
        return True
    except asyncio.TimeoutError:
        log.error("Workspace %s was not saved within %g s", workspace.name, LAST_SAVE_TIMEOUT)
    except (SandboxError, OSError) as error:
        log.error("Workspace %s was not saved: %s", workspace.name, error)
    return False
