"""Trees and guests that lie."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from sandbox_kernel.guest.workspace.messages import Ended, Kind, Messages
from sandbox_kernel.guest.workspace.tree_format import CHUNK, CHUNK_KIND, TREE_KIND, digest
from sandbox_kernel.workspace.conversation import Talk
from sandbox_kernel.workspace.receive import persist_over
from sandbox_kernel.workspace.reports import HydrateReport, Quota, SaveInfo, SaveReport
from sandbox_kernel.workspace.send import hydrate_over
from sandbox_kernel.workspace.store import Store
from tests.workspace.guests import facts_of

DATA = b"harmless"
HASH = digest(DATA).hex()
FILE = ["f", 0o644, 0, len(DATA), [HASH]]


def page(*entries: Any) -> bytes:
    return json.dumps({"entries": entries}).encode()


def file(name: Any, *rest: Any) -> list[Any]:
    return [name, *(rest or FILE)]


class Trees:
    """Objects that belong to one attack; the last tree is the root."""

    def __init__(self) -> None:
        self.objects: list[tuple[int, bytes]] = [(CHUNK_KIND, DATA)]

    def add(self, data: bytes) -> str:
        self.objects.append((TREE_KIND, data))
        return digest(data).hex()


def one(data: bytes) -> Callable[[Trees], None]:
    return lambda trees: (trees.add(data), None)[1]


def _index_of_indexes(trees: Trees) -> None:
    inner = trees.add(json.dumps({"pages": [trees.add(page(file("a")))]}).encode())
    trees.add(json.dumps({"pages": [inner]}).encode())


def _one_page_many_times(trees: Trees) -> None:
    names = [file(f"f{number:05}") for number in range(1000)]
    trees.add(json.dumps({"pages": [trees.add(page(*names))] * 100_000}).encode())


def _doubling(trees: Trees) -> None:
    """Sixty folders that hold the one before twice: 2^60 files."""
    inner = trees.add(page(file("x")))
    for _ in range(60):
        inner = trees.add(page(["a", "d", 0o755, 0, inner], ["b", "d", 0o755, 0, inner]))


def _deep(trees: Trees) -> None:
    inner = trees.add(page())
    for _ in range(200):
        inner = trees.add(page(["d", "d", 0o755, 0, inner]))


def _long_path(trees: Trees) -> None:
    inner = trees.add(page())
    for _ in range(20):
        inner = trees.add(page(["n" * 250, "d", 0o755, 0, inner]))


def _large_file(trees: Trees) -> None:
    chunk = b"\0" * CHUNK
    trees.objects.append((CHUNK_KIND, chunk))
    hash_ = digest(chunk).hex()
    trees.add(page(file("x", "f", 0o644, 0, 100_000 * CHUNK, [hash_] * 100_000)))


ATTACKS: dict[str, Callable[[Trees], None]] = {
    "parent": one(page(file(".."))),
    "parent in a path": one(page(file("../evil"))),
    "here": one(page(file("."))),
    "absolute path": one(page(file("/etc/evil"))),
    "slash in a name": one(page(file("a/b"))),
    "empty name": one(page(file(""))),
    "NUL in a name": one(page(file("a\0b"))),
    "name too long": one(page(file("n" * 256))),
    "name is a number": one(page(file(1))),
    "name is a list": one(page(file(["a"]))),
    "name with half a surrogate pair": one(page(file("\ud800"))),
    "name written in two ways": one(page(file("\udcc3\udca9"))),
    "name doubled": one(page(file("a"), file("a"))),
    "names out of order": one(page(file("b"), file("a"))),
    "a name of ours": one(page(file(".sandbox-kernel-hydrate"))),
    "block device": one(page(["sda", "b", 0o600, 0, 8, 0])),
    "character device": one(page(["mem", "c", 0o600, 0, 1, 1])),
    "named pipe": one(page(["pipe", "p", 0o600, 0])),
    "kind is a list": one(page(["x", ["f"], 0o600, 0, 0, []])),
    "negative size": one(page(file("x", "f", 0o644, 0, -1, []))),
    "size larger than its chunks": one(page(file("x", "f", 0o644, 0, 3 * CHUNK, [HASH]))),
    "size smaller than its chunks": one(page(file("x", "f", 0o644, 0, 1, [HASH, HASH]))),
    "size that no disk has": one(page(file("x", "f", 0o644, 0, 2**62, [2**42]))),
    "size is a float": one(page(file("x", "f", 0o644, 0, 8.0, [HASH]))),
    "mode is true": one(page(file("x", "f", True, 0, 8, [HASH]))),
    "mode with a file type": one(page(file("x", "f", 0o120777, 0, 8, [HASH]))),
    "time is a float": one(page(file("x", "f", 0o644, 1.5, 8, [HASH]))),
    "time out of range": one(page(file("x", "f", 0o644, 2**70, 8, [HASH]))),
    "chunk in capitals": one(page(file("x", "f", 0o644, 0, 8, [HASH.upper()]))),
    "chunk too short": one(page(file("x", "f", 0o644, 0, 8, [HASH[:-2]]))),
    "chunk is a path": one(page(file("x", "f", 0o644, 0, 8, ["../" * 21 + "x"]))),
    "chunk without its length": one(
        page(file("x", "f", 0o644, 0, 2**21, [f"{HASH}:", HASH, HASH]))
    ),
    "chunk of a tiny length": one(page(file("x", "f", 0o644, 0, 9, [f"{HASH}:8", HASH]))),
    "chunk of a negative length": one(page(file("x", "f", 0o644, 0, 9, [f"{HASH}:-300000", HASH]))),
    "chunk longer than allowed": one(
        page(file("x", "f", 0o644, 0, 2**22, [f"{HASH}:2097152", HASH, HASH]))
    ),
    "chunk with the length that it has anyway": one(
        page(file("x", "f", 0o644, 0, 2**21, [f"{HASH}:1048576", HASH]))
    ),
    "last chunk with a length": one(page(file("x", "f", 0o644, 0, 300_000, [f"{HASH}:300000"]))),
    "length with a zero in front": one(
        page(file("x", "f", 0o644, 0, 2**20, [f"{HASH}:0300000", HASH]))
    ),
    "length in other digits": one(
        page(
            file("x", "f", 0o644, 0, 2**20, [f"{HASH}:\u0663\u0660\u0660\u0660\u0660\u0660", HASH])
        )
    ),
    "a hole beyond the end": one(page(file("x", "f", 0o644, 0, 8, [2]))),
    "a hole of nothing": one(page(file("x", "f", 0o644, 0, 8, [0, HASH]))),
    "a negative hole": one(page(file("x", "f", 0o644, 0, 8, [-1, HASH, 1]))),
    "two holes side by side": one(page(file("x", "f", 0o644, 0, 2 * CHUNK, [1, 1]))),
    "symlink to nothing": one(page(["l", "l", 0, ""])),
    "symlink with NUL": one(page(["l", "l", 0, "a\0b"])),
    "symlink too long": one(page(["l", "l", 0, "a" * 5000])),
    "hard link upwards": one(page(["h", "h", "../../etc/passwd"])),
    "hard link to an absolute path": one(page(["h", "h", "/etc/passwd"])),
    "too many fields": one(page([*file("x"), "more"])),
    "too few fields": one(page(["x", "f"])),
    "entry is text": one(page("x")),
    "folder without a hash": one(page(["d", "d", 0o755, 0, "nothing"])),
    "folder that was never sent": one(page(["d", "d", 0o755, 0, "ab" * 32])),
    "no JSON": one(b"\xff\xfe"),
    "JSON without end": one(b"[" * 100_000),
    "a number without end": one(page(file("x", "f", 0o644, 0, 8, [HASH]))[:-30] + b"9" * 10_000),
    "not a number": one(b'{"entries": [["x", "f", 420, NaN, 0, []]]}'),
    "page and index at once": one(json.dumps({"entries": [], "pages": []}).encode()),
    "neither page nor index": one(b'{"other": []}'),
    "index of indexes": _index_of_indexes,
    "one page many times": _one_page_many_times,
    "more files than atoms": _doubling,
    "too deep": _deep,
    "path too long": _long_path,
    "a file of a hundred gigabytes from one chunk": _large_file,
}
"""Trees that must be refused, wherever they turn up."""


class Liar:
    """A guest that says what a test tells it to: the other end of a persist or a hydrate."""

    def __init__(self, script: Callable[[Messages], None]) -> None:
        self._script = script

    def persist(
        self, store: Store, name: str = "work", *, patience: float | None = None, **limits: int
    ) -> SaveReport:
        with self._talking(Kind.PERSIST) as ours:
            ours.settimeout(patience)
            facts = facts_of(name, "liar")
            return persist_over(Talk(ours), store, facts, "/w", Quota(**limits))

    def hydrate(self, store: Store, name: str = "work") -> HydrateReport:
        """It has nothing yet, takes all that it is sent, and begins to lie at the end of that."""
        with self._talking(Kind.PERSIST, Kind.FINISH) as ours:
            return hydrate_over(Talk(ours), store, store.find(name), "liar", "/w")

    @contextlib.contextmanager
    def _talking(self, *until: int) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()

        def lie() -> None:
            with theirs:
                messages = Messages(theirs)
                try:
                    for kind in until:
                        while messages.receive()[0] != kind:
                            pass
                        if kind != until[-1]:
                            send_all(messages, (TREE_KIND, page()))
                            result(messages, digest(page()).hex())
                    self._script(messages)
                    while True:
                        messages.receive()
                except Ended:
                    pass

        thread = threading.Thread(target=lie)
        thread.start()
        try:
            with ours:
                yield ours
        finally:
            thread.join(60)


def offer(messages: Messages, *objects: tuple[int, bytes]) -> bytes:
    """Offer objects by their true hashes; what the host answers."""
    messages.send(Kind.OFFER, b"".join(bytes([kind]) + digest(data) for kind, data in objects))
    kind, wanted = messages.receive()
    assert kind == Kind.WANT
    return bytes(wanted)


def send_all(messages: Messages, *objects: tuple[int, bytes]) -> None:
    for start in range(0, len(objects), 1000):
        part = objects[start : start + 1000]
        for (_, data), wanted in zip(part, offer(messages, *part), strict=True):
            if wanted:
                messages.send(Kind.OBJECT, b"\0", data)


def result(messages: Messages, tree: str, **more: Any) -> None:
    value = {"tree": tree, "problems": [], "problem_count": 0, "files": 0, "bytes": 0, **more}
    messages.send_json(Kind.RESULT, value)


def plant(store: Store, name: str, trees: Trees) -> SaveInfo:
    """A save that holds an attack, as if somebody had written to the store."""
    with store.writer() as writer:
        for kind, data in dict.fromkeys(trees.objects):
            writer.add(kind, digest(data), 0, data, len(data))
    root = digest(trees.objects[-1][1]).hex()
    return store.publish(SaveInfo("", name, root, 0.0, packs=writer.names))
