"""Persist and hydrate: the calls that the server extension, the provisioner and agents make."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from sandbox_kernel.errors import PacksGone, StoreDamaged, WorkspaceError
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
_CLEARING = 2.0
"""Seconds that a cancelled transfer waits for its thread, which may be waiting for the store."""
_PROGRESS_INTERVAL = 0.1
_ATTEMPTS = 3
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
    stalled_after: float | None = None,
) -> SaveReport:
    """Save the files of a sandbox's working folder as the next save of workspace ``name``.

    May be awaited on any loop. Costs what has changed since the last save. Cancelling the awaiting
    task cancels the transfer, within seconds even if the store does not answer; no save appears
    then. ``notebook`` and ``kernel`` are only noted in the save. If nothing has changed, no save is
    made (``SaveReport.new``).

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

    def work(talk: _Talk) -> SaveReport:
        return persist_over(
            talk.sock,
            store,
            facts,
            sandbox.handle.workdir,
            limits=limits or Limits(),
            progress=talk.told,
            go_on=talk.go_on,
        )

    try:
        return await background.run(_converse(sandbox, name, work, progress, stalled_after))
    except StoreDamaged:
        # What was saved last is not whole any more. It is not built on: all is sent again.
        return await background.run(_converse(sandbox, name, work, progress, stalled_after))


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

    def work(talk: _Talk) -> HydrateReport:
        handle = sandbox.handle
        return hydrate_over(
            talk.sock, store, save, handle.name, handle.workdir, exact=exact, progress=talk.told
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
    go_on: Callable[[], object] = lambda: None,
) -> SaveReport:
    """Persist over a connection to a helper (``guest/workspace/helper.py``). ``go_on`` is called
    before the save appears, and raises if nobody wants it any more."""
    messages = Messages(sock)
    with store.saving():
        for attempt in range(_ATTEMPTS):
            try:
                return _persist_once(messages, store, facts, folder, limits, progress, go_on)
            except PacksGone:
                # What the sandbox was told not to send is not there any more: all over again.
                store.forget()
                if attempt == _ATTEMPTS - 1:
                    raise
    raise AssertionError


def _persist_once(
    messages: Messages,
    store: Store,
    facts: SaveInfo,
    folder: str,
    limits: Limits,
    progress: Callable[[Progress], object],
    go_on: Callable[[], object],
) -> SaveReport:
    started = time.monotonic()
    name = facts.workspace
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
    except StoreDamaged:
        writer.abandon()
        if base is not None:
            store.distrust(base)
        raise
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    root = found.root.hex()
    new = base is None or base.root != root
    if new:
        go_on()
        save = store.publish(
            replace(
                facts,
                root=root,
                parent=base.id if base is not None else "",
                files=found.totals.files,
                bytes=found.totals.bytes,
                problems=found.problems,
                packs=[*hints, *receiver.elsewhere, *writer.names],
            ),
            {*receiver.relied_on, *receiver.elsewhere, *writer.names},
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


@dataclass(frozen=True)
class _Talk:
    """What the thread of a transfer works with."""

    sock: socket.socket
    told: Callable[[Progress], object]
    cancelled: threading.Event

    def go_on(self) -> None:
        if self.cancelled.is_set():
            raise Ended("cancelled")


async def _converse(
    sandbox: Attached,
    name: str,
    work: Callable[[_Talk], T],
    progress: OnProgress | None,
    stalled_after: float | None = None,
) -> T:
    """Do the work in a thread of its own, over a stream to the sandbox. On the background loop."""
    loop = asyncio.get_running_loop()
    tunnel = sandbox.tunnel
    stalled_after = stalled_after or STALLED_AFTER
    sock = tunnel.channel(TARGET, BULK)
    sock.settimeout(stalled_after)
    talk = _Talk(sock, _throttled(loop, progress), threading.Event())
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
            result = work(talk)
        except BaseException as error:  # noqa: BLE001  (goes to whoever awaits the call)
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    thread = threading.Thread(target=run, name="sandbox-kernel-workspace", daemon=True)
    thread.start()
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        talk.cancelled.set()
        quiet_close(sock)
        # A call to the store cannot be broken off: what does not end soon ends unheard.
        done, _ = await asyncio.wait([outcome], timeout=_CLEARING)
        if not done:
            outcome.cancel()
        elif not outcome.cancelled():
            outcome.exception()  # seen, though nobody is left to be told
        raise
    except Stalled as error:
        raise WorkspaceError(
            f"The transfer of workspace {name!r} was given up: for {stalled_after:g} s sandbox "
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
