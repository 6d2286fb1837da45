"""The saved workspace of a kernel: which it is, and how it is saved.

A kernel has one if it was given a name (``workspace``, ``SANDBOX_KERNEL_WORKSPACE``), or if it
runs a notebook whose path is known (``JPY_SESSION_NAME``, which Jupyter Server sets, or
``SANDBOX_KERNEL_WORKSPACE``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sandbox_kernel.errors import (
    SandboxError,
    SandboxPaused,
    SandboxTimeout,
    StoreError,
)
from sandbox_kernel.jupyter.configuration import KernelConfiguration
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.tunnel.background import aside, run

if TYPE_CHECKING:  # it takes time to import, and most kernels have no workspace
    from sandbox_kernel.workspace import Leftovers, SaveReport, Store
    from sandbox_kernel.workspace.reports import OnProgress, Progress

LAST_SAVE_TIMEOUT = 120.0
"""Seconds without progress after which a last save is given up."""
SILENCE, RESUMING = 20.0, 60.0
"""Seconds without a sign of the sandbox, likewise; and of one that has to be resumed first."""
_LOOK, _TELL_EVERY = 0.5, 15.0


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
    mirror_delete: bool = False
    id: str = ""
    """The store's own, for a workspace that belongs to its notebook: it stays when the name does
    not. Empty if the user chose the name."""


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
        folder=os.path.dirname(notebook) if notebook else folder_of(cwd),
        named=configuration.spec.workspace is not None or bool(configuration.notebook),
        upload=configuration.upload,
        mirror=configuration.mirror,
        mirror_delete=configuration.mirror_delete,
    )


def notebook_of(workspace: KernelWorkspace | None, env: Mapping[str, str]) -> str:
    """Path of the notebook that a kernel was started for, also if its files are not saved."""
    named = env.get("JPY_SESSION_NAME", "")
    if workspace is not None and workspace.notebook:
        return workspace.notebook
    return os.path.abspath(named) if named.endswith(NOTEBOOK) else ""


def folder_of(cwd: str | None) -> str:
    """The folder in which a kernel would run that is no notebook's, or whose is not known."""
    return os.path.abspath(cwd or os.getcwd())


def from_dict(values: Mapping[str, Any] | None) -> KernelWorkspace | None:
    """What ``dataclasses.asdict`` made of it."""
    if values is None:
        return None
    upload = values["upload"]
    return KernelWorkspace(
        **{**values, "upload": upload if isinstance(upload, str) else tuple(upload)}
    )


def open_store(url: str = "") -> Store:
    """The store of this process, or another one. Blocks; WorkspaceError if it cannot be used."""
    return _store(
        url or os.environ.get("SANDBOX_KERNEL_STORE", ""), os.environ.get("SANDBOX_KERNEL_DATA_DIR")
    )


@functools.lru_cache(maxsize=4)
def _store(url: str, data_dir: str | None) -> Store:
    from sandbox_kernel.workspace import Store

    return Store.open(url)


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
    if kernel.tunnel.paused and not wake:
        paused = SandboxPaused(
            f"Sandbox {kernel.handle.name!r} is paused, and its files were not saved before. "
            f"Run a cell, which resumes it, and save again."
        )
        store = await asyncio.to_thread(open_store)
        await asyncio.to_thread(_note_failure, store, workspace, kernel.handle, paused)
        raise paused
    report = await _persist(kernel, workspace, kernel_name, log)
    workspace = replace(workspace, name=report.save.workspace)
    return replace(report, also=await asyncio.to_thread(_mirror, workspace, log))


async def _persist(
    kernel: SandboxedKernel,
    workspace: KernelWorkspace,
    kernel_name: str,
    log: Log,
    *,
    store: Store | None = None,
    progress: OnProgress | None = None,
    silence: float | None = None,
) -> SaveReport:
    from sandbox_kernel.workspace import identity, persist

    if store is None:
        store = await aside(open_store)
    try:
        name = await aside(identity.place_of, store, workspace.name, workspace.id)
        report = await persist(
            kernel,
            store,
            name,
            notebook=workspace.notebook,
            kernel=kernel_name,
            progress=progress,
            stalled_after=silence,
        )
        settled = await aside(identity.settle, store, report.save, workspace.id)
    except SandboxError as error:
        await aside(_note_failure, store, workspace, kernel.handle, error)
        raise
    log.info("%s", report)
    return replace(report, save=settled)


def _note_failure(
    store: Store, workspace: KernelWorkspace, handle: SandboxHandle, error: SandboxError
) -> None:
    if isinstance(error, StoreError):
        return  # it could not be noted there, either, and would take as long again
    with contextlib.suppress(StoreError):
        store.note_failure(workspace.name, handle.backend, handle.name, error)


def _mirror(workspace: KernelWorkspace, log: Log) -> list[str]:
    """Write what was saved back to the folder; what could not be written, and why. The files are
    saved: whatever fails here does not undo that."""
    if not (workspace.mirror and workspace.folder):
        return []
    from sandbox_kernel.workspace import export

    try:
        written = export(
            open_store(),
            workspace.name,
            workspace.folder,
            delete=workspace.mirror_delete,
            mirror=True,
            notebook=workspace.notebook,
        )
    except (SandboxError, OSError) as error:
        told = f"The files are saved, but were not written to {workspace.folder}: {error}"
        log.error("Workspace %s: %s", workspace.name, told)
        return [told]
    if written.trash:
        log.info("What was replaced or deleted in %s is in %s", workspace.folder, written.trash)
    if written.skipped:
        log.warning(
            "%d files of workspace %s were not written to %s: %s",
            *(len(written.skipped), workspace.name, workspace.folder),
            ", ".join(written.skipped[:20]),
        )
    return [f"not written to {workspace.folder}: {line}" for line in written.skipped]


async def last_save(
    kernel: SandboxedKernel,
    workspace: KernelWorkspace,
    kernel_name: str,
    log: Log,
    *,
    limit: float | None = None,
    store: Store | None = None,
) -> str:
    """The last save, before the sandbox is paused, left or removed: why it was not made, in words,
    which are in the log, too; empty if the files are saved. On any loop.

    It takes as long as it goes on: it is given up when the sandbox has been silent for ``SILENCE``
    seconds, or when nothing has come forward for ``limit`` seconds (``LAST_SAVE_TIMEOUT``).
    """
    failure, limit = kernel.tunnel.failure, limit or LAST_SAVE_TIMEOUT

    def begin(progress: OnProgress) -> Coroutine[Any, Any, SaveReport]:
        if failure is not None:
            return save_stopped(
                kernel.handle, failure, workspace, kernel_name, log, store, progress
            )
        silence = min(limit, RESUMING if kernel.tunnel.paused else SILENCE)
        return _persist(
            kernel, workspace, kernel_name, log, store=store, progress=progress, silence=silence
        )

    try:
        report = await while_it_goes_on(begin, workspace.name, kernel.handle.name, log, limit)
    except (SandboxError, OSError) as error:
        log.error("Workspace %s was not saved: %s", workspace.name, error)
        return str(error)
    except Exception as error:  # whatever it is, the only copy must be kept
        log.error("Workspace %s was not saved: %r", workspace.name, error, exc_info=error)
        return f"{type(error).__name__}: {error}"
    workspace = replace(workspace, name=report.save.workspace)
    try:
        await asyncio.wait_for(asyncio.to_thread(_mirror, workspace, log), LAST_SAVE_TIMEOUT)
    except asyncio.TimeoutError:
        log.error(
            "Workspace %s is saved, but was not written to %s within %g s",
            *(workspace.name, workspace.folder, LAST_SAVE_TIMEOUT),
        )
    return ""


async def while_it_goes_on(
    begin: Callable[[OnProgress], Coroutine[Any, Any, SaveReport]],
    workspace: str,
    sandbox: str,
    log: Log,
    limit: float | None = None,
) -> SaveReport:
    """What a save gives that is begun here; SandboxTimeout if nothing has come forward for
    ``limit`` seconds (``LAST_SAVE_TIMEOUT``). On any loop."""
    limit = limit or LAST_SAVE_TIMEOUT
    far = (0, 0, 0)
    """How far it is: files that were seen, bytes that were looked at, bytes that have come."""

    def progress(value: Progress) -> None:
        nonlocal far
        if value.phase == "scan":
            far = max(far[0], value.files), max(far[1], value.bytes), far[2]
        else:
            far = far[0], far[1], max(far[2], value.bytes)

    saving = asyncio.ensure_future(run(begin(progress)))
    started = moved = told = time.monotonic()
    seen = far
    try:
        while not (await asyncio.wait([saving], timeout=_LOOK))[0]:
            now = time.monotonic()
            if far != seen:
                seen, moved = far, now
            if now - moved > limit:
                raise SandboxTimeout(
                    f"for {limit:g} s nothing has come forward ({seen[0]} files seen, "
                    f"{seen[2] / 1e6:.1f} MB sent); the store may be slow, or not answer."
                )
            if now - told > _TELL_EVERY:
                told = now
                log.info(
                    "Saving workspace %s of sandbox %s: %d files seen, %.1f MB sent, %.0f s",
                    *(workspace, sandbox, seen[0], seen[2] / 1e6, now - started),
                )
    except BaseException:
        saving.cancel()
        await asyncio.wait([saving], timeout=_LOOK * 10)
        raise
    return saving.result()


async def save_stopped(
    handle: SandboxHandle,
    why: SandboxError,
    workspace: KernelWorkspace,
    kernel_name: str,
    log: Log,
    store: Store | None = None,
    progress: OnProgress = lambda progress: None,
) -> SaveReport:
    """Save the files of a sandbox that has ended, if they are in a folder of this machine; else
    raises ``why`` it cannot be asked for them. On the background loop."""
    from sandbox_kernel.workspace import identity, save_leftovers

    left = await leftovers(handle)
    if left is None:
        raise why
    if store is None:
        store = await aside(open_store)
    name = await aside(identity.place_of, store, workspace.name, workspace.id)
    wanted = True

    def go_on() -> None:
        if not wanted:
            raise SandboxTimeout("It is not waited for any more.")

    try:
        report = await aside(
            save_leftovers,
            store,
            name,
            left,
            notebook=workspace.notebook,
            kernel=kernel_name,
            backend=handle.backend,
            sandbox=handle.name,
            progress=progress,
            go_on=go_on,
        )
    finally:
        wanted = False
    settled = await aside(identity.settle, store, report.save, workspace.id)
    log.info("%s, from what sandbox %s has left", report, handle.name)
    return replace(report, save=settled)


async def leftovers(handle: SandboxHandle) -> Leftovers | None:
    """Where, on this machine, the files of a sandbox are that has ended; None if it runs, or if
    there are none."""
    from sandbox_kernel.workspace import Leftovers

    try:
        info = await asyncio.wait_for(handle.info(), SILENCE)
    except (SandboxError, OSError, asyncio.TimeoutError):
        return None
    if info.status != "stopped":
        return None
    image, folder = info.detail.get("image"), info.detail.get("workspace")
    if isinstance(image, dict):
        return Leftovers(**image)
    if isinstance(folder, str) and await asyncio.to_thread(os.path.isdir, folder):
        return Leftovers(folder)
    return None
