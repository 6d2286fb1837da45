"""The helper: scans, sends and writes files as the host asks, one connection at a time.

A scan offers its objects to the host in batches, and the host answers which ones to send. The
helper remembers its last scan, so the next persist is cheap.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections import deque
from contextlib import closing
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from ...wire.descriptors import receive_with_descriptors
from .ignore_file import IgnoreRefused, Rules, identity, read_ignore
from .mapped_files import Mapped
from .messages import Ended, Kind, Messages
from .nofollow import Root, pread_exactly
from .scan import Scan
from .scan_cache import Folder
from .survey import TooMuch
from .tree_format import CHUNK_KIND, digest, pack
from .write_files import Apply

OFFER_SIZE = 33
"""Bytes of one offered object: its kind and its SHA-256."""
GONE = 255
"""The codec of a wanted object that has changed since it was offered."""
_ROUNDS = 3
_SOCKET_BUFFER = 2**20
_BATCH_BYTES, _BATCH_COUNT = 2 * 2**20, 1024
_EARLY_BYTES = 2**18
"""An offer of this size goes out at once if no other is waiting: a small save is sent during the
scan."""
_WINDOW_BYTES, _WINDOW_COUNT = 16 * 2**20, 32
_NOTE_INTERVAL = 0.25


class _Offered(NamedTuple):
    kind: int
    hash: bytes
    data: Optional[bytes]
    path: str
    place: Tuple[int, int]


def _notes(messages: Messages) -> Callable[[int, int], None]:
    """Sends NOTE messages about the progress, a few a second."""
    told = 0.0

    def tell(files: int, size: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > _NOTE_INTERVAL:
            told = now
            messages.send_json(Kind.NOTE, {"files": files, "bytes": size})

    return tell


class Offers:
    """A Sink that sends to the host: chunks and trees, or trees only.

    Contents that were just read wait in memory for the answer, within a bound. Contents of an
    earlier scan are read again if wanted, and must be unchanged.
    """

    def __init__(self, messages: Messages, root: str, *, chunks: bool) -> None:
        self.changed: List[str] = []
        """Files that have changed since the scan: scan again."""
        self._messages = messages
        self._root = Root(root)
        self._chunks = chunks
        self._seen: Set[bytes] = set()
        self._batch: List[_Offered] = []
        self._batch_bytes = self._waiting_bytes = 0
        self._waiting: Deque[List[_Offered]] = deque()
        self._tell = _notes(messages)

    def close(self) -> None:
        self._root.close()

    def add(
        self,
        kind: int,
        hash_: bytes,
        data: Optional[bytes],
        path: str = "",
        place: Tuple[int, int] = (0, 0),
    ) -> None:
        if hash_ in self._seen or (kind == CHUNK_KIND and not self._chunks):
            return
        self._seen.add(hash_)
        self._batch.append(_Offered(kind, hash_, data, path, place))
        self._batch_bytes += len(data or b"")
        enough = _BATCH_BYTES if self._waiting else _EARLY_BYTES
        if self._batch_bytes >= enough or len(self._batch) >= _BATCH_COUNT:
            self._flush()
            while self._waiting_bytes > _WINDOW_BYTES or len(self._waiting) > _WINDOW_COUNT:
                self._answer()

    def progress(self, files: int, size: int) -> None:
        if self._waiting and self._messages.waiting():
            self._answer()
        self._tell(files, size)

    def finish(self) -> None:
        """Send everything that is wanted."""
        self._flush()
        while self._waiting:
            self._answer()

    def _flush(self) -> None:
        if self._batch:
            self._messages.send(Kind.OFFER, b"".join(bytes([o.kind]) + o.hash for o in self._batch))
            self._waiting.append(self._batch)
            self._waiting_bytes += self._batch_bytes
            self._batch, self._batch_bytes = [], 0

    def _answer(self) -> None:
        kind, wanted = self._messages.receive()
        batch = self._waiting.popleft()
        if kind != Kind.WANT or len(wanted) != len(batch):
            raise ValueError("expected WANT, got message %d" % kind)
        for offered, want in zip(batch, wanted):
            self._waiting_bytes -= len(offered.data or b"")
            if not want:
                continue
            content = offered.data if offered.data is not None else self._read(offered)
            if content is None:
                self.changed.append(offered.path)
                self._seen.discard(offered.hash)
                self._messages.send(Kind.OBJECT, bytes([GONE]))
            else:
                codec, data = pack(content)
                self._messages.send(Kind.OBJECT, bytes([codec]), data)

    def _read(self, offered: _Offered) -> Optional[bytes]:
        """Read the contents again; None if the file has changed since the scan."""
        try:
            file = self._root.read(offered.path)
        except OSError:
            return None
        try:
            offset, length = offered.place
            data = pread_exactly(file, length, offset)
        finally:
            os.close(file)
        return data if digest(data) == offered.hash else None


class WorkspaceServer:
    """Serves one workspace folder, and remembers its state."""

    def __init__(self) -> None:
        self._cache = Folder()
        self._root = ""
        self._agreed: Optional[Tuple[str, str]] = None  # which store has which tree
        self._rules: Tuple[str, Rules] = ("", Rules(()))

    def serve(self, sock: socket.socket) -> None:
        """Serve one connection until it is closed."""
        messages = Messages(sock)
        apply: Optional[Apply] = None
        try:
            while True:
                kind, payload = messages.receive()
                if kind == Kind.PERSIST:
                    self._persist(messages, json.loads(payload))
                elif kind == Kind.STAGE:
                    apply = apply or Apply(self._root)
                    apply.stage(json.loads(payload))
                elif kind == Kind.FILL and apply is not None:
                    apply.fill(payload)
                elif kind == Kind.REUSE and apply is not None:
                    if not all(apply.reuse(*one) for one in json.loads(payload)):
                        raise ValueError("files changed during the hydrate")
                elif kind == Kind.FINISH:
                    apply = apply or Apply(self._root)
                    self._finish(messages, apply, json.loads(payload))
                else:
                    raise ValueError("unexpected message %d" % kind)
        except Ended:
            pass
        except TooMuch as error:
            self._failed(messages, "quota", str(error), error.offenders)
        except IgnoreRefused as error:
            self._failed(messages, "failed", str(error))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            traceback.print_exc()
            self._failed(messages, "failed", "%s: %s" % (type(error).__name__, error))
        finally:
            if apply is not None:
                apply.close()

    def _failed(
        self, messages: Messages, kind: str, message: str, offenders: Sequence[Any] = ()
    ) -> None:
        self._agreed = None
        try:
            messages.send_json(
                Kind.FAILED, {"kind": kind, "message": message, "offenders": list(offenders)}
            )
            # Read until the host hangs up: closing a socket with unread data would reset it, and
            # lose the message.
            while True:
                messages.receive()
        except (Ended, ValueError):
            pass  # the host has hung up, or sent an invalid message

    # --- persist; with ``trees_only``, the first part of a hydrate

    def _persist(self, messages: Messages, request: Dict[str, Any]) -> None:
        root = request["root"]
        if root != self._root:
            self._root, self._cache, self._agreed = root, Folder(), None
        rules = self._rules_for(messages, request)
        agreed, self._agreed = self._agreed, None
        full = agreed is None or agreed != (request["key"], request["base"])
        with closing(Offers(messages, root, chunks=not request["trees_only"])) as offers:
            for _ in range(_ROUNDS):
                scan = Scan(
                    self._cache,
                    rules,
                    offers,
                    full=full,
                    max_files=request["max_files"],
                    max_bytes=request["max_bytes"],
                    mapped=Mapped(root),
                )
                found = scan.run(root).hex()
                offers.finish()
                if not offers.changed:
                    break
                full = True
                for path in offers.changed:
                    self._forget(path)
                offers.changed.clear()
        messages.send_json(
            Kind.RESULT,
            {
                "tree": found,
                "files": self._cache.files,
                "folders": self._cache.subtree,
                "bytes": self._cache.data,
                "problems": scan.problems,
                "problem_count": scan.problem_count,
            },
        )
        if not request["trees_only"]:
            kind, payload = messages.receive()
            if kind == Kind.PERSIST:  # the store has lost objects: start over
                return self._persist(messages, json.loads(payload))
            if kind != Kind.DONE:
                raise ValueError("expected DONE, got message %d" % kind)
            self._agreed = (request["key"], json.loads(payload)["tree"])

    def _forget(self, path: str) -> None:
        *parents, name = path.split("/")
        folder = self._cache
        for part in parents:
            folder = folder.folders.get(part) or Folder()
        if name in folder.items:
            folder.items[name].signature = folder.fingerprint = None

    def _rules_for(self, messages: Messages, request: Dict[str, Any]) -> Rules:
        text = read_ignore(self._root)
        rules = request["rules"]
        if identity(text) != request["ignore"]:
            messages.send(Kind.IGNORE, text)
            kind, payload = messages.receive()
            if kind != Kind.RULES:
                raise ValueError("expected RULES, got message %d" % kind)
            rules = json.loads(payload)
        key = json.dumps(rules)
        if key != self._rules[0]:
            self._rules = key, Rules([(pattern, ignored) for pattern, ignored in rules])
        return self._rules[1]

    # --- the last part of a hydrate

    def _finish(self, messages: Messages, apply: Apply, request: Dict[str, Any]) -> None:
        tell = _notes(messages)
        apply.finish(self._cache, tell)
        apply.close()
        scan = Scan(self._cache, self._rules[1], _Nowhere(tell), mapped=Mapped(self._root))
        tree = scan.run(self._root).hex()
        if tree == request["tree"]:
            self._agreed = (request["key"], tree)
        messages.send_json(
            Kind.RESULT,
            {
                "tree": tree,
                "files": apply.written,
                "deleted": apply.deleted,
                "problems": [],
            },
        )


class _Nowhere:
    """A Sink that discards everything."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self.progress = progress

    def add(self, *_: object) -> None: ...


def serve(control: socket.socket) -> None:
    """Serve connections that arrive as descriptors, until ``control`` is closed."""
    if sys.getfilesystemencoding().lower().replace("-", "") != "utf8":
        print("workspace helper: file names are not UTF-8, so files cannot be saved", flush=True)
        return
    workspace = WorkspaceServer()
    while True:
        _, fds = receive_with_descriptors(control, 16, 1)
        if not fds:
            return
        with socket.socket(fileno=fds[0]) as connection:
            connection.setblocking(True)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            workspace.serve(connection)
