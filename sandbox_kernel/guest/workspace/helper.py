"""The helper: scans, sends and writes files as the host asks for it, one connection at a time.

It remembers what it has seen, so that the next persist is cheap.
"""

import hashlib
import json
import os
import socket
import stat
import sys
import traceback
from codecs import BOM_UTF8
from typing import Any, Dict, Optional, Sequence, Tuple

from .apply import Apply
from .folders import READ, pread_exactly
from .known import Folder
from .mapped import Mapped
from .messages import (
    DONE,
    FAILED,
    FILL,
    FINISH,
    IGNORE,
    PERSIST,
    RESULT,
    REUSE,
    RULES,
    STAGE,
    Ended,
    Messages,
)
from .offer import Notes, Offers
from .scan import Rules, Scan, TooMuch

IGNORE_FILE = ".sandboxignore"
MAX_IGNORE = 64 * 1024
_ROUNDS = 3
_SOCKET_BUFFER = 2**20


class Workspace:
    """What the helper knows about the workspace folder."""

    def __init__(self) -> None:
        self._cache = Folder()
        self._root = ""
        self._agreed: Optional[Tuple[str, str]] = None  # which store has which tree
        self._rules: Tuple[str, Rules] = ("", Rules(()))

    def serve(self, sock: socket.socket) -> None:
        """Do what the host asks for on one connection, until it is closed."""
        messages = Messages(sock)
        apply: Optional[Apply] = None
        try:
            while True:
                kind, payload = messages.receive()
                if kind == PERSIST:
                    self._persist(messages, json.loads(payload))
                elif kind == STAGE:
                    apply = apply or Apply(self._root)
                    apply.stage(json.loads(payload))
                elif kind == FILL and apply is not None:
                    apply.fill(payload)
                elif kind == REUSE and apply is not None:
                    if not all(apply.reuse(*one) for one in json.loads(payload)):
                        raise ValueError("files changed while the workspace was being brought in")
                elif kind == FINISH:
                    apply = apply or Apply(self._root)
                    self._finish(messages, apply, json.loads(payload))
                else:
                    raise ValueError("message %d makes no sense now" % kind)
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
                FAILED, {"kind": kind, "message": message, "offenders": list(offenders)}
            )
            # What the host has said meanwhile must be read: a socket that is closed with something
            # unread is reset, and takes the last words with it.
            while True:
                messages.receive()
        except (Ended, ValueError):
            pass  # the host has hung up, or says nothing that could be understood

    # --- persist; and the first part of a hydrate, which is to look at what is there

    def _persist(self, messages: Messages, request: Dict[str, Any]) -> None:
        root = request["root"]
        if root != self._root:
            self._root, self._cache, self._agreed = root, Folder(), None
        rules = self._rules_for(messages, request)
        agreed, self._agreed = self._agreed, None
        full = agreed is None or agreed != (request["key"], request["base"])
        offers = Offers(messages, root, chunks=not request["trees_only"])
        try:
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
        finally:
            offers.close()
        messages.send_json(
            RESULT,
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
            if kind == PERSIST:  # the store has lost what the host had relied on
                return self._persist(messages, json.loads(payload))
            if kind != DONE:
                raise ValueError("no end of a persist")
            self._agreed = (request["key"], json.loads(payload)["tree"])

    def _forget(self, path: str) -> None:
        *parents, name = path.split("/")
        folder = self._cache.find(parents)
        if folder is not None and name in folder.items:
            folder.items[name].signature = folder.fingerprint = None

    def _rules_for(self, messages: Messages, request: Dict[str, Any]) -> Rules:
        text = read_ignore(self._root)
        identity = hashlib.sha256(text).hexdigest() if text else ""
        rules = request["rules"]
        if identity != request["ignore"]:
            messages.send(IGNORE, text)
            kind, payload = messages.receive()
            if kind != RULES:
                raise ValueError("no rules")
            rules = json.loads(payload)
        key = json.dumps(rules)
        if key != self._rules[0]:
            self._rules = key, Rules([(pattern, ignored) for pattern, ignored in rules])
        return self._rules[1]

    # --- the last part of a hydrate

    def _finish(self, messages: Messages, apply: Apply, request: Dict[str, Any]) -> None:
        notes = Notes(messages)
        apply.finish(self._cache, notes.tell)
        apply.close()
        scan = Scan(
            self._cache,
            self._rules[1],
            _Nowhere(notes),
            full=False,
            max_files=2**60,
            max_bytes=2**60,
            mapped=Mapped(self._root),
        )
        tree = scan.run(self._root).hex()
        if tree == request["tree"]:
            self._agreed = (request["key"], tree)
        messages.send_json(
            RESULT,
            {
                "tree": tree,
                "files": apply.written,
                "deleted": apply.deleted,
                "problems": apply.problems,
            },
        )


class _Nowhere:
    """A Sink for a scan that is only to know."""

    def __init__(self, notes: Notes) -> None:
        self.progress = notes.tell

    def chunk(self, hash_: bytes, data: bytes) -> None: ...
    def known_chunk(self, hash_: bytes, size: int, path: str, index: int) -> None: ...
    def tree(self, hash_: bytes, data: bytes) -> None: ...


class IgnoreRefused(Exception):
    """The ignore file is unreadable or invalid. Saving without it would save what it excludes."""


def read_ignore(root: str) -> bytes:
    """The ignore file of a folder, whole; empty if there is none. Used by the host, too: what would
    be refused in the sandbox, as a symlink is, must not get there."""
    path = os.path.join(root, IGNORE_FILE)
    try:
        fd = os.open(path, READ)
    except OSError as error:
        if not os.path.lexists(path):
            return b""
        if os.path.islink(path):
            raise IgnoreRefused(_refusal(path, "it is a symlink")) from error
        raise IgnoreRefused(_refusal(path, error.strerror)) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise IgnoreRefused(_refusal(path, "it is no regular file"))
        text = pread_exactly(fd, MAX_IGNORE + 1, 0)
    except OSError as error:
        raise IgnoreRefused(_refusal(path, error.strerror)) from error
    finally:
        os.close(fd)
    if len(text) > MAX_IGNORE:
        raise IgnoreRefused(_refusal(path, "it has more than %d bytes" % MAX_IGNORE))
    if b"\0" in text:
        raise IgnoreRefused(_refusal(path, "it is no text in UTF-8"))
    # The mark that some editors begin a file with is no part of its first line.
    return text[len(BOM_UTF8) :] if text.startswith(BOM_UTF8) else text


def _refusal(path: str, why: object) -> str:
    return (
        "%s cannot be obeyed (%s), so nothing was taken from this folder: it might be what the "
        "file excludes. Mend or delete it." % (path, why)
    )


def serve(control: socket.socket) -> None:
    """Serve connections that arrive as descriptors, until there can be no more."""
    if sys.getfilesystemencoding().lower().replace("-", "") != "utf8":
        print("file names are not UTF-8 here: workspaces cannot be saved", flush=True)
        return
    workspace = Workspace()
    while True:
        _, fds, _, _ = socket.recv_fds(control, 16, 1)
        if not fds:
            return
        with socket.socket(fileno=fds[0]) as connection:
            connection.setblocking(True)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            workspace.serve(connection)
