"""The end of a kernel's sandbox. If its files cannot be saved, the sandbox is kept.

A kernel that is shut down ends in any case. Its sandbox is removed when its files are saved; until
then it has the only copy. It is kept, paused if the backend can, with a note in its record
(``sandboxes/unsaved_files.py``). ``sandbox-kernel workspace save`` and the next start of the same
notebook try again. The note is written before the last save begins, so a killed process leaves it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sandbox_kernel import audit
from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxNotFound, WorkspaceError
from sandbox_kernel.host_processes import ProcessId
from sandbox_kernel.jupyter import kernel_factory, kernel_workspace
from sandbox_kernel.jupyter.death_message import visible_log
from sandbox_kernel.jupyter.kernel_workspace import KernelWorkspace
from sandbox_kernel.jupyter.process_exit import disown
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes import unsaved_files as notes
from sandbox_kernel.sandboxes.backends import backend_names, load_backend
from sandbox_kernel.sandboxes.base import SandboxHandle, SandboxInfo
from sandbox_kernel.sandboxes.unsaved_files import Unsaved
from sandbox_kernel.tunnel.background import aside, run

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.workspace import Store

_PATIENCE = 20.0
"""Seconds for one step of keeping a sandbox."""
_LOOK = 0.2
_UNFINISHED = "the process that was to save them has ended."


async def end(
    kernel: SandboxedKernel, workspace: KernelWorkspace | None, limit: float | None = None
) -> Unsaved | None:
    """End a kernel with its sandbox, after a last save. If that fails, keep the sandbox and return
    the note about it. ``limit`` as for ``kernel_workspace.last_save``. On any loop."""
    handle, log = kernel.handle, kernel.log
    if workspace is not None and not (kernel.taken_over or kernel.at_rest):
        # A sandbox that is paused on exit stays even when its files are saved.
        kept = not kernel.pause_on_exit
        unsaved = make_note(handle, workspace, _UNFINISHED, kept=kept)
        await run(_announce(unsaved, log))
        reason = await kernel_workspace.last_save(kernel, workspace, limit=limit)
        if reason and not kernel.taken_over:
            note = await run(_keep(kernel, replace(unsaved, reason=reason)))
            if note is not None:
                return note
            log.error("Sandbox %s is gone, with its unsaved files.", handle.name)
        elif kernel.pause_on_exit or kernel.taken_over:
            await run(asyncio.to_thread(notes.clear, handle.backend, handle.name))
    await run(kernel_factory.remove_kernel(kernel))
    return None


def make_note(
    handle: SandboxHandle, workspace: KernelWorkspace, reason: str, *, kept: bool = True
) -> Unsaved:
    return Unsaved(
        *(handle.backend, handle.name, asdict(workspace), reason),
        store=os.environ.get("SANDBOX_KERNEL_STORE", ""),
        kernel=workspace.kernel_name,
        kept=kept,
    )


async def note_lost(kernel: SandboxedKernel, workspace: KernelWorkspace, reason: str) -> None:
    """Before a kernel goes on in another sandbox: note the files of a lost one, to be saved before
    the new sandbox begins with an older save. On the background loop."""
    if await kernel_workspace.leftovers(kernel.handle) is not None:
        note = make_note(kernel.handle, workspace, reason, kept=False)
        await asyncio.to_thread(notes.note, note)


async def _announce(unsaved: Unsaved, log: Log) -> None:
    """Note that this process begins the last save."""
    process = ProcessId.of(os.getpid())
    unsaved = replace(unsaved, process=(process.pid, process.start) if process else ())
    try:
        await asyncio.to_thread(notes.note, unsaved)
    except OSError as error:
        log.warning("Sandbox %s: cannot note its unsaved files: %s", unsaved.sandbox, error)


async def _keep(kernel: SandboxedKernel, unsaved: Unsaved) -> Unsaved | None:
    """Keep the sandbox with its files, without its kernel. The note about it; None if there is
    nothing to keep. On the background loop."""
    name, log, place = kernel.handle.name, kernel.log, ""
    try:
        async with asyncio.timeout(_PATIENCE):
            info = await kernel.handle.info()
        place = await asyncio.to_thread(_place, info)
        startable = info.status != "stopped" or kernel.client.capabilities.restart
        if info.status == "gone" or not (startable or place):
            return None
    except (SandboxError, OSError, TimeoutError) as error:
        log.warning("Sandbox %s does not report its state: %s", name, error)
    unsaved = replace(unsaved, place=place)
    try:
        if not await asyncio.to_thread(notes.note, unsaved):
            return None
    except OSError as error:
        log.error("Sandbox %s is kept, but its record does not say why: %s", name, error)
    try:
        if kernel.exit_code is None and not place:
            async with asyncio.timeout(_PATIENCE):
                await kernel.send_signal(signal.SIGKILL)
    except (SandboxError, OSError, TimeoutError) as error:
        log.warning("The kernel in sandbox %s could not be ended: %s", name, error)
    await kernel.release()
    disown(kernel)
    try:
        if kernel.client.capabilities.pause:
            async with asyncio.timeout(_PATIENCE):
                await kernel.handle.pause()
                audit.note(kernel.handle, "paused", why="its files could not be saved")
        elif place:  # its processes are not needed any more
            await kernel.handle.kill()
    except (SandboxError, OSError, TimeoutError) as error:
        log.warning("Sandbox %s is kept, but could not be paused: %s", name, error)
    visible_log(log).warning("%s", advice(unsaved))
    return unsaved


def _place(info: SandboxInfo) -> str:
    """Where this machine has the files of a sandbox once it has ended; empty if nowhere."""
    left = kernel_workspace.files_on_host(info)
    has_files = left is not None and (left.image or os.listdir(left.folder))
    return str(left) if has_files else ""


def advice(unsaved: Unsaved) -> str:
    """Tells the user about unsaved files, and what to do."""
    where = f" They are in {unsaved.place}." if unsaved.place else ""
    return (
        f"{unsaved}{where} The sandbox is kept. `sandbox-kernel workspace save {unsaved.name}` "
        f"tries again; `sandbox-kernel rm --force {unsaved.sandbox}` gives the files up."
    )


async def save_first(workspace: KernelWorkspace, log: Log) -> None:
    """Before a workspace is brought into a new sandbox: save its unsaved files in others.
    WorkspaceError if that fails; files on another host only give a warning."""
    for unsaved in await asyncio.to_thread(notes.unsaved_of, backend_names(), workspace.name):
        if unsaved.name != workspace.name:
            continue  # a sandbox with the workspace's name
        if unsaved.elsewhere and not load_backend(unsaved.backend).capabilities.hosted:
            visible_log(log).warning(
                "%s They are on another host, where `sandbox-kernel workspace save %s` saves them. "
                "This kernel begins with older files.",
                *(unsaved, unsaved.name),
            )
            continue
        try:
            if await _outdated(unsaved):
                visible_log(log).warning(
                    "%s Another sandbox has saved the workspace since then, and the kernel goes on "
                    "with that. `sandbox-kernel workspace save %s` makes these files the newest "
                    "save, `sandbox-kernel rm --force %s` gives them up.",
                    *(unsaved, unsaved.sandbox, unsaved.sandbox),
                )
                continue
            log.warning("%s Saving them now, before the kernel starts.", unsaved)
            await save_again(unsaved, log)
        except SandboxError as error:
            raise WorkspaceError(
                f"The kernel was not started, because it would begin with files that are older "
                f"than those in sandbox {unsaved.sandbox!r}, which cannot be saved: {error} "
                f"`sandbox-kernel workspace save {unsaved.name}` tries again; "
                f"`sandbox-kernel rm --force {unsaved.sandbox}` gives these files up."
            ) from error


async def _outdated(unsaved: Unsaved) -> bool:
    """Whether another sandbox has saved the workspace since."""
    from sandbox_kernel.workspace import notebook_identity

    workspace = kernel_workspace.from_dict(unsaved.workspace, unsaved.kernel)
    store = await aside(kernel_workspace.open_store, unsaved.store)
    name = await aside(notebook_identity.place_of, store, workspace.name, workspace.id)
    latest = await aside(store.latest, name)
    if latest is None or latest.sandbox == unsaved.sandbox:
        return False
    return latest.created > unsaved.since


async def save_again(unsaved: Unsaved, log: Log, store: Store | None = None) -> None:
    """Save files that could not be saved, and remove the sandbox if it was kept only for that.
    If that fails, nothing has changed. On the background loop."""
    waiting = await _when_given_up(unsaved)
    if waiting is None:
        return
    unsaved = waiting
    workspace = kernel_workspace.from_dict(unsaved.workspace, unsaved.kernel)
    client = load_backend(unsaved.backend)
    handle = await client.get(unsaved.sandbox)
    if await kernel_workspace.leftovers(handle) is None:
        async with _attached(unsaved, log) as kernel:
            if reason := await kernel_workspace.last_save(kernel, workspace, store=store):
                raise WorkspaceError(reason)
    else:
        gone = SandboxGone(f"Sandbox {unsaved.sandbox!r} has ended, and left no files.")
        progress = kernel_workspace.SaveProgress()
        saving = kernel_workspace.save_stopped(handle, gone, workspace, log, progress, store)
        await kernel_workspace.while_progressing(saving, progress, workspace, handle, log)
    over = unsaved.kept or (await handle.info()).status in ("stopped", "gone")
    await asyncio.to_thread(notes.clear, unsaved.backend, unsaved.sandbox, for_good=over)
    if unsaved.kept:
        await client.remove(unsaved.sandbox)


async def _when_given_up(unsaved: Unsaved) -> Unsaved | None:
    """The note after another process's last save; None if all is saved. WorkspaceError if late."""
    deadline = time.monotonic() + kernel_workspace.LAST_SAVE_TIMEOUT
    now: Unsaved | None = unsaved
    while now is not None and now.process and not now.elsewhere:
        if not ProcessId(*now.process).alive:
            break
        if time.monotonic() > deadline:
            raise WorkspaceError(
                f"Process {now.process[0]} is still saving the files of workspace {now.name!r} in "
                f"sandbox {now.sandbox!r}. Try again when it has ended."
            )
        await asyncio.sleep(_LOOK)
        now = await asyncio.to_thread(notes.current, unsaved)
    return now


def facts_of(handle: SandboxHandle, workspace: KernelWorkspace | None) -> dict[str, Any]:
    """For a record's ``kernel``: where the files are saved, for a later ``end_left``."""
    if workspace is None:
        return {}
    return {notes.IN_USE: asdict(make_note(handle, workspace, ""))}


async def end_left(record: Record, log: Log) -> None:
    """Save the files of a sandbox that a killed process left, and remove it. WorkspaceError if they
    cannot be saved; then it stays. On the background loop."""
    unsaved = notes.belongs_to(record)
    if unsaved is None:
        return await load_backend(record.backend).remove(record.name)
    try:
        store = await asyncio.to_thread(kernel_workspace.open_store, unsaved.store)
        await save_again(unsaved, log, store)
    except SandboxNotFound:
        return  # removed just now
    except (SandboxError, OSError) as error:
        raise WorkspaceError(
            f"Sandbox {record.name!r} stays, because its files cannot be saved in workspace "
            f"{unsaved.name!r}: {error} `sandbox-kernel rm --force {record.name}` gives them up."
        ) from error


@asynccontextmanager
async def _attached(unsaved: Unsaved, log: Log) -> AsyncIterator[SandboxedKernel]:
    """The sandbox, running and attached. Paused again afterwards if it was."""
    client = load_backend(unsaved.backend)
    handle = await client.get(unsaved.sandbox)
    before = (await handle.info()).status
    if before == "stopped" and client.capabilities.restart:
        kernel = await SandboxedKernel.restart(client, handle, log)
    else:
        kernel = await SandboxedKernel.attach(client, unsaved.sandbox, log)
    try:
        yield kernel
    finally:
        await kernel.detach()
        if before == "paused":
            await handle.pause()
            audit.note(handle, "paused")
