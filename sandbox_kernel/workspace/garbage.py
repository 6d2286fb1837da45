"""Garbage collection and verification of a store.

Objects that no save and no baseline reaches are garbage. A pack without live objects is first
marked as unused. After the grace time it is doomed, and then deleted, unless a save that began
before is still running (``store_users``). The live objects of a sparse pack, and of many small
packs, are copied to a new one, which leaves the old packs unused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sandbox_kernel.errors import SandboxError, StoreDamaged, StoreError, WorkspaceNotFound
from sandbox_kernel.workspace import store_users
from sandbox_kernel.workspace.blobs import Blobs
from sandbox_kernel.workspace.packs import Location
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Catalog, Totals

GRACE = 7 * 24 * 3600.0
_SPARSE = 0.5
_SMALL, _MANY = 2**20, 32


@dataclass
class CollectReport:
    """The result of ``collect``."""

    workspaces: Sequence[str] = ()
    """Retired workspaces that it deleted."""
    saves: int = 0
    """Saves that it deleted because of ``keep``."""
    packs_deleted: int = 0
    packs_rewritten: int = 0
    bytes_freed: int = 0
    waiting: int = 0
    """Unused packs within their grace time, or that a running save may need."""
    saving: int = 0
    """Running saves, which may have kept packs from being deleted."""


@dataclass
class VerifyReport:
    """The result of ``verify``."""

    packs: int = 0
    objects: int = 0
    saves: int = 0
    problems: list[str] = field(default_factory=list)


def _below(store: Store, roots: Iterable[bytes]) -> set[bytes]:
    """Every object of these trees, themselves included. StoreDamaged."""
    found = Catalog()
    for root in roots:
        found.add(store.read, root)
    return {*found.trees, *found.chunks}


def collect(
    store: Store, *, grace: float = GRACE, keep: int = 0, now: Callable[[], float] = time.time
) -> CollectReport:
    """Delete garbage, and retired workspaces whose grace time is over; with ``keep``, also all but
    the newest ``keep`` saves of each workspace. Safe while others save, whatever ``grace`` is, and
    when killed at any point. StoreError if another process collects garbage."""
    with store_users.claimed(store.blobs, "gc") as claim:
        for other in store_users.claims(store.blobs, but=claim):
            if other.kind == "gc":
                raise StoreError(
                    f"Process {other.pid} on {other.machine.partition(' ')[0]} is collecting the "
                    f"garbage of the store {store.url}. Try again when it has ended."
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
                with suppress(WorkspaceNotFound):  # moved just now
                    report.saves += store.remove(name, id_)
    store.packs.doom(())
    # Saves before packs: a save appears when its packs are complete.
    seen = _all_roots(store)
    store.packs.refresh()
    sizes = store.packs.sizes()
    unused, doomed = _Marks(store.blobs, "unused"), _Marks(store.blobs, "doomed")
    live = _below(store, seen)
    needed: dict[str, list[tuple[bytes, Location]]] = {name: [] for name in sizes}
    left = set(live)
    # A copied object is also in its old pack, which is unused.
    for name in sorted(sizes, key=lambda name: (name in unused, name)):
        for hash_, at in store.packs.records(name):
            if hash_ in left:
                left.discard(hash_)
                needed[name].append((hash_, at))
    if left:
        raise StoreDamaged(
            f"The store {store.url} lacks {len(left)} objects of its saves. Nothing was deleted; "
            f"`sandbox-kernel workspace verify` lists the saves."
        )
    used = {name: sum(at.stored for _, at in found) for name, found in needed.items() if found}
    small = [name for name in used if sizes[name] < _SMALL]
    rewrite = [n for n, size in used.items() if sizes[n] >= _SMALL and size < _SPARSE * sizes[n]]
    rewrite += small if len(small) > _MANY else ()
    if rewrite:
        _rewrite(store, [item for name in rewrite for item in needed[name]])
        report.packs_rewritten = len(rewrite)
    garbage = [name for name, found in needed.items() if not found or name in rewrite]
    for name in {*needed, *unused, *doomed}.difference(garbage):  # needed again, or gone
        doomed.remove(name)
        unused.remove(name)
    marked = now()
    for name in garbage:
        unused.add(name, marked)
        if grace <= 0 or marked - unused[name] >= grace:
            doomed.add(name, marked)
    # Claims before saves: a save is seen here, or is published, or has seen the marks.
    going_on = store_users.claims(store.blobs, but=claim)
    late = _below(store, _all_roots(store) - seen)
    report.saving = sum(one.kind == "save" for one in going_on)
    for name in garbage:
        since = doomed.get(name)
        if since is None or any(one.since <= since + store_users.SKEW for one in going_on):
            report.waiting += 1
            continue
        if not late or all(hash_ not in late for hash_, _ in store.packs.records(name)):
            store.packs.delete(name)
            report.packs_deleted += 1
            report.bytes_freed += sizes[name]
        doomed.remove(name)
        unused.remove(name)
    store.blobs.tidy()
    return report


def _all_roots(store: Store) -> set[bytes]:
    return {root for name in store.names(retired=True) for root in store.roots(name)}


class _Marks(dict[str, float]):
    """Packs that are marked as ``unused`` or ``doomed``, and since when: a file for each."""

    def __init__(self, blobs: Blobs, folder: str) -> None:
        super().__init__()
        self._blobs, self._folder = blobs, folder
        for file in blobs.names(folder):
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # is marked again
                since = json.loads(blobs.get(f"{folder}/{file}"))["since"]
                self[file.removesuffix(".json")] = float(since)

    def add(self, name: str, now: float) -> None:
        if name not in self:
            self[name] = now
            self._blobs.put(f"{self._folder}/{name}.json", json.dumps({"since": now}).encode())

    def remove(self, name: str) -> None:
        if self.pop(name, None) is not None:
            self._blobs.delete(f"{self._folder}/{name}.json")


def _rewrite(store: Store, items: Sequence[tuple[bytes, Location]]) -> None:
    kinds = {hash_: at.kind for hash_, at in items}
    with store.writer() as writer:
        for stored in store.packs.read_many(kinds):
            data = bytes(stored.data)
            writer.add(kinds[stored.hash], stored.hash, stored.codec, data, len(stored.plain))


def verify(store: Store, *, on_pack: Callable[[str], object] = lambda name: None) -> VerifyReport:
    """Read everything: check each object against its hash, and each save for missing objects."""
    report = VerifyReport()
    # Saves before packs: a save appears when its packs are complete.
    saves = [(name, id_) for name in store.names(retired=True) for id_ in store.ids(name)]
    store.packs.refresh()
    whole: set[bytes] = set()
    looked_at = sorted(store.packs.names())
    for name in looked_at:
        on_pack(name)
        try:
            records = list(store.packs.records(name))
            whole.update(hash_ for hash_, _ in records)
            report.problems += store.packs.check(name, records)
        except FileNotFoundError:
            continue  # deleted by gc
        except SandboxError as error:
            report.problems.append(str(error))
        report.packs += 1
    report.objects = len(whole)
    memory: dict[bytes, Totals] = {}
    for workspace, id_ in saves:
        try:
            found = Catalog(memory)  # passes over folders that are known to be whole
            found.add(store.read, store.load(workspace, id_).tree)
            missing = found.chunks.keys() - whole
        except WorkspaceNotFound:
            continue  # deleted or moved
        except SandboxError as error:
            report.problems.append(f"{workspace} {id_}: {error}")
        else:
            gone = _still_missing(store, missing, set(looked_at)) if missing else missing
            if gone:
                report.problems.append(f"{workspace} {id_}: {len(gone)} chunks are missing")
                memory = {}
        report.saves += 1
    return report


def _still_missing(store: Store, hashes: set[bytes], looked_at: set[str]) -> set[bytes]:
    """Those objects that are not in a newer pack either, to which gc may have copied them."""
    store.packs.refresh()
    store.packs.load()
    found = {hash_: store.packs.find(hash_) for hash_ in hashes}
    return {hash_ for hash_, at in found.items() if at is None or at.pack in looked_at}
