"""The host's half of a hydrate: what differs between the sandbox and a save, and sending it.

Runs in a thread, over a blocking socket. The plan goes to the sandbox in pieces ("stage"), then the
contents that it lacks, in the order in which the store has them, and then the word to move it all
into place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sandbox_kernel.errors import WorkspaceRefused
from sandbox_kernel.guest.workspace.apply import FILL_HEADER, FILL_TARGET, expand
from sandbox_kernel.guest.workspace.messages import (
    FAILED,
    FILL,
    FINISH,
    NOTE,
    RESULT,
    REUSE,
    STAGE,
    Ended,
    Messages,
    Stalled,
)
from sandbox_kernel.text import printable
from sandbox_kernel.workspace.patience import Patience
from sandbox_kernel.workspace.receive import counted, failure, parse_object
from sandbox_kernel.workspace.reports import Limits, Progress, SaveInfo
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, Read, entries_of, walk

_BATCH = 500


@dataclass
class Plan:
    """What has to be done in the sandbox, in paths."""

    folders: list[tuple[str, int, int, bool]] = field(default_factory=list)
    """New ones (True), and those in which something is done; parents first."""
    files: list[tuple[str, Entry, Entry | None]] = field(default_factory=list)
    """With what is there now, if that is a file, too."""
    meta: list[tuple[str, Entry]] = field(default_factory=list)
    links: list[tuple[str, Entry]] = field(default_factory=list)
    hard: list[tuple[str, Entry]] = field(default_factory=list)
    delete: list[str] = field(default_factory=list)


def make_plan(
    read_old: Read, old: bytes, read_new: Read, new: bytes, *, exact: bool, links: bool
) -> Plan:
    """What brings a sandbox with the tree ``old`` to the tree ``new``. Both were validated."""
    plan = Plan()
    _compare(plan, read_old, old, read_new, new, "", exact)
    if links and plan.files:
        # A file that is written anew is another file: links to it must be made again.
        written = {path for path, _, _ in plan.files}
        planned = {path for path, _ in plan.hard}
        plan.hard += [
            (path, entry)
            for path, entry in walk(read_new, new)
            if entry.kind == "h" and entry.target in written and path not in planned
        ]
    return plan


def _compare(
    plan: Plan, read_old: Read, old: bytes, read_new: Read, new: bytes, prefix: str, exact: bool
) -> None:
    before = {entry.name: entry for entry in entries_of(read_old, old)} if old else {}
    after = entries_of(read_new, new)
    for entry in after:
        was = before.pop(entry.name, None)
        if was == entry:
            continue
        path = prefix + entry.name
        if was is not None and was.kind != entry.kind:
            plan.delete.append(path)
            was = None
        if entry.kind == "d":
            plan.folders.append((path, entry.mode, entry.mtime, was is None))
            inner = was.tree if was is not None else b""
            if inner != entry.tree:
                _compare(plan, read_old, inner, read_new, entry.tree, path + "/", exact)
        elif entry.kind == "l":
            plan.links.append((path, entry))
        elif entry.kind == "h":
            plan.hard.append((path, entry))
        elif was is not None and (was.size, was.chunks) == (entry.size, entry.chunks):
            plan.meta.append((path, entry))
        else:
            plan.files.append((path, entry, was))
    if exact:
        plan.delete += [prefix + name for name in before]


@dataclass(frozen=True)
class Sent:
    tree: bytes
    files: int
    deleted: int
    problems: list[str]


class Sender:
    """Carries a plan out, over ``messages``."""

    def __init__(
        self,
        messages: Messages,
        store: Store,
        sandbox: str,
        save: SaveInfo,
        progress: Callable[[Progress], object] = lambda progress: None,
    ) -> None:
        self._messages = messages
        self._store = store
        self._sandbox = sandbox
        self._save = save
        self._progress = progress

    def run(self, plan: Plan) -> Sent:
        try:
            self._send(plan)
        except Stalled:
            raise
        except Ended:
            pass  # the sandbox has closed the connection while we wrote: it may have said why
        try:
            return self._outcome(len(plan.files))
        except (ValueError, KeyError, TypeError) as error:
            raise WorkspaceRefused(
                f"Sandbox {self._sandbox!r} sent something that makes no sense ({error}) instead "
                f"of how bringing its files in went. Its files may be as they were, or not."
            ) from None

    def _outcome(self, most_files: int) -> Sent:
        """What the sandbox says in the end. ValueError and the like if that is nonsense."""
        patience = Patience(self._messages.sock, files=1)
        while True:
            kind, payload = self._messages.receive()
            value = parse_object(payload)
            if kind == FAILED:
                raise failure(self._sandbox, value, Limits())
            if kind == RESULT:
                problems = [printable(str(p)[:500]) for p in list(value["problems"])[:200]]
                tree = bytes.fromhex(value["tree"])
                return Sent(tree, counted(value["files"]), counted(value["deleted"]), problems)
            if kind != NOTE:
                raise ValueError(f"a message of kind {kind}")
            files = counted(value.get("files"))
            patience.told(min(files, most_files), 0)
            self._progress(Progress("apply", files, 0))

    def _send(self, plan: Plan) -> None:
        send = self._messages.send_json
        for key, items in _batches(plan):
            send(STAGE, {key: items})
        wanted: dict[bytes, list[tuple[int, int]]] = {}
        total = 0
        for number, (path, entry, was) in enumerate(plan.files):
            have = expand(was.chunks) if was is not None else []
            reused = []
            for index, hash_, length in entry.pieces():
                if index < len(have) and have[index] == hash_.hex():
                    reused.append(index)
                else:
                    wanted.setdefault(hash_, []).append((number, index))
                    total += length
            if reused:
                send(REUSE, [[number, path, reused]])
        done = 0
        for stored in self._store.packs.read_many(wanted):
            if self._messages.waiting():
                return  # it has something to say before the end: that it has failed
            targets = wanted[stored.hash]
            # A chunk that is in very many places (a page of zeros) goes out in several messages.
            for start in range(0, len(targets), 10_000):
                part = targets[start : start + 10_000]
                header = FILL_HEADER.pack(stored.codec, len(part))
                places = b"".join(FILL_TARGET.pack(*target) for target in part)
                self._messages.send(FILL, header + places, stored.data)
            done += len(stored.plain) * len(targets)
            self._progress(Progress("send", len(plan.files), done, total))
        send(FINISH, {"tree": self._save.root, "key": f"{self._store.id}/{self._save.workspace}"})


def _batches(plan: Plan) -> Iterator[tuple[str, list[Any]]]:
    everything: list[tuple[str, list[Any]]] = [
        ("delete", list(plan.delete)),
        ("folders", [list(folder) for folder in plan.folders]),
        ("files", [[n, path, entry.encoded()] for n, (path, entry, _) in enumerate(plan.files)]),
        ("meta", [[path, entry.encoded()] for path, entry in plan.meta]),
        ("links", [[path, entry.mtime, entry.target] for path, entry in plan.links]),
        ("hard", [[path, entry.target] for path, entry in plan.hard]),
    ]
    for key, items in everything:
        for start in range(0, len(items), _BATCH):
            yield key, items[start : start + _BATCH]
