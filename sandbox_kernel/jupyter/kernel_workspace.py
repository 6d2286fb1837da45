"""The saved workspace of a kernel: which one it is, and saving the kernel's files in it.

A kernel has a workspace if the setting ``workspace`` names one, or if the path of its notebook is
known: from ``JPY_SESSION_NAME``, which Jupyter Server sets, or ``SANDBOX_KERNEL_WORKSPACE``. Other
kernels have one for themselves if their results go back to a folder (``file_plan.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sandbox_kernel import audit
from sandbox_kernel.errors import SandboxError, SandboxPaused, SandboxTimeout, SpecError, StoreError
from sandbox_kernel.jupyter.death_message import visible_log
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.sandboxes.base import SandboxHandle, SandboxInfo
from sandbox_kernel.spec import NOTEBOOK, KernelConfiguration
from sandbox_kernel.tunnel.background import aside, run
from sandbox_kernel.untrusted_text import printable

if TYPE_CHECKING:  # lazy: start-up time, and most kernels have no workspace
    from sandbox_kernel.workspace import Leftovers, SaveReport, Store
    from sandbox_kernel.workspace.reports import OnProgress, Progress

LAST_SAVE_TIMEOUT = 120.0
"""Seconds without progress after which a last save fails."""
SILENCE, RESUMING = 20.0, 60.0
"""Seconds of silence of the sandbox after which a last save fails; of one that must be resumed."""
_LOOK, _LOG_EVERY = 0.5, 15.0


@dataclass(frozen=True)
class KernelWorkspace:
    """Where a kernel's files are saved."""

    name: str
    notebook: str = ""
    """Path of the notebook on the host; empty if unknown."""
    folder: str = ""
    """The notebook's folder, for ``upload`` and ``mirror``."""
    named: bool = False
    """The user chose the name, so it does not follow the notebook."""
    upload: str | tuple[str, ...] = "none"
    mirror: bool = False
    mirror_delete: bool = False
    id: str = ""
    """The store's id of a notebook's own workspace, which survives a rename; else empty."""
    kernel_name: str = ""
    """Name of the kernelspec, for the workspace's history."""
    passing: bool = False
    """It is of one kernel only, and over when all its results are in the folder."""


def workspace_of(
    configuration: KernelConfiguration, env: Mapping[str, str], cwd: str | None, kernel_name: str
) -> KernelWorkspace | None:
    """The workspace of a kernel that is to be started; None if it has none."""
    notebook = configuration.notebook or notebook_in(env)
    name = configuration.workspace
    if not (name or notebook) or not configuration.persist:
        return None
    if not name:
        from sandbox_kernel.workspace import name_for_notebook

        name = name_for_notebook(notebook)
    return KernelWorkspace(
        name=name,
        notebook=notebook,
        folder=os.path.dirname(notebook) if notebook else folder_of(cwd),
        named=configuration.workspace is not None or bool(configuration.notebook),
        upload=configuration.upload,
        mirror=configuration.mirror,
        mirror_delete=configuration.mirror_delete,
        kernel_name=kernel_name,
    )


def notebook_in(env: Mapping[str, str]) -> str:
    """Path of the notebook that Jupyter Server starts a kernel for; empty if there is none."""
    named = env.get("JPY_SESSION_NAME", "")
    return os.path.abspath(named) if named.endswith(NOTEBOOK) else ""


def folder_of(cwd: str | None) -> str:
    """The host folder of a kernel whose notebook is unknown. SpecError if it was deleted."""
    try:
        return os.path.abspath(cwd or os.getcwd())
    except FileNotFoundError:
        raise SpecError(
            "The sandbox was not created: the folder in which this program runs was deleted. "
            "Start it again in another one."
        ) from None


def from_dict(values: Mapping[str, Any], kernel_name: str) -> KernelWorkspace:
    """The inverse of ``dataclasses.asdict``; earlier versions wrote no ``kernel_name``."""
    upload = values["upload"]
    upload = upload if isinstance(upload, str) else tuple(upload)
    return KernelWorkspace(**{**values, "upload": upload, "kernel_name": kernel_name})


def open_store(url: str = "") -> Store:
    """The store of this process, or another one. Blocks. StoreError."""
    default, data_dir = map(os.environ.get, ("SANDBOX_KERNEL_STORE", "SANDBOX_KERNEL_DATA_DIR"))
    return _store(url or default or "", data_dir)


@functools.lru_cache(maxsize=4)
def _store(url: str, data_dir: str | None) -> Store:
    from sandbox_kernel.workspace import Store

    return Store.open(url)


async def save(
    kernel: SandboxedKernel, workspace: KernelWorkspace, *, wake: bool = True
) -> SaveReport:
    """Save the files of a kernel now. Resumes a paused sandbox, or raises SandboxPaused without
    ``wake``. The workspace's history records a failure. On any loop."""
    if kernel.tunnel.paused and not wake:
        paused = SandboxPaused(
            f"Sandbox {kernel.handle.name!r} is paused, and its files were not saved before. "
            f"Run a cell, which resumes it, and save again."
        )
        store = await asyncio.to_thread(open_store)
        await asyncio.to_thread(_note_failure, store, workspace, kernel.handle, paused)
        raise paused
    report = await _persist(kernel, workspace)
    workspace = replace(workspace, name=report.save.workspace)
    return replace(report, also=await asyncio.to_thread(_mirror, workspace, kernel.log))


async def _persist(
    kernel: SandboxedKernel,
    workspace: KernelWorkspace,
    store: Store | None = None,
    progress: OnProgress | None = None,
    silence: float | None = None,
) -> SaveReport:
    from sandbox_kernel.workspace import persist

    if store is None:
        store = await aside(open_store)
    try:
        report = await persist(
            kernel,
            store,
            await _present_name(store, workspace),
            notebook=workspace.notebook,
            kernel=workspace.kernel_name,
            progress=progress,
            stalled_after=silence,
        )
        return await _settled(report, store, workspace, kernel.handle, kernel.log)
    except SandboxError as error:
        await aside(_note_failure, store, workspace, kernel.handle, error)
        raise


async def _present_name(store: Store, workspace: KernelWorkspace) -> str:
    """A workspace may have been renamed."""
    from sandbox_kernel.workspace import notebook_identity

    return await aside(notebook_identity.place_of, store, workspace.name, workspace.id)


async def _settled(
    report: SaveReport, store: Store, workspace: KernelWorkspace, handle: SandboxHandle, log: Log
) -> SaveReport:
    """The report, with the workspace's name if it was renamed during the save."""
    from sandbox_kernel.workspace import notebook_identity

    settled = await aside(notebook_identity.settle, store, report.save, workspace.id)
    log.info("%s, from sandbox %s", report, handle.name)
    if report.new:
        facts = {"files": settled.files, "bytes": settled.bytes, "seconds": report.seconds}
        audit.note(handle, "saved", workspace=settled.workspace, save=settled.id, **facts)
    return replace(report, save=settled)


def _note_failure(
    store: Store, workspace: KernelWorkspace, handle: SandboxHandle, error: SandboxError
) -> None:
    audit.note(handle, "not-saved", workspace=workspace.name, why=str(error))
    if isinstance(error, StoreError):
        return  # noting it in the same store would fail, too, and take as long
    with contextlib.suppress(StoreError):
        store.note_failure(workspace.name, handle.backend, handle.name, error)


def _mirror(workspace: KernelWorkspace, log: Log) -> list[str]:
    """Write the latest save back to the folder. The problems: none of them undoes the save."""
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
        problem = f"The files are saved, but were not written to {workspace.folder}: {error}"
        visible_log(log).error("Workspace %s: %s", workspace.name, problem)
        return [problem]
    if written.trash:
        log.info(
            "Workspace %s: replaced and deleted files of %s are in %s",
            *(workspace.name, workspace.folder, written.trash),
        )
    if written.skipped:
        visible_log(log).warning(
            "%d files of workspace %s were not written to %s: %s. `sandbox-kernel workspace export "
            "%s FOLDER` writes them elsewhere.",
            *(len(written.skipped), workspace.name, workspace.folder),
            *(", ".join(written.skipped[:20]), workspace.name),
        )
    return [f"not written to {workspace.folder}: {line}" for line in written.skipped]


async def last_save(
    kernel: SandboxedKernel,
    workspace: KernelWorkspace,
    *,
    limit: float | None = None,
    store: Store | None = None,
) -> str:
    """The last save before the sandbox is paused, left or removed: the reason, also logged, if it
    failed; empty if the files are saved. On any loop.

    It fails when the sandbox has been silent for ``SILENCE`` seconds, or when there was no progress
    for ``limit`` seconds (``LAST_SAVE_TIMEOUT``).
    """
    handle, failure, log = kernel.handle, kernel.tunnel.failure, kernel.log
    where = f"Workspace {workspace.name} of sandbox {handle.name}"
    limit, progress = limit or LAST_SAVE_TIMEOUT, SaveProgress()
    if failure is None:
        silence = min(limit, RESUMING if kernel.tunnel.paused else SILENCE)
        saving = _persist(kernel, workspace, store, progress, silence)
    else:
        saving = save_stopped(handle, failure, workspace, log, progress, store)
    try:
        report = await while_progressing(saving, progress, workspace, handle, log, limit)
    except (SandboxError, OSError) as error:
        log.error("%s was not saved: %s", where, error)
        return str(error)
    except Exception as error:  # whatever it is, the only copy must be kept
        log.exception("%s was not saved", where)
        return f"{type(error).__name__}: {error}"
    workspace = replace(workspace, name=report.save.workspace)
    if left_out := report.save.problems:
        listed = ", ".join(map(printable, left_out[:20]))
        words = "%s: %d files were not saved: %s"
        visible_log(log).warning(words, where, len(left_out), listed)
    try:
        async with asyncio.timeout(LAST_SAVE_TIMEOUT):
            problems = await asyncio.to_thread(_mirror, workspace, log)
        if workspace.passing and not problems:
            await aside(_retire, store or open_store(), workspace)
    except TimeoutError:
        folder, limit = workspace.folder, LAST_SAVE_TIMEOUT
        log.error("%s is saved, but was not written to %s within %g s", where, folder, limit)
    return ""


def _retire(store: Store, workspace: KernelWorkspace) -> None:
    """Its files stay until ``workspace gc``."""
    with contextlib.suppress(StoreError):
        store.retire(workspace.name)


class SaveProgress:
    """How far a save has come; the save calls it."""

    def __init__(self) -> None:
        self.files = self.scanned = self.sent = 0

    def __call__(self, value: Progress) -> None:
        if value.phase == "scan":
            self.files = max(self.files, value.files)
            self.scanned = max(self.scanned, value.bytes)
        else:
            self.sent = max(self.sent, value.bytes)


async def while_progressing(
    saving: Coroutine[Any, Any, SaveReport],
    progress: SaveProgress,
    workspace: KernelWorkspace,
    handle: SandboxHandle,
    log: Log,
    limit: float | None = None,
) -> SaveReport:
    """Run a save for as long as it makes progress. SandboxTimeout if there was none for ``limit``
    seconds (``LAST_SAVE_TIMEOUT``). On any loop."""
    limit = limit or LAST_SAVE_TIMEOUT
    task = asyncio.ensure_future(run(saving))
    began = moved = logged = time.monotonic()
    seen = dict(vars(progress))
    try:
        while not (await asyncio.wait([task], timeout=_LOOK))[0]:
            now = time.monotonic()
            if seen != vars(progress):
                seen, moved = dict(vars(progress)), now
            if now - moved > limit:
                raise SandboxTimeout(
                    f"no progress for {limit:g} s ({progress.files} files scanned, "
                    f"{progress.sent / 1e6:.1f} MB sent); the store may be slow or not answer."
                )
            if now - logged > _LOG_EVERY:
                logged = now
                log.info(
                    "Saving workspace %s of sandbox %s: %d files scanned, %.1f MB sent, %.0f s",
                    *(workspace.name, handle.name),
                    *(progress.files, progress.sent / 1e6, now - began),
                )
    except BaseException:
        task.cancel()
        await asyncio.wait([task], timeout=_LOOK * 10)
        raise
    return task.result()


async def save_stopped(
    handle: SandboxHandle,
    why: SandboxError,
    workspace: KernelWorkspace,
    log: Log,
    progress: OnProgress,
    store: Store | None = None,
) -> SaveReport:
    """Save the files of an ended sandbox, if this machine has them; else raise ``why`` the sandbox
    cannot be asked. On the background loop."""
    from sandbox_kernel.workspace import save_leftovers

    left = await leftovers(handle)
    if left is None:
        raise why
    if store is None:
        store = await aside(open_store)
    cancelled = threading.Event()
    try:
        report = await aside(
            save_leftovers,
            store,
            await _present_name(store, workspace),
            left,
            notebook=workspace.notebook,
            kernel=workspace.kernel_name,
            backend=handle.backend,
            sandbox=handle.name,
            progress=progress,
            cancelled=cancelled,
        )
        return await _settled(report, store, workspace, handle, log)
    finally:
        cancelled.set()


async def leftovers(handle: SandboxHandle) -> Leftovers | None:
    """The files of an ended sandbox on this machine; None if it runs, or left none."""
    try:
        async with asyncio.timeout(SILENCE):
            info = await handle.info()
    except (SandboxError, OSError, TimeoutError):
        return None
    return await asyncio.to_thread(files_on_host, info) if info.status == "stopped" else None


def files_on_host(info: SandboxInfo) -> Leftovers | None:
    """Where this machine has the files of a sandbox once it has ended; None if nowhere. Blocks."""
    from sandbox_kernel.workspace import Leftovers

    image, folder = info.detail.get("image"), info.detail.get("workspace")
    if isinstance(image, dict):
        return Leftovers(**image)
    if isinstance(folder, str) and not folder.startswith("/proc/") and os.path.isdir(folder):
        return Leftovers(folder)
    return None
