"""The host's half of a persist, and of the first step of a hydrate: what the sandbox has.

Runs in a thread, over a blocking socket. What comes is hostile: each object must have the hash that
it was offered with, and the tree that the sandbox ends with must be whole and within the limits.

The sandbox is told that an object need not be sent only if this workspace has it already. That the
store may have it from another workspace is none of its business.
"""

from __future__ import annotations

import json
import socket
from collections import ChainMap, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.errors import (
    PacksGone,
    QuotaExceeded,
    WorkspaceError,
    WorkspaceRefused,
)
from sandbox_kernel.guest.workspace.layout import CHUNK, MAX_TREE, digest, unpack
from sandbox_kernel.guest.workspace.messages import (
    DONE,
    FAILED,
    IGNORE,
    NOTE,
    OBJECT,
    OFFER,
    PERSIST,
    RESULT,
    RULES,
    WANT,
    Messages,
)
from sandbox_kernel.guest.workspace.offer import GONE, OFFER_SIZE
from sandbox_kernel.text import printable
from sandbox_kernel.workspace import ignore
from sandbox_kernel.workspace.packs import CHUNK_KIND, TREE_KIND, PackWriter
from sandbox_kernel.workspace.patience import Patience
from sandbox_kernel.workspace.reports import Limits, Progress, SaveInfo
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, Totals, totals_of

_MOST_OFFERS = 4096
_MOST_TREES = 512 * 2**20
_FREE_TREES, _MOST_RATIO = 64 * 2**20, 64
"""Bytes of trees that may be unpacked from however little, and how many from each byte that came
beyond that: names and hashes do not compress so well."""
_MOST_IGNORES = 4
_SLACK = 64 * 2**20
_MOST_PROBLEMS = 200


@dataclass(frozen=True)
class Found:
    """What the sandbox has."""

    root: bytes
    totals: Totals
    problems: list[str]


class Receiver:
    """One look at what a sandbox has, as a conversation over ``messages``.

    Without a ``writer`` only trees are asked for, and nothing is stored.
    """

    def __init__(
        self,
        messages: Messages,
        store: Store,
        sandbox: str,
        name: str,
        base: SaveInfo | None,
        *,
        writer: PackWriter | None,
        limits: Limits,
        progress: Callable[[Progress], object] = lambda progress: None,
    ) -> None:
        self.trees: dict[bytes, tuple[int, bytes]] = {}
        """Trees that came in this conversation, packed as they came: unpacked, a few bytes can be
        very many."""
        self._messages = messages
        self._store = store
        self._sandbox = sandbox
        self._name = name
        self._base = base
        self._writer = writer
        self._limits = limits
        self._progress = progress
        self._catalog = store.catalog(name)
        self._catalog_read = base is None
        self._packs_read = self._lost = False
        self._chunks: dict[bytes, int] = {}
        self._totals: dict[bytes, Totals] = {}
        self.elsewhere: set[str] = set()
        """Packs that had objects already which this workspace did not know."""
        self.relied_on: set[str] = set()
        """Packs with objects that the sandbox was told not to send."""
        self._expected: deque[tuple[int, bytes]] = deque()
        self._tree_bytes = self._packed_bytes = self._chunk_bytes = 0
        # Twice, as files change while they are read: folders, files and chunks, at the most.
        self._offers_left = 2 * (3 * limits.max_files + limits.max_bytes // CHUNK) + _MOST_OFFERS
        self._ignores_left = _MOST_IGNORES
        self._patience = Patience(messages.sock)

    def run(self, folder: str) -> Found:
        """Ask for the tree of a folder in the sandbox. The caller must answer with ``agree`` when
        what was found is stored."""
        text = _ignores.get((self._store.id, self._name), b"")
        self._messages.send_json(
            PERSIST,
            {
                "root": folder,
                "key": f"{self._store.id}/{self._name}",
                "base": self._base.root if self._base is not None else "",
                "trees_only": self._writer is None,
                "max_files": self._limits.max_files,
                "max_bytes": self._limits.max_bytes,
                "ignore": ignore.identity(text),
                "rules": ignore.rules(text),
            },
        )
        while True:
            kind, payload = self._receive()
            if kind == OFFER:
                self._offer(payload)
            elif kind == OBJECT:
                self._object(payload)
            elif kind == NOTE:
                self._note(payload)
            elif kind == IGNORE:
                self._ignore(bytes(payload))
            elif kind == RESULT:
                return self._result(self._json(payload))
            elif kind == FAILED:
                raise failure(self._sandbox, self._json(payload), self._limits)
            else:
                raise self._refused(f"a message of kind {kind}")

    def agree(self, found: Found) -> None:
        """Tell the sandbox that all is stored, and remember what the workspace has."""
        self._catalog.chunks.update(self._chunks)
        self._catalog.trees.update(self.trees)
        self._catalog.totals.update(self._totals)
        self._messages.send_json(DONE, {"tree": found.root.hex()})

    def read(self, hash_: bytes) -> bytes:
        """A tree that came just now, or that the store has."""
        return self._came(hash_) or self._store.read(hash_)

    def _came(self, hash_: bytes) -> bytes | None:
        packed = self.trees.get(hash_)
        return None if packed is None else bytes(unpack(*packed, MAX_TREE))

    def _receive(self) -> tuple[int, bytes | bytearray]:
        try:
            return self._messages.receive()
        except ValueError as error:
            raise self._refused(str(error)) from None

    def _offer(self, payload: bytes | bytearray) -> None:
        count, rest = divmod(len(payload), OFFER_SIZE)
        if rest or not 0 < count <= _MOST_OFFERS or len(self._expected) > 64 * _MOST_OFFERS:
            raise self._refused("an offer that makes no sense")
        self._offers_left -= count
        if self._offers_left < 0:
            raise self._refused("offers without end")
        self._patience.moved()
        answer = bytearray(count)
        for number in range(count):
            at = number * OFFER_SIZE
            kind, hash_ = payload[at], bytes(payload[at + 1 : at + OFFER_SIZE])
            if kind not in (CHUNK_KIND, TREE_KIND):
                raise self._refused(f"an object of kind {kind}")
            if not self._has(kind, hash_):
                answer[number] = 1
                self._expected.append((kind, hash_))
        self._messages.send(WANT, bytes(answer))

    def _has(self, kind: int, hash_: bytes) -> bool:
        if hash_ in (self.trees if kind == TREE_KIND else self._chunks):
            return True
        if kind == CHUNK_KIND and self._writer is None:
            return True  # contents are not asked for
        return self._known(kind, hash_)

    def _known(self, kind: int, hash_: bytes) -> bool:
        """Whether this workspace has it, and the store still."""
        held = self._catalog.trees if kind == TREE_KIND else self._catalog.chunks
        if hash_ not in held and not self._catalog_read:
            assert self._base is not None
            self._catalog_read = True
            self._store.check(self._base)
        if hash_ not in held:
            return False
        at = self._store.packs.find(hash_)
        if at is None and not self._packs_read:
            # A gc may have written it anew, to a pack that nobody has looked into yet.
            self._packs_read = True
            self._store.packs.load()
            at = self._store.packs.find(hash_)
        if at is None:
            self._lost = True
            return False
        self.relied_on.add(at.pack)
        return True

    def _object(self, payload: bytes | bytearray) -> None:
        if not self._expected or not payload:
            raise self._refused("an object that was not asked for")
        kind, hash_ = self._expected.popleft()
        codec, data = payload[0], memoryview(payload)[1:]
        if codec == GONE:
            return  # it changed meanwhile; the tree in the end must do without
        limit = MAX_TREE if kind == TREE_KIND else CHUNK
        try:
            plain = unpack(codec, data, limit)
        except ValueError as error:
            raise self._refused(f"an object that cannot be read ({error})") from None
        if digest(plain) != hash_:
            raise self._refused("an object with another SHA-256 than it was offered with")
        if kind == TREE_KIND:
            self._tree_bytes += len(plain)
            self._packed_bytes += len(data)
            self.trees[hash_] = codec, bytes(data)
        else:
            self._chunk_bytes += len(plain)
            self._chunks[hash_] = len(plain)
        most = min(_MOST_TREES, _FREE_TREES + _MOST_RATIO * self._packed_bytes)
        if self._tree_bytes > most or self._chunk_bytes > self._limits.max_bytes + _SLACK:
            raise self._refused("more than it may")
        if self._writer is not None:
            at = self._store.packs.find(hash_)
            if at is None:
                self._writer.add(kind, hash_, codec, data, len(plain))
            else:
                self.elsewhere.add(at.pack)
        self._patience.moved()
        self._progress(Progress("receive", len(self._chunks), self._chunk_bytes + self._tree_bytes))

    def _note(self, payload: bytes | bytearray) -> None:
        note = self._json(payload)
        files, size = counted(note.get("files")), counted(note.get("bytes"))
        # More than it may have it cannot have looked at.
        self._patience.told(min(files, self._limits.max_files), min(size, self._limits.max_bytes))
        self._progress(Progress("scan", files, size))

    def _ignore(self, text: bytes) -> None:
        self._ignores_left -= 1
        if self._ignores_left < 0:
            raise self._refused("one .sandboxignore after the other")
        try:
            compiled = ignore.rules(text)
        except WorkspaceError:
            self._messages.send_json(RULES, ignore.rules())
            raise
        if len(_ignores) > 1024:
            _ignores.clear()
        _ignores[self._store.id, self._name] = text
        self._messages.send_json(RULES, compiled)

    def _result(self, result: dict[str, Any]) -> Found:
        try:
            root = bytes.fromhex(result["tree"])
            problems = [printable(str(p)[:500]) for p in list(result["problems"])[:_MOST_PROBLEMS]]
            more = counted(result["problem_count"]) - len(problems)
        except (ValueError, KeyError, TypeError):
            raise self._refused("a result that makes no sense") from None
        if more > 0:
            problems.append(f"and {more} more")
        fresh: list[Entry] = []
        try:
            totals = totals_of(
                self._tree,
                root,
                ChainMap(self._totals, self._catalog.totals),
                most_files=self._limits.max_files,
                most_bytes=self._limits.max_bytes,
                on_entries=fresh.extend,
            )
        except WorkspaceRefused as error:
            raise self._not_whole(f"a tree that cannot be: {error}") from None
        if self._writer is not None:
            self._check_chunks(fresh)
        return Found(root, totals, problems)

    def _tree(self, hash_: bytes) -> bytes:
        data = self._came(hash_)
        if data is None:
            if not self._known(TREE_KIND, hash_):
                raise WorkspaceRefused("it refers to a tree that was never sent")
            data = self._store.read(hash_)
        return data

    def _check_chunks(self, entries: list[Entry]) -> None:
        for entry in entries:
            for _, hash_, length in entry.pieces():
                found = self._chunks.get(hash_)
                if found is None and self._known(CHUNK_KIND, hash_):
                    found = self._catalog.chunks[hash_]
                if found != length:
                    raise self._not_whole(
                        f"a file with contents that were never sent, or of another length "
                        f"({printable(entry.name)!r})"
                    )

    def _json(self, payload: bytes | bytearray) -> dict[str, Any]:
        try:
            return parse_object(payload)
        except ValueError as error:
            raise self._refused(str(error)) from None

    def _not_whole(self, what: str) -> WorkspaceError | PacksGone:
        """A tree without all that is in it: the sandbox lies, or has not sent again what the store
        has lost."""
        if not self._lost:
            return self._refused(what)
        return PacksGone(
            f"The store {self._store.url} has lost some of workspace {self._name!r} while that was "
            f"being saved. Nothing was saved; save again."
        )

    def _refused(self, what: str) -> WorkspaceRefused:
        return WorkspaceRefused(
            f"Sandbox {self._sandbox!r} sent {what}. Nothing was saved of workspace "
            f"{self._name!r}; what was saved before is as it was."
        )


_ignores: dict[tuple[str, str], bytes] = {}
"""The ignore file that each workspace had last, so that it need not be sent again."""


def parse_object(payload: bytes | bytearray) -> dict[str, Any]:
    """A message of the sandbox that must be a JSON object; ValueError says what it is instead."""
    try:
        value = json.loads(bytes(payload))
    except (ValueError, RecursionError):
        raise ValueError("something that is no JSON") from None
    if isinstance(value, dict):
        return value
    raise ValueError("something that makes no sense")


def counted(value: Any) -> int:
    """A number that the sandbox says; 0 if it cannot be one."""
    return value if type(value) is int and 0 <= value < 2**63 else 0


def failure(sandbox: str, message: dict[str, Any], limits: Limits) -> WorkspaceError:
    """What the sandbox says about why it could not go on."""
    text = printable(str(message.get("message"))[:1000])
    if message.get("kind") != "quota":
        return WorkspaceError(f"In sandbox {sandbox!r}: {text}")
    offenders = message.get("offenders")
    listed = [
        f"{printable(str(item[1])[:300])} ({counted(item[0])})"
        for item in (offenders if isinstance(offenders, list) else [])[:10]
        if isinstance(item, list) and len(item) == 2
    ]
    return QuotaExceeded(
        f"The workspace in sandbox {sandbox!r} has {text}; {limits.max_files} files and "
        f"{limits.max_bytes} bytes are allowed. Biggest: {', '.join(listed) or 'unknown'}. Delete "
        f"some, list them in .sandboxignore, or raise the quota."
    )


def quiet_close(sock: socket.socket) -> None:
    """End a conversation from any thread: whoever reads or writes it is told."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended already
