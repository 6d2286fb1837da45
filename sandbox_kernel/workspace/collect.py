"""Garbage collection and verification of a store.

What no save and no baseline reaches is garbage. A pack of which nothing is needed is first noted as
unused. When it has been so for the grace time it is doomed, and then deleted, unless somebody saves
just now who began before that (``claims.py``). A pack of which little is needed, and many small
packs, are written anew, and then become unused themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sandbox_kernel.errors import SandboxError, StoreDamaged, StoreError, WorkspaceNotFound
from sandbox_kernel.workspace import claims
from sandbox_kernel.workspace.packs import Location
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, Totals, totals_of

GRACE = 7 * 24 * 3600.0
_SPARSE = 0.5
_SMALL, _MANY = 2**20, 32


@dataclass
class CollectReport:
    """What ``collect`` did, or what ``verify`` found."""

    workspaces: Sequence[str] = ()
    """Retired workspaces that were deleted."""
    saves: int = 0
    """Saves that were deleted because of ``keep``."""
    packs_deleted: int = 0
    packs_rewritten: int = 0
    bytes_freed: int = 0
    waiting: int = 0
    """Unused packs whose grace time is not over, or which a save that goes on may need."""
    saving: int = 0
    """Saves that went on, and may have kept packs from being deleted."""


@dataclass
class VerifyReport:
    packs: int = 0
    objects: int = 0
    saves: int = 0
    problems: list[str] = field(default_factory=list)


def _below(store: Store, roots: Iterable[bytes]) -> set[bytes]:
    """Every object that these trees need, themselves included. StoreDamaged if one cannot be
    read."""
    live: set[bytes] = set()
    memory: dict[bytes, Totals] = {}

    def read(hash_: bytes) -> bytes:
        live.add(hash_)
        return store.read(hash_)

    def learn(entries: Sequence[Entry]) -> None:
        for entry in entries:
            live.update(hash_ for _, hash_, _ in entry.pieces())

    for root in roots:
        totals_of(read, root, memory, on_entries=learn)
    return live


def collect(
    store: Store, *, grace: float = GRACE, keep: int = 0, now: Callable[[], float] = time.time
) -> CollectReport:
    """Free what nothing needs any more; with ``keep``, only the newest saves of each workspace, so
    many, count as needed, and the others are deleted. Safe while others save, whatever ``grace``
    is. Can be broken off at any point. StoreError if another process does the same."""
    with claims.claimed(store.blobs, "gc") as claim:
        for other in claims.claims(store.blobs, but=claim):
            if other.kind == "gc":
                raise StoreError(
                    f"Another process (number {other.pid}, {other.machine.partition(' ')[0]}) "
                    f"collects the garbage of the store {store.url} just now. Try again when it "
                    f"has ended."
                )
        return _collect(store, grace, keep, now, claim)


def _collect(
    store: Store, grace: float, keep: int, now: Callable[[], float], claim: str
) -> CollectReport:
    report = CollectReport()
    expired = [
        name for name in store.names(retired=True) if 0 < store.retired(name) <= now() - grace
    ]
    for name in expired:
        store.remove(name)
    report.workspaces = expired
    if keep > 0:
        for name in store.names(retired=True):
            for id_ in store.ids(name)[:-keep]:
                with suppress(WorkspaceNotFound):  # moved just now, with its notebook
                    report.saves += store.remove(name, id_)
    store.packs.doom(())
    # In this order: a save appears when its packs are there.
    seen = _all_roots(store)
    store.packs.refresh()
    sizes = store.packs.sizes()
    unused, doomed = _marks(store, "unused"), _marks(store, "doomed")
    live = _below(store, seen)
    needed: dict[str, list[tuple[bytes, Location]]] = {name: [] for name in sizes}
    left = set(live)
    # What has been written anew is also in the old pack, until that is deleted.
    for name in sorted(sizes, key=lambda name: (name in unused, name)):
        for hash_, at in store.packs.records(name):
            if hash_ in left:
                left.discard(hash_)
                needed[name].append((hash_, at))
    if left:
        raise StoreDamaged(
            f"The store {store.url} lacks {len(left)} objects that saves need. "
            f"Nothing was deleted; `sandbox-kernel workspace verify` says more."
        )
    small = [n for n, found in needed.items() if found and sizes.get(n, 0) < _SMALL]
    rewrite = [
        name
        for name, found in needed.items()
        if found and _worth_rewriting(found, sizes.get(name, 0), len(small) > _MANY)
    ]
    if rewrite:
        _rewrite(store, [item for name in rewrite for item in needed[name]])
        report.packs_rewritten = len(rewrite)
    garbage = [name for name, found in needed.items() if not found or name in rewrite]
    for name in {*needed, *unused, *doomed}.difference(garbage):  # needed again, or long gone
        _unmark(store, name, unused, doomed)
    ripe = _mark(store, garbage, unused, doomed, grace, now())
    # In this order: who saves either is seen here, or has been published, or has seen the marks.
    going_on = claims.claims(store.blobs, but=claim)
    late = _below(store, _all_roots(store) - seen)
    report.saving = sum(one.kind == "save" for one in going_on)
    for name in garbage:
        if name not in ripe or any(one.since <= ripe[name] + claims.SKEW for one in going_on):
            report.waiting += 1
        elif late and any(hash_ in late for hash_, _ in store.packs.records(name)):
            _unmark(store, name, unused, doomed)
        else:
            store.packs.delete(name)
            _unmark(store, name, unused, doomed)
            report.packs_deleted += 1
            report.bytes_freed += sizes[name]
    store.blobs.tidy()
    return report


def _all_roots(store: Store) -> set[bytes]:
    return {root for name in store.names(retired=True) for root in store.roots(name)}


def _worth_rewriting(found: Sequence[tuple[bytes, Location]], size: int, many_small: bool) -> bool:
    if size < _SMALL:
        return many_small
    return sum(at.stored for _, at in found) < _SPARSE * size


def _marks(store: Store, folder: str) -> dict[str, float]:
    found = {}
    for file in store.blobs.names(folder):
        name = file.removesuffix(".json")
        try:
            found[name] = float(json.loads(store.blobs.get(f"{folder}/{file}"))["since"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            continue  # noted anew
    return found


def _mark(
    store: Store,
    garbage: Iterable[str],
    unused: dict[str, float],
    doomed: dict[str, float],
    grace: float,
    now: float,
) -> dict[str, float]:
    """Note what is unused, and what is to be deleted; the latter, with the time since when it is
    known."""
    for name in garbage:
        if name not in unused:
            unused[name] = now
            store.blobs.put(f"unused/{name}.json", json.dumps({"since": now}).encode())
        if name not in doomed and (grace <= 0 or now - unused[name] >= grace):
            doomed[name] = now
            store.blobs.put(f"doomed/{name}.json", json.dumps({"since": now}).encode())
    return doomed


def _unmark(store: Store, name: str, unused: dict[str, float], doomed: dict[str, float]) -> None:
    if doomed.pop(name, None) is not None:
        store.blobs.delete(f"doomed/{name}.json")
    if unused.pop(name, None) is not None:
        store.blobs.delete(f"unused/{name}.json")


def _rewrite(store: Store, items: Sequence[tuple[bytes, Location]]) -> None:
    kinds = {hash_: at.kind for hash_, at in items}
    writer = store.writer()
    try:
        for stored in store.packs.read_many(kinds):
            data = bytes(stored.data)
            writer.add(kinds[stored.hash], stored.hash, stored.codec, data, len(stored.plain))
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    store.packs.moved(writer.names)


def verify(store: Store, *, on_pack: Callable[[str], object] = lambda name: None) -> VerifyReport:
    """Read everything: each object against its hash, each save down to its last chunk."""
    report = VerifyReport()
    # In this order: a save appears when its packs are there. What appears later is not looked at.
    saves = [(name, id_) for name in store.names(retired=True) for id_ in store.ids(name)]
    store.packs.refresh()
    whole: set[bytes] = set()
    looked_at = sorted(store.packs.names())
    for name in looked_at:
        on_pack(name)
        try:
            report.problems += store.packs.check(name)
            whole.update(hash_ for hash_, _ in store.packs.records(name))
        except FileNotFoundError:
            continue  # collected meanwhile
        except SandboxError as error:
            report.problems.append(str(error))
        report.packs += 1
    report.objects = len(whole)
    memory: dict[bytes, Totals] = {}
    for workspace, id_ in saves:
        missing: set[bytes] = set()

        def learn(entries: Sequence[Entry], missing: set[bytes] = missing) -> None:
            for entry in entries:
                missing.update(h for _, h, _ in entry.pieces() if h not in whole)

        try:
            save = store.load(workspace, id_)
            totals_of(store.read, bytes.fromhex(save.root), memory, on_entries=learn)
        except WorkspaceNotFound:
            continue  # deleted or moved meanwhile
        except SandboxError as error:
            report.problems.append(f"{workspace} {id_}: {error}")
        else:
            gone = _still_missing(store, missing, set(looked_at)) if missing else missing
            if gone:
                report.problems.append(f"{workspace} {id_}: {len(gone)} chunks are missing")
        report.saves += 1
    return report


def _still_missing(store: Store, hashes: set[bytes], looked_at: set[str]) -> set[bytes]:
    """Those of the objects that are in no pack which was written since: a gc may have moved
    them there."""
    store.packs.refresh()
    store.packs.load()
    found = {hash_: store.packs.find(hash_) for hash_ in hashes}
    return {hash_ for hash_, at in found.items() if at is None or at.pack in looked_at}
