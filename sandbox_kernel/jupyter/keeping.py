"""The end of a kernel's sandbox, and what is done if its files cannot be saved: it is kept.

A kernel that is shut down ends in any case. Its sandbox goes when its files are saved; until then
it is the only place that has them. It is kept, paused where the backend can, with a note in its
record (``sandboxes/unsaved.py``), and tried again by ``sandbox-kernel workspace save`` and by the
next start of the same notebook. The note is there before the last save begins, so that a process
that is killed meanwhile leaves it, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxNotFound, WorkspaceError
from sandbox_kernel.jupyter import hosting, workspaces
from sandbox_kernel.jupyter.workspaces import KernelWorkspace
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes import unsaved as notes
from sandbox_kernel.sandboxes.backends import backend_names, load_backend
from sandbox_kernel.sandboxes.base import SandboxHandle, SandboxInfo
from sandbox_kernel.sandboxes.processes import ProcessId
from sandbox_kernel.sandboxes.unsaved import Unsaved
from sandbox_kernel.tunnel.background import aside, run

if TYPE_CHECKING:
    from sandbox_kernel.workspace import SaveReport, Store
    from sandbox_kernel.workspace.reports import OnProgress

_PATIENCE = 20.0
"""Seconds for one step of keeping a sandbox."""
_LOOK = 0.2
_UNFINISHED = "the process that was to save them has ended."


async def end(
    kernel: SandboxedKernel,
    workspace: KernelWorkspace | None,
    kernel_name: str,
    log: Log,
    *,
    limit: float | None = None,
) -> Unsaved | None:
    """End a kernel with its sandbox, its files saved first. If they cannot be, the sandbox is kept,
    and what is told about it is the answer. ``limit`` as for ``workspaces.last_save``. On any loop.
    """
    if workspace is not None and not (kernel.taken_over or kernel.at_rest):
        # One that is to be paused on exit stays in any case, also when its files are saved.
        unsaved = make_note(
            kernel.handle, workspace, kernel_name, _UNFINISHED, kept=not kernel.pause_on_exit
        )
        await run(_announce(unsaved, log))
        reason = await workspaces.last_save(kernel, workspace, kernel_name, log, limit=limit)
        if reason and not kernel.taken_over:
            kept = await run(_keep(kernel, replace(unsaved, reason=reason), log))
            if kept is not None:
                return kept
            log.error("Sandbox %s is gone, and what was not saved with it.", kernel.handle.name)
        elif kernel.pause_on_exit or kernel.taken_over:
            notes.clear(kernel.handle.backend, kernel.handle.name)
    await run(hosting.remove_kernel(kernel))
    return None


def make_note(
    handle: SandboxHandle,
    workspace: KernelWorkspace,
    kernel_name: str,
    reason: str,
    *,
    kept: bool = True,
) -> Unsaved:
    return Unsaved(
        handle.backend,
        handle.name,
        asdict(workspace),
        reason,
        store=os.environ.get("SANDBOX_KERNEL_STORE", ""),
        kernel=kernel_name,
        kept=kept,
    )


async def note_lost(
    kernel: SandboxedKernel, workspace: KernelWorkspace, kernel_name: str, reason: str
) -> None:
    """The kernel goes on in another sandbox: what this one has left is saved before that begins
    with an older save. On the background loop."""
    if await workspaces.leftovers(kernel.handle) is not None:
        notes.note(make_note(kernel.handle, workspace, kernel_name, reason, kept=False))


async def _announce(unsaved: Unsaved, log: Log) -> None:
    """This process begins with the last save."""
    process = ProcessId.of(os.getpid())
    try:
        notes.note(replace(unsaved, process=(process.pid, process.start) if process else ()))
    except OSError as error:
        log.warning(
            "Sandbox %s: it could not be noted that its files are not saved yet: %s",
            *(unsaved.sandbox, error),
        )


async def _keep(kernel: SandboxedKernel, unsaved: Unsaved, log: Log) -> Unsaved | None:
    """Leave the sandbox with its files and a note, and without a kernel: the note. None if there
    is nothing to keep. On the background loop."""
    name, place = kernel.handle.name, ""
    try:
        info = await asyncio.wait_for(kernel.handle.info(), _PATIENCE)
        place = await asyncio.to_thread(_place, info)
        startable = info.status != "stopped" or kernel.client.capabilities.restart
        if info.status == "gone" or not (startable or place):
            return None
    except (SandboxError, OSError, asyncio.TimeoutError) as error:
        log.warning("Sandbox %s does not say how it is: %s", name, error)
    unsaved = replace(unsaved, place=place)
    try:
        if not notes.note(unsaved):
            return None
    except OSError as error:
        log.error("Sandbox %s is kept, but its record does not say why: %s", name, error)
    try:
        if kernel.exit_code is None and not place:
            await asyncio.wait_for(kernel.send_signal(signal.SIGKILL), _PATIENCE)
    except (SandboxError, OSError, asyncio.TimeoutError) as error:
        log.warning("The kernel in sandbox %s could not be ended: %s", name, error)
    await hosting.leave_kernel(kernel)
    try:
        if kernel.client.capabilities.pause:
            await asyncio.wait_for(kernel.handle.pause(), _PATIENCE)
        elif place:  # nothing in it need run any more
            await kernel.handle.kill()
    except (SandboxError, OSError, asyncio.TimeoutError) as error:
        log.warning("Sandbox %s, which is kept, could not be paused: %s", name, error)
    _heard(log).warning("%s", advice(unsaved))
    return unsaved


def _heard(log: Log) -> Log:
    """This log, if it is shown anywhere; else one that is. Without an application, traitlets gives
    a log that nobody sees."""
    logger = log.logger if isinstance(log, logging.LoggerAdapter) else log
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return log
        logger = logger.parent if logger.propagate else None
    return logging.getLogger("sandbox_kernel")


def _place(info: SandboxInfo) -> str:
    """Where the files of a sandbox are on this machine, when it has ended; empty if nowhere."""
    image, folder = info.detail.get("image"), info.detail.get("workspace")
    if isinstance(image, dict):
        return str(image["image"])
    if not isinstance(folder, str) or folder.startswith("/proc/") or not os.path.isdir(folder):
        return ""
    return folder if os.listdir(folder) else ""


def advice(unsaved: Unsaved) -> str:
    """What the user should know and do about files that are not saved."""
    where = f" They are in {unsaved.place}." if unsaved.place else ""
    return (
        f"{unsaved}{where} The sandbox is kept for that. `sandbox-kernel workspace save "
        f"{unsaved.name}` tries again; `sandbox-kernel rm --force {unsaved.sandbox}` gives the "
        f"files up."
    )


async def save_first(workspace: KernelWorkspace, log: Log) -> None:
    """Before a workspace is brought into a new sandbox: save what waits in others, so that nobody
    goes on with older files unknowingly. WorkspaceError if that does not work; what is on another
    host is only told. On the background loop."""
    for unsaved in notes.unsaved_of(backend_names(), workspace.name):
        if unsaved.name != workspace.name:
            continue  # a sandbox that happens to have the workspace's name
        if unsaved.elsewhere and not load_backend(unsaved.backend).capabilities.hosted:
            _heard(log).warning(
                "%s That is on another host, where `sandbox-kernel workspace save %s` saves them. "
                "This kernel begins with older files.",
                *(unsaved, unsaved.name),
            )
            continue
        try:
            if await _outdated(unsaved):
                _heard(log).warning(
                    "%s The workspace was saved from another sandbox since then, and the kernel "
                    "goes on with that. `sandbox-kernel workspace save %s` makes these files the "
                    "newest save, `sandbox-kernel rm --force %s` gives them up.",
                    *(unsaved, unsaved.sandbox, unsaved.sandbox),
                )
                continue
            log.warning("%s They are saved now, before the kernel starts.", unsaved)
            await save_again(unsaved, log)
        except SandboxError as error:
            raise WorkspaceError(
                f"The kernel was not started, because it would begin with files that are older "
                f"than those in sandbox {unsaved.sandbox!r}, which cannot be saved: {error} "
                f"`sandbox-kernel workspace save {unsaved.name}` tries again, and tells more; "
                f"`sandbox-kernel rm --force {unsaved.sandbox}` gives these files up."
            ) from error


async def _outdated(unsaved: Unsaved) -> bool:
    """Whether somebody has gone on with the workspace in another sandbox, and has saved it."""
    from sandbox_kernel.workspace import identity

    workspace = workspaces.from_dict(unsaved.workspace)
    assert workspace is not None
    store = await aside(workspaces.open_store, unsaved.store)
    name = await aside(identity.place_of, store, workspace.name, workspace.id)
    latest = await aside(store.latest, name)
    return (
        latest is not None and latest.sandbox != unsaved.sandbox and latest.created > unsaved.since
    )


async def save_again(unsaved: Unsaved, log: Log, store: Store | None = None) -> None:
    """Save what could not be saved, and remove the sandbox if it was kept for that only. Raises
    what keeps it from being saved; then all is as it was. On the background loop."""
    waiting = await _when_given_up(unsaved)
    if waiting is None:
        return
    unsaved = waiting
    workspace = workspaces.from_dict(unsaved.workspace)
    assert workspace is not None
    client = load_backend(unsaved.backend)
    handle = await client.get(unsaved.sandbox)
    if await workspaces.leftovers(handle) is None:
        async with _attached(unsaved, log) as kernel:
            reason = await workspaces.last_save(kernel, workspace, unsaved.kernel, log, store=store)
            if reason:
                raise WorkspaceError(reason)
    else:
        gone = SandboxGone(f"Sandbox {unsaved.sandbox!r} has ended, and left no files.")

        def begin(progress: OnProgress) -> Coroutine[Any, Any, SaveReport]:
            return workspaces.save_stopped(
                handle, gone, workspace, unsaved.kernel, log, store, progress
            )

        await workspaces.while_it_goes_on(begin, unsaved.name, unsaved.sandbox, log)
    over = unsaved.kept or (await handle.info()).status in ("stopped", "gone")
    notes.clear(unsaved.backend, unsaved.sandbox, for_good=over)
    if unsaved.kept:
        await client.remove(unsaved.sandbox)


async def _when_given_up(unsaved: Unsaved) -> Unsaved | None:
    """If somebody makes the last save just now, wait until that is over: what is still to be saved
    then; None if nothing is. WorkspaceError if it takes too long."""
    deadline = time.monotonic() + workspaces.LAST_SAVE_TIMEOUT
    now: Unsaved | None = unsaved
    while now is not None and now.process and not now.elsewhere:
        if not ProcessId(*now.process).alive:
            break
        if time.monotonic() > deadline:
            raise WorkspaceError(
                f"The files of workspace {now.name!r} in sandbox {now.sandbox!r} are still being "
                f"saved, by process {now.process[0]}. Try again when that is over."
            )
        await asyncio.sleep(_LOOK)
        now = notes.current(unsaved)
    return now


def facts_of(
    handle: SandboxHandle, workspace: KernelWorkspace | None, kernel_name: str
) -> dict[str, Any]:
    """For a record's ``kernel``: where the files are saved, for who ends the sandbox when this
    process has gone (``end_left``)."""
    if workspace is None:
        return {}
    return {notes.IN_USE: asdict(make_note(handle, workspace, kernel_name, ""))}


async def end_left(record: Record, log: Log) -> None:
    """End a sandbox that nobody uses any more, its files saved first: a process that was killed
    could not do that. WorkspaceError if they cannot be saved; then it stays. On the background
    loop."""
    unsaved = notes.belongs_to(record)
    if unsaved is None:
        return await load_backend(record.backend).remove(record.name)
    try:
        store = await asyncio.to_thread(workspaces.open_store, unsaved.store)
        await save_again(unsaved, log, store)
    except SandboxNotFound:
        return  # somebody else has removed it
    except (SandboxError, OSError) as error:
        raise WorkspaceError(
            f"Sandbox {record.name!r} stays, because its files cannot be saved in workspace "
            f"{unsaved.name!r}: {error} `sandbox-kernel rm --force {record.name}` gives them up."
        ) from error


@asynccontextmanager
async def _attached(unsaved: Unsaved, log: Log) -> AsyncIterator[SandboxedKernel]:
    """The sandbox, running, with its agent attached; afterwards it is paused again if it was."""
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
