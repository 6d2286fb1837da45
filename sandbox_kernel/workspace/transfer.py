"""Persist and hydrate: the calls that the server extension, the provisioner and agents make."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from sandbox_kernel.errors import SandboxError, WorkspaceError
from sandbox_kernel.guest.wire.mux import BULK
from sandbox_kernel.guest.workspace.messages import Ended, Messages, Stalled
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.tunnel import background
from sandbox_kernel.tunnel.tunnel import Tunnel
from sandbox_kernel.workspace.imports import import_folder
from sandbox_kernel.workspace.receive import Receiver, quiet_close
from sandbox_kernel.workspace.reports import (
    HydrateReport,
    Limits,
    OnProgress,
    Progress,
    SaveInfo,
    SaveReport,
    UploadPolicy,
)
from sandbox_kernel.workspace.send import Sender, make_plan
from sandbox_kernel.workspace.store import Store

TARGET = "workspace"
"""The agent's name for what answers here."""
STALLED_AFTER = 300.0
"""Seconds without a sign of the sandbox after which a transfer is given up."""
_PROGRESS_INTERVAL = 0.1
_UNBOUNDED = Limits(max_bytes=2**50, max_files=10_000_000)
T = TypeVar("T")


class Attached(Protocol):
    """A sandbox with an agent attached, such as a ``SandboxedKernel``."""

    @property
    def handle(self) -> SandboxHandle: ...
    @property
    def tunnel(self) -> Tunnel: ...


async def persist(
    sandbox: Attached,
    store: Store,
    name: str,
    *,
    notebook: str = "",
    kernel: str = "",
    limits: Limits | None = None,
    progress: OnProgress | None = None,
) -> SaveReport:
    """Save the files of a sandbox's working folder as the next save of workspace ``name``.

    May be awaited on any loop. Costs what has changed since the last save. Cancelling the awaiting
    task cancels the transfer; the store is then as it was. ``notebook`` and ``kernel`` are only
    noted in the save. If nothing has changed, no save is made (``SaveReport.new``).

    Raises QuotaExceeded (with the biggest files), WorkspaceRefused (the sandbox sent what cannot
    be), StoreError (the store cannot be written), or what the tunnel raises.
    """
    facts = SaveInfo(
        id="",
        workspace=name,
        root="",
        created=0.0,
        notebook=notebook,
        kernel=kernel,
        backend=sandbox.handle.backend,
        sandbox=sandbox.handle.name,
    )

    def work(sock: socket.socket, told: Callable[[Progress], object]) -> SaveReport:
        return persist_over(
            sock, store, facts, sandbox.handle.workdir, limits=limits or Limits(), progress=told
        )

    return await background.run(_converse(sandbox, name, work, progress))


async def hydrate(
    sandbox: Attached,
    store: Store,
    name: str,
    *,
    at: str = "",
    exact: bool = True,
    progress: OnProgress | None = None,
) -> HydrateReport:
    """Bring a save of workspace ``name`` (the latest, or ``at``: an id or the start of one) into
    the sandbox's working folder. Sends only what the sandbox lacks.

    ``exact`` also deletes files that are not in the save (but not those that saves ignore). A
    workspace without any save is no error: the report's ``save`` is None, and nothing is done.
    """
    save = await asyncio.to_thread(store.find if at else lambda n, _: store.latest(n), name, at)
    if save is None:
        return HydrateReport(None, 0, 0, 0, 0.0)

    def work(sock: socket.socket, told: Callable[[Progress], object]) -> HydrateReport:
        handle = sandbox.handle
        return hydrate_over(
            sock, store, save, handle.name, handle.workdir, exact=exact, progress=told
        )

    return await background.run(_converse(sandbox, name, work, progress))


async def upload(
    sandbox: Attached,
    store: Store,
    name: str,
    folder: str | Path,
    policy: UploadPolicy,
    *,
    notebook: str = "",
    limits: Limits | None = None,
    progress: OnProgress | None = None,
) -> HydrateReport | None:
    """First opening: what ``policy`` lets through of a host folder becomes the first save of the
    workspace (kind ``import``) and is brought into the sandbox. None if the policy is ``none``."""
    if policy.mode == "none":
        return None
    await asyncio.to_thread(
        import_folder, store, name, folder, policy=policy, notebook=notebook, limits=limits
    )
    return await hydrate(sandbox, store, name, exact=False, progress=progress)


# --- over a socket, in a thread


def persist_over(
    sock: socket.socket,
    store: Store,
    facts: SaveInfo,
    folder: str,
    *,
    limits: Limits,
    progress: Callable[[Progress], object] = lambda progress: None,
) -> SaveReport:
    """Persist over a connection to a helper (``guest/workspace/helper.py``)."""
    started = time.monotonic()
    name = facts.workspace
    messages = Messages(sock)
    base, hints = store.begin(name)
    writer = store.writer()
    try:
        receiver = Receiver(
            messages,
            store,
            facts.sandbox,
            name,
            base,
            writer=writer,
            limits=limits,
            progress=progress,
        )
        found = receiver.run(folder)
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    root = found.root.hex()
    new = base is None or base.root != root
    if new:
        save = store.publish(
            replace(
                facts,
                root=root,
                parent=base.id if base is not None else "",
                files=found.totals.files,
                bytes=found.totals.bytes,
                problems=found.problems,
                packs=[*hints, *receiver.elsewhere, *writer.names],
            )
        )
    else:
        assert base is not None
        save = base
    receiver.agree(found)
    return SaveReport(save, new, messages.received, writer.plain_bytes, time.monotonic() - started)


def hydrate_over(
    sock: socket.socket,
    store: Store,
    save: SaveInfo,
    sandbox: str,
    folder: str,
    *,
    exact: bool = True,
    progress: Callable[[Progress], object] = lambda progress: None,
) -> HydrateReport:
    """Hydrate over a connection to a helper."""
    started = time.monotonic()
    messages = Messages(sock)
    totals = store.check(save)
    receiver = Receiver(
        messages,
        store,
        sandbox,
        save.workspace,
        save,
        writer=None,
        limits=_UNBOUNDED,
        progress=progress,
    )
    found = receiver.run(folder)
    root = bytes.fromhex(save.root)
    if found.root == root:
        return HydrateReport(save, 0, 0, messages.sent, time.monotonic() - started)
    plan = make_plan(
        receiver.read, found.root, store.read, root, exact=exact, links=totals.links > 0
    )
    sent = Sender(messages, store, sandbox, save, progress).run(plan)
    if exact and sent.tree != root:
        problems = [*sent.problems, "the files in the sandbox are not exactly those of the save"]
    else:
        problems = sent.problems
    return HydrateReport(
        save, sent.files, sent.deleted, messages.sent, time.monotonic() - started, problems
    )


async def _converse(
    sandbox: Attached,
    name: str,
    work: Callable[[socket.socket, Callable[[Progress], object]], T],
    progress: OnProgress | None,
) -> T:
    """Do the work in a thread of its own, over a stream to the sandbox. On the background loop."""
    loop = asyncio.get_running_loop()
    tunnel = sandbox.tunnel
    sock = tunnel.channel(TARGET, BULK)
    sock.settimeout(STALLED_AFTER)
    told = _throttled(loop, progress)
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = work(sock, told)
        except BaseException as error:  # noqa: BLE001  (goes to whoever awaits the call)
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    thread = threading.Thread(target=run, name="sandbox-kernel-workspace", daemon=True)
    thread.start()
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        quiet_close(sock)
        with contextlib.suppress(Ended, SandboxError, OSError):
            await outcome
        raise
    except Stalled as error:
        raise WorkspaceError(
            f"The transfer of workspace {name!r} was given up: for {STALLED_AFTER:g} s sandbox "
            f"{sandbox.handle.name!r} has not gone on with it ({error}). "
            f"`sandbox-kernel logs {sandbox.handle.name}` may say why. Try again."
        ) from None
    except Ended:
        if tunnel.failure is not None:
            raise tunnel.failure from None
        raise WorkspaceError(
            f"Sandbox {sandbox.handle.name!r} ended the transfer of workspace {name!r} without a "
            f"word. `sandbox-kernel logs {sandbox.handle.name}` may say why. Try again."
        ) from None
    finally:
        sock.close()


def _throttled(
    loop: asyncio.AbstractEventLoop, progress: OnProgress | None
) -> Callable[[Progress], object]:
    if progress is None:
        return lambda told: None
    wanted = progress
    last = 0.0

    def told(value: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_INTERVAL:
            last = now
            loop.call_soon_threadsafe(wanted, value)

    return told
