"""Hydrate, on the host: a save's files come into a sandbox.

The host compares the sandbox's tree with the save's and sends a plan in batches (STAGE), then the
chunks that the sandbox lacks, in the order of the packs (FILL), then the order to move everything
into place (FINISH).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import WorkspaceRefused
from sandbox_kernel.guest.workspace.messages import Ended, Kind, Messages, Stalled
from sandbox_kernel.guest.workspace.write_files import FILL_HEADER, FILL_TARGET
from sandbox_kernel.tunnel import background
from sandbox_kernel.workspace.conversation import (
    Attached,
    Patience,
    Talk,
    checked_count,
    checked_problems,
    converse,
    parse_object,
    reported_failure,
)
from sandbox_kernel.workspace.imports import import_folder
from sandbox_kernel.workspace.receive import Receiver
from sandbox_kernel.workspace.reports import (
    HydrateReport,
    OnProgress,
    Progress,
    Quota,
    SaveInfo,
    UploadPolicy,
)
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, Read, entries_of, walk

_BATCH = 500
_UNBOUNDED = Quota(max_bytes=2**50, max_files=10_000_000)


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
    the sandbox's working folder. Sends only chunks that the sandbox lacks.

    ``exact`` also deletes files that are not in the save, but not ignored ones. If the workspace
    has no save, nothing happens and the report's ``save`` is None.
    """
    save = await asyncio.to_thread(store.find if at else lambda n, _: store.latest(n), name, at)
    if save is None:
        return HydrateReport(None, 0, 0, 0, 0.0)
    handle = sandbox.handle

    def work(talk: Talk) -> HydrateReport:
        return hydrate_over(talk, store, save, handle.name, handle.workdir, exact=exact)

    return await background.run(converse(sandbox, name, work, progress))


async def upload(
    sandbox: Attached,
    store: Store,
    name: str,
    folder: str | Path,
    policy: UploadPolicy,
    *,
    notebook: str = "",
) -> HydrateReport | None:
    """For a workspace without saves: import the files of a host folder that ``policy`` selects as
    its first save, and bring that into the sandbox. None if the policy is ``none``."""
    if policy.mode == "none":
        return None
    await asyncio.to_thread(import_folder, store, name, folder, policy=policy, notebook=notebook)
    return await hydrate(sandbox, store, name, exact=False)


def hydrate_over(
    talk: Talk, store: Store, save: SaveInfo, sandbox: str, folder: str, *, exact: bool = True
) -> HydrateReport:
    """Hydrate over a connection to a helper. Blocks."""
    started = time.monotonic()
    messages = Messages(talk.sock)
    totals = store.check(save)
    receiver = Receiver(
        messages, store, sandbox, save.workspace, save, None, _UNBOUNDED, talk.progress
    )
    found = receiver.run(folder)
    if found.root == save.tree:
        return HydrateReport(save, 0, 0, messages.sent, time.monotonic() - started)
    plan = make_plan(
        receiver.read, found.root, store.read, save.tree, exact=exact, links=totals.links > 0
    )
    sender = Sender(messages, store, sandbox, save, talk.progress)
    tree, files, deleted, problems = sender.run(plan)
    if exact and tree != save.tree:
        problems.append("the files in the sandbox are not exactly those of the save")
    seconds = time.monotonic() - started
    return HydrateReport(save, files, deleted, messages.sent, seconds, problems)


@dataclass
class HydratePlan:
    """The changes to make in the sandbox, by path."""

    files: list[tuple[str, Entry, Entry | None]] = field(default_factory=list)
    """Each with the file that it replaces."""
    others: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """``delete``, ``folders``, ``meta``, ``links`` and ``hard``, as STAGE has them. Folders come
    parents first, each with its mode, its time, and whether it is new."""


def make_plan(
    read_old: Read, old: bytes, read_new: Read, new: bytes, *, exact: bool, links: bool
) -> HydratePlan:
    """Plan how to turn the tree ``old`` into ``new``. Both must be validated."""
    plan = HydratePlan()
    others = plan.others

    def compare(old: bytes, new: bytes, prefix: str) -> None:
        before = {entry.name: entry for entry in entries_of(read_old, old)} if old else {}
        for entry in entries_of(read_new, new):
            was = before.pop(entry.name, None)
            if was == entry:
                continue
            path = prefix + entry.name
            if was is not None and was.kind != entry.kind:
                others["delete"].append(path)
                was = None
            if entry.kind == "d":
                others["folders"].append((path, entry.mode, entry.mtime, was is None))
                inner = was.tree if was is not None else b""
                if inner != entry.tree:
                    compare(inner, entry.tree, path + "/")
            elif entry.kind == "l":
                others["links"].append((path, entry.mtime, entry.target))
            elif entry.kind == "h":
                others["hard"].append((path, entry.target))
            elif was is not None and (was.size, was.chunks) == (entry.size, entry.chunks):
                others["meta"].append((path, entry.encoded()))
            else:
                plan.files.append((path, entry, was))
        if exact:
            others["delete"] += [prefix + name for name in before]

    compare(old, new, "")
    if links and plan.files:
        # A rewritten file is a new inode: link to it again.
        written = {path for path, _, _ in plan.files}
        planned = {path for path, _ in others["hard"]}
        others["hard"] += [
            (path, entry.target)
            for path, entry in walk(read_new, new)
            if entry.kind == "h" and entry.target in written and path not in planned
        ]
    return plan


@dataclass(frozen=True)
class Sender:
    """Carries out a plan over ``messages``."""

    messages: Messages
    store: Store
    sandbox: str
    save: SaveInfo
    progress: OnProgress

    def run(self, plan: HydratePlan) -> tuple[bytes, int, int, list[str]]:
        """The resulting tree, the numbers of files written and deleted, and problems."""
        try:
            self._send(plan)
        except Stalled:
            raise
        except Ended:
            pass  # the sandbox closed the connection; a FAILED message may be waiting
        try:
            return self._outcome(len(plan.files))
        except (ValueError, KeyError, TypeError) as error:
            raise WorkspaceRefused(
                f"Sandbox {self.sandbox!r} sent an invalid result of the hydrate ({error}). Its "
                f"files may have changed or not."
            ) from None

    def _outcome(self, most_files: int) -> tuple[bytes, int, int, list[str]]:
        """The result that the sandbox reports. ValueError, KeyError or TypeError if invalid."""
        patience = Patience(self.messages.sock, files=1)
        while True:
            kind, payload = self.messages.receive()
            value = parse_object(payload)
            if kind == Kind.FAILED:
                raise reported_failure(self.sandbox, value, Quota())
            if kind == Kind.RESULT:
                problems = checked_problems(value["problems"])
                files, deleted = checked_count(value["files"]), checked_count(value["deleted"])
                return bytes.fromhex(value["tree"]), files, deleted, problems
            if kind != Kind.NOTE:
                raise ValueError(f"a message of kind {kind}")
            files = checked_count(value.get("files"))
            patience.reported(min(files, most_files), 0)
            self.progress(Progress("apply", files, 0))

    def _send(self, plan: HydratePlan) -> None:
        send = self.messages.send_json
        files = [(n, path, entry.encoded()) for n, (path, entry, _) in enumerate(plan.files)]
        for key, items in {**plan.others, "files": files}.items():
            for start in range(0, len(items), _BATCH):
                send(Kind.STAGE, {key: items[start : start + _BATCH]})
        wanted: dict[bytes, list[tuple[int, int]]] = {}
        total = 0
        for number, (path, entry, was) in enumerate(plan.files):
            have = {hash_: at for at, hash_, _ in was.pieces()} if was is not None else {}
            reused = []
            for offset, hash_, length in entry.pieces():
                if hash_ in have:
                    reused.append((offset, have[hash_]))
                else:
                    wanted.setdefault(hash_, []).append((number, offset))
                    total += length
            for start in range(0, len(reused), 10_000):
                send(Kind.REUSE, [[number, path, reused[start : start + 10_000]]])
        done = 0
        for stored in self.store.packs.read_many(wanted):
            if self.messages.waiting():
                return  # only a FAILED message can come before the end
            targets = wanted[stored.hash]
            # A chunk with very many targets (a page of zeros) takes several messages.
            for start in range(0, len(targets), 10_000):
                part = targets[start : start + 10_000]
                header = FILL_HEADER.pack(stored.codec, len(part))
                places = b"".join(FILL_TARGET.pack(*target) for target in part)
                self.messages.send(Kind.FILL, header + places, stored.data)
            done += len(stored.plain) * len(targets)
            self.progress(Progress("send", len(plan.files), done, total))
        key = f"{self.store.id}/{self.save.workspace}"
        send(Kind.FINISH, {"tree": self.save.root, "key": key})
