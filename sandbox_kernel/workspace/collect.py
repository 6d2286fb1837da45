"""Garbage collection and verification of a store.

What no save and no baseline reaches is garbage. A pack of which nothing is needed is first noted as
unused, and deleted when it has been so for the grace time: a save that is being made meanwhile may
have found an object there. A pack of which little is needed, and many small packs, are written
anew, and then become unused themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sandbox_kernel.errors import SandboxError, StoreDamaged
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
    """Unused packs whose grace time is not over."""


@dataclass
class VerifyReport:
    packs: int = 0
    objects: int = 0
    saves: int = 0
    problems: list[str] = field(default_factory=list)


def reachable(store: Store) -> set[bytes]:
    """Every object that a save or a baseline needs. StoreDamaged if one cannot be read."""
    live: set[bytes] = set()
    memory: dict[bytes, Totals] = {}

    def read(hash_: bytes) -> bytes:
        live.add(hash_)
        return store.read(hash_)

    def learn(entries: Sequence[Entry]) -> None:
        for entry in entries:
            live.update(hash_ for _, hash_, _ in entry.pieces())

    for name in store.names(retired=True):
        for root in store.roots(name):
            totals_of(read, root, memory, on_entries=learn)
    return live


def collect(
    store: Store, *, grace: float = GRACE, keep: int = 0, now: Callable[[], float] = time.time
) -> CollectReport:
    """Free what nothing needs any more; with ``keep``, only the newest saves of each workspace, so
    many, count as needed, and the others are deleted. Safe while others save, if ``grace`` is
    longer than a save takes. Can be broken off at any point."""
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
                report.saves += store.remove(name, id_)
    store.packs.refresh()
    sizes = store.packs.sizes()
    marks = _marks(store)
    seen = _all_saves(store)
    live = reachable(store)
    needed: dict[str, list[tuple[bytes, Location]]] = {name: [] for name in sizes}
    left = set(live)
    # What has been written anew is also in the old pack, until that is deleted.
    for name in sorted(sizes, key=lambda name: (name in marks, name)):
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
    # Saves that were made meanwhile: what they say that they need is not looked at this time.
    for workspace, id_ in _all_saves(store) - seen:
        for pack in store.find(workspace, id_).packs:
            needed.pop(pack, None)
            rewrite = [name for name in rewrite if name != pack]
    for name, found in needed.items():
        if not found:
            _unused(store, name, sizes[name], marks, grace, now(), report)
        elif name in marks and name not in rewrite:
            store.blobs.delete(f"unused/{name}.json")  # it is needed again
    if rewrite:
        _rewrite(store, [item for name in rewrite for item in needed[name]])
        report.packs_rewritten = len(rewrite)
        for name in rewrite:
            _unused(store, name, sizes[name], marks, grace, now(), report)
    store.blobs.tidy()
    return report


def _all_saves(store: Store) -> set[tuple[str, str]]:
    return {(name, id_) for name in store.names(retired=True) for id_ in store.ids(name)}


def _worth_rewriting(found: Sequence[tuple[bytes, Location]], size: int, many_small: bool) -> bool:
    if size < _SMALL:
        return many_small
    return sum(at.stored for _, at in found) < _SPARSE * size


def _marks(store: Store) -> dict[str, float]:
    found = {}
    for file in store.blobs.names("unused"):
        name = file.removesuffix(".json")
        try:
            found[name] = float(json.loads(store.blobs.get(f"unused/{file}"))["since"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            continue  # noted anew
    return found


def _unused(
    store: Store,
    name: str,
    size: int,
    marks: dict[str, float],
    grace: float,
    now: float,
    report: CollectReport,
) -> None:
    since = marks.get(name)
    if grace <= 0 or (since is not None and now - since >= grace):
        store.packs.delete(name)
        store.blobs.delete(f"unused/{name}.json")
        report.packs_deleted += 1
        report.bytes_freed += size
        return
    if since is None:
        store.blobs.put(f"unused/{name}.json", json.dumps({"since": now}).encode())
    report.waiting += 1


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
    store.packs.refresh()
    whole: set[bytes] = set()
    for name in sorted(store.packs.names()):
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
    for workspace in store.names(retired=True):
        for id_ in store.ids(workspace):
            report.saves += 1
            try:
                save = store.load(workspace, id_)
                missing: set[bytes] = set()

                def learn(entries: Sequence[Entry], missing: set[bytes] = missing) -> None:
                    for entry in entries:
                        missing.update(h for _, h, _ in entry.pieces() if h not in whole)

                totals_of(store.read, bytes.fromhex(save.root), memory, on_entries=learn)
            except SandboxError as error:
                report.problems.append(f"{workspace} {id_}: {error}")
                continue
            if missing:
                report.problems.append(f"{workspace} {id_}: {len(missing)} chunks are missing")
    return report
