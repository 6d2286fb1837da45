"""Persist, on the host: a sandbox's files become the next save of a workspace.

The conversation runs in a thread, over a blocking socket. The sandbox is hostile: each object must
have the hash that it was offered with, and the final tree must be complete and within the quota.

The sandbox learns that an object need not be sent only if *this* workspace has it already. Whether
the store has it from another workspace stays secret.
"""

from __future__ import annotations

import time
from collections import ChainMap, deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sandbox_kernel.errors import PacksGone, StoreDamaged, WorkspaceError, WorkspaceRefused
from sandbox_kernel.guest.workspace.helper import GONE, OFFER_SIZE
from sandbox_kernel.guest.workspace.ignore_file import identity
from sandbox_kernel.guest.workspace.messages import Kind, Messages
from sandbox_kernel.guest.workspace.tree_format import (
    CHUNK,
    CHUNK_KIND,
    LEAST_CHUNK,
    MAX_TREE,
    TREE_KIND,
    digest,
    unpack,
)
from sandbox_kernel.tunnel import background
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.workspace import ignore
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
from sandbox_kernel.workspace.packs import PackWriter
from sandbox_kernel.workspace.reports import OnProgress, Progress, Quota, SaveInfo, SaveReport
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, Totals, totals_of

_ATTEMPTS = 3
_MOST_OFFERS = 4096
_MOST_TREES = 512 * 2**20
_FREE_TREES, _MOST_RATIO = 64 * 2**20, 64
"""Bytes of trees that may be unpacked regardless of their packed size; beyond that, the most for
each packed byte: names and hashes do not compress better."""
_MOST_IGNORES = 4
_SLACK = 64 * 2**20


async def persist(
    sandbox: Attached,
    store: Store,
    name: str,
    *,
    notebook: str = "",
    kernel: str = "",
    quota: Quota | None = None,
    progress: OnProgress | None = None,
    stalled_after: float | None = None,
) -> SaveReport:
    """Save the files of a sandbox's working folder as the next save of workspace ``name``.

    May be awaited on any loop. The cost depends on what changed since the last save; if nothing
    did, no save is made (``SaveReport.new``). ``notebook`` and ``kernel`` are stored in the save.
    Cancelling cancels the transfer, within seconds even if the store does not answer, and no save
    appears.

    Raises QuotaExceeded (naming the biggest files), WorkspaceRefused (the sandbox sent invalid
    data), StoreError (the store cannot be written), or an error of the tunnel.
    """
    handle = sandbox.handle
    save = SaveInfo.planned(name, handle.backend, handle.name, notebook=notebook, kernel=kernel)
    work = partial(
        persist_over, store=store, save=save, folder=handle.workdir, quota=quota or Quota()
    )
    try:
        return await background.run(converse(sandbox, name, work, progress, stalled_after))
    except StoreDamaged:
        # The last save is incomplete and no longer a base: send everything again.
        return await background.run(converse(sandbox, name, work, progress, stalled_after))


def persist_over(talk: Talk, store: Store, save: SaveInfo, folder: str, quota: Quota) -> SaveReport:
    """Persist over a connection to a helper, and publish ``save``, unless ``talk`` is cancelled."""
    messages = Messages(talk.sock)
    with store.saving():
        for attempt in range(_ATTEMPTS):
            try:
                return _persist_once(talk, messages, store, save, folder, quota)
            except PacksGone:
                # The sandbox did not send objects that are no longer there: start over.
                store.forget()
                if attempt == _ATTEMPTS - 1:
                    raise
    raise AssertionError


def _persist_once(
    talk: Talk, messages: Messages, store: Store, save: SaveInfo, folder: str, quota: Quota
) -> SaveReport:
    started = time.monotonic()
    base, hints = store.begin(save.workspace)
    with store.writer() as writer:
        receiver = Receiver(
            messages, store, save.sandbox, save.workspace, base, writer, quota, talk.progress
        )
        try:
            found = receiver.run(folder)
        except StoreDamaged:
            if base is not None:
                store.distrust(base)
            raise
    new = base is None or base.root != found.root.hex()
    if base is not None and not new:
        made = replace(base, problems=found.problems)
    else:
        talk.check()
        packs = [*writer.elsewhere, *writer.names]
        made = store.publish(
            replace(
                save,
                root=found.root.hex(),
                parent=base.id if base is not None else "",
                files=found.totals.files,
                bytes=found.totals.bytes,
                problems=found.problems,
                packs=[*hints, *packs],
            ),
            {*receiver.relied_on, *packs},
        )
    receiver.agree(found)
    return SaveReport(made, new, messages.received, writer.plain_bytes, time.monotonic() - started)


@dataclass(frozen=True)
class ReceivedTree:
    """The tree of a sandbox's folder."""

    root: bytes
    totals: Totals
    problems: list[str]


@dataclass
class Receiver:
    """Asks a sandbox for its tree, and stores the objects that the store lacks.

    Without a ``writer`` it asks for trees only, and stores nothing.
    """

    messages: Messages
    store: Store
    sandbox: str
    name: str
    base: SaveInfo | None
    writer: PackWriter | None
    quota: Quota
    progress: OnProgress

    def __post_init__(self) -> None:
        self.relied_on: set[str] = set()
        """Packs with objects that the sandbox need not send."""
        self._trees: dict[bytes, tuple[int, bytes]] = {}
        """Trees received in this conversation, still packed: unpacked they may be huge."""
        self._chunks: dict[bytes, int] = {}
        self._totals: dict[bytes, Totals] = {}
        self._catalog = self.store.catalog(self.name)
        self._catalog_read = self.base is None
        self._packs_read = self._lost = False
        self._expected: deque[tuple[int, bytes]] = deque()
        self._tree_bytes = self._packed_bytes = self._chunk_bytes = 0
        # All folders, files and chunks, twice: files change while they are read.
        most = 3 * self.quota.max_files + self.quota.max_bytes // LEAST_CHUNK
        self._offers_left = 2 * most + _MOST_OFFERS
        self._ignores_left = _MOST_IGNORES
        self._patience = Patience(self.messages.sock)

    def run(self, folder: str) -> ReceivedTree:
        """Ask for the tree of a folder in the sandbox. Call ``agree`` when it is stored."""
        text = _ignores.get((self.store.id, self.name), b"")
        self.messages.send_json(
            Kind.PERSIST,
            {
                "root": folder,
                "key": f"{self.store.id}/{self.name}",
                "base": self.base.root if self.base is not None else "",
                "trees_only": self.writer is None,
                "max_files": self.quota.max_files,
                "max_bytes": self.quota.max_bytes,
                "ignore": identity(text),
                "rules": ignore.rules(text),
            },
        )
        taking = {
            Kind.OFFER: self._offer,
            Kind.OBJECT: self._object,
            Kind.NOTE: self._note,
            Kind.IGNORE: self._ignore,
        }
        while True:
            try:
                kind, payload = self.messages.receive()
            except ValueError as error:
                raise self._refused(str(error)) from None
            if kind == Kind.RESULT:
                return self._result(self._json(payload))
            if kind == Kind.FAILED:
                raise reported_failure(self.sandbox, self._json(payload), self.quota)
            if kind not in taking:
                raise self._refused(f"a message of kind {kind}")
            taking[Kind(kind)](payload)

    def agree(self, found: ReceivedTree) -> None:
        """Confirm to the sandbox that everything is stored, and update the catalog."""
        self._catalog.chunks.update(self._chunks)
        self._catalog.trees.update(self._trees)
        self._catalog.totals.update(self._totals)
        self.messages.send_json(Kind.DONE, {"tree": found.root.hex()})

    def read(self, hash_: bytes) -> bytes:
        """A tree of this conversation, or of the store."""
        packed = self._trees.get(hash_)
        return self.store.read(hash_) if packed is None else bytes(unpack(*packed, MAX_TREE))

    def _offer(self, payload: bytes | bytearray) -> None:
        count, rest = divmod(len(payload), OFFER_SIZE)
        if rest or not 0 < count <= _MOST_OFFERS or len(self._expected) > 64 * _MOST_OFFERS:
            raise self._refused("an invalid offer")
        self._offers_left -= count
        if self._offers_left < 0:
            raise self._refused("too many offers")
        self._patience.moved()
        answer = bytearray(count)
        for number in range(count):
            at = number * OFFER_SIZE
            kind, hash_ = payload[at], bytes(payload[at + 1 : at + OFFER_SIZE])
            if kind not in (CHUNK_KIND, TREE_KIND):
                raise self._refused(f"an object of kind {kind}")
            got = hash_ in (self._trees if kind == TREE_KIND else self._chunks)
            unwanted = kind == CHUNK_KIND and self.writer is None  # trees only
            if not (got or unwanted or self._known(kind, hash_)):
                answer[number] = 1
                self._expected.append((kind, hash_))
        self.messages.send(Kind.WANT, bytes(answer))

    def _known(self, kind: int, hash_: bytes) -> bool:
        """Whether this workspace and the store have an object."""
        held = self._catalog.trees if kind == TREE_KIND else self._catalog.chunks
        if hash_ not in held and not self._catalog_read:
            assert self.base is not None
            self._catalog_read = True
            self.store.check(self.base)
        if hash_ not in held:
            return False
        at = self.store.packs.find(hash_)
        if at is None and not self._packs_read:
            # gc may have moved it to a pack that is not loaded yet.
            self._packs_read = True
            self.store.packs.load()
            at = self.store.packs.find(hash_)
        if at is None:
            self._lost = True
            return False
        self.relied_on.add(at.pack)
        return True

    def _object(self, payload: bytes | bytearray) -> None:
        if not self._expected or not payload:
            raise self._refused("an object that was not requested")
        kind, hash_ = self._expected.popleft()
        codec, data = payload[0], memoryview(payload)[1:]
        if codec == GONE:
            return  # the file has changed; the final tree must not refer to it
        limit = MAX_TREE if kind == TREE_KIND else CHUNK
        try:
            plain = unpack(codec, data, limit)
        except ValueError as error:
            raise self._refused(f"an invalid object ({error})") from None
        if digest(plain) != hash_:
            raise self._refused("an object whose SHA-256 differs from the offer")
        if kind == TREE_KIND:
            self._tree_bytes += len(plain)
            self._packed_bytes += len(data)
            self._trees[hash_] = codec, bytes(data)
        else:
            self._chunk_bytes += len(plain)
            self._chunks[hash_] = len(plain)
        most = min(_MOST_TREES, _FREE_TREES + _MOST_RATIO * self._packed_bytes)
        if self._tree_bytes > most or self._chunk_bytes > self.quota.max_bytes + _SLACK:
            raise self._refused("more data than the quota allows")
        if self.writer is not None and not self.writer.need_not(hash_):
            self.writer.add(kind, hash_, codec, data, len(plain))
        self._patience.moved()
        self.progress(Progress("receive", len(self._chunks), self._chunk_bytes + self._tree_bytes))

    def _note(self, payload: bytes | bytearray) -> None:
        note = self._json(payload)
        files, size = checked_count(note.get("files")), checked_count(note.get("bytes"))
        self._patience.reported(min(files, self.quota.max_files), min(size, self.quota.max_bytes))
        self.progress(Progress("scan", files, size))

    def _ignore(self, payload: bytes | bytearray) -> None:
        text = bytes(payload)
        self._ignores_left -= 1
        if self._ignores_left < 0:
            raise self._refused("too many .sandboxignore files")
        try:
            compiled = ignore.rules(text)
        except WorkspaceError:
            self.messages.send_json(Kind.RULES, ignore.rules())
            raise
        if len(_ignores) > 1024:
            _ignores.clear()
        _ignores[self.store.id, self.name] = text
        self.messages.send_json(Kind.RULES, compiled)

    def _result(self, result: dict[str, Any]) -> ReceivedTree:
        try:
            root = bytes.fromhex(result["tree"])
            problems = checked_problems(result["problems"])
            more = checked_count(result["problem_count"]) - len(problems)
        except (ValueError, KeyError, TypeError):
            raise self._refused("an invalid result") from None
        if more > 0:
            problems.append(f"and {more} more")
        fresh: list[Entry] = []
        try:
            totals = totals_of(
                self._tree,
                root,
                ChainMap(self._totals, self._catalog.totals),
                most_files=self.quota.max_files,
                most_bytes=self.quota.max_bytes,
                on_entries=fresh.extend,
            )
        except WorkspaceRefused as error:
            raise self._incomplete(f"an invalid tree: {error}") from None
        if self.writer is not None:
            self._check_chunks(fresh)
        return ReceivedTree(root, totals, problems)

    def _tree(self, hash_: bytes) -> bytes:
        if hash_ not in self._trees and not self._known(TREE_KIND, hash_):
            raise WorkspaceRefused("it refers to a tree that was not sent")
        return self.read(hash_)

    def _check_chunks(self, entries: list[Entry]) -> None:
        for entry in entries:
            for _, hash_, length in entry.pieces():
                found = self._chunks.get(hash_)
                if found is None and self._known(CHUNK_KIND, hash_):
                    found = self._catalog.chunks[hash_]
                if found != length:
                    raise self._incomplete(
                        f"a file whose contents were not sent, or have another length "
                        f"({printable(entry.name)!r})"
                    )

    def _json(self, payload: bytes | bytearray) -> dict[str, Any]:
        try:
            return parse_object(payload)
        except ValueError as error:
            raise self._refused(str(error)) from None

    def _incomplete(self, what: str) -> WorkspaceError | PacksGone:
        """The error for a tree with missing objects: the sandbox lies, or the store lost them."""
        if not self._lost:
            return self._refused(what)
        return PacksGone(
            f"The store {self.store.url} lost objects of workspace {self.name!r} during the save. "
            f"Nothing was saved; save again."
        )

    def _refused(self, what: str) -> WorkspaceRefused:
        return WorkspaceRefused(
            f"Sandbox {self.sandbox!r} sent {what}. Nothing was saved; earlier saves of workspace "
            f"{self.name!r} are unchanged."
        )


_ignores: dict[tuple[str, str], bytes] = {}
"""The last ignore file of each workspace, so that it need not be sent again."""
