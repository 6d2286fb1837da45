"""What a scan finds is offered to the host, in batches; the host says what it lacks of each batch,
and gets that. Contents that were just read wait in memory for the answer, within a bound; what was
read at an earlier scan is read again if it is wanted, and must be as it was."""

import os
import time
from collections import deque
from typing import Deque, List, NamedTuple, Optional, Set

from .folders import Root, pread_exactly
from .layout import CHUNK, digest, name_bytes, pack
from .messages import NOTE, OBJECT, OFFER, WANT, Messages

KIND_CHUNK, KIND_TREE = 0, 1
GONE = 255
"""The codec of a wanted object that is not there any more."""
OFFER_SIZE = 33
_BATCH_BYTES, _BATCH_COUNT = 2 * 2**20, 1024
_EARLY_BYTES = 2**18
"""An offer of so much goes out at once if no other is: a small save is sent while the scan runs."""
_WINDOW_BYTES, _WINDOW_COUNT = 16 * 2**20, 32
_NOTE_INTERVAL = 0.25


class _Offered(NamedTuple):
    kind: int
    hash: bytes
    data: Optional[bytes]
    path: str
    place: int


class Notes:
    """Tells the host now and then how far the work is, so that it knows that it goes on."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._told = 0.0

    def tell(self, files: int, size: int) -> None:
        now = time.monotonic()
        if now - self._told > _NOTE_INTERVAL:
            self._told = now
            self._messages.send_json(NOTE, {"files": files, "bytes": size})


class Offers:
    """A Sink that sends to the host. ``chunks``: whether contents are offered, or trees only."""

    def __init__(self, messages: Messages, root: str, *, chunks: bool) -> None:
        self.changed: List[str] = []
        """Files that were not any more what the last scan had found: scan again."""
        self._messages = messages
        self._root = Root(root)
        self._chunks = chunks
        self._seen: Set[bytes] = set()
        self._batch: List[_Offered] = []
        self._batch_bytes = self._waiting_bytes = 0
        self._waiting: Deque[List[_Offered]] = deque()
        self._notes = Notes(messages)

    def close(self) -> None:
        self._root.close()

    def chunk(self, hash_: bytes, data: bytes) -> None:
        if self._chunks and hash_ not in self._seen:
            self._add(_Offered(KIND_CHUNK, hash_, data, "", 0))

    def known_chunk(self, hash_: bytes, size: int, path: str, index: int) -> None:
        if self._chunks and hash_ not in self._seen:
            self._add(_Offered(KIND_CHUNK, hash_, None, path, index))

    def tree(self, hash_: bytes, data: bytes) -> None:
        if hash_ not in self._seen:
            self._add(_Offered(KIND_TREE, hash_, data, "", 0))

    def progress(self, files: int, size: int) -> None:
        if self._waiting and self._messages.waiting():
            self._answer()
        self._notes.tell(files, size)

    def finish(self) -> None:
        """Send all that is wanted."""
        self._flush()
        while self._waiting:
            self._answer()

    def _add(self, offered: _Offered) -> None:
        self._seen.add(offered.hash)
        self._batch.append(offered)
        self._batch_bytes += len(offered.data or b"")
        enough = _BATCH_BYTES if self._waiting else _EARLY_BYTES
        if self._batch_bytes >= enough or len(self._batch) >= _BATCH_COUNT:
            self._flush()
            while self._waiting_bytes > _WINDOW_BYTES or len(self._waiting) > _WINDOW_COUNT:
                self._answer()

    def _flush(self) -> None:
        if self._batch:
            self._messages.send(OFFER, b"".join(bytes([o.kind]) + o.hash for o in self._batch))
            self._waiting.append(self._batch)
            self._waiting_bytes += self._batch_bytes
            self._batch, self._batch_bytes = [], 0

    def _answer(self) -> None:
        kind, wanted = self._messages.receive()
        batch = self._waiting.popleft()
        if kind != WANT or len(wanted) != len(batch):
            raise ValueError("no answer to an offer")
        for offered, want in zip(batch, wanted):
            self._waiting_bytes -= len(offered.data or b"")
            if not want:
                continue
            content = offered.data if offered.data is not None else self._read(offered)
            if content is None:
                self.changed.append(offered.path)
                self._seen.discard(offered.hash)
                self._messages.send(OBJECT, bytes([GONE]))
            else:
                codec, data = pack(content)
                self._messages.send(OBJECT, bytes([codec]), data)

    def _read(self, offered: _Offered) -> Optional[bytes]:
        """The contents again; None if the file is not what it was when it was scanned."""
        try:
            file = self._root.read([name_bytes(part) for part in offered.path.split("/")])
        except OSError:
            return None
        try:
            data = pread_exactly(file, CHUNK, offered.place * CHUNK)
        finally:
            os.close(file)
        return data if digest(data) == offered.hash else None
