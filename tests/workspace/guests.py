"""A workspace folder with a real helper process, as in a sandbox but without the sandbox."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from sandbox_kernel.workspace.conversation import Talk
from sandbox_kernel.workspace.receive import persist_over
from sandbox_kernel.workspace.reports import HydrateReport, Quota, SaveInfo, SaveReport
from sandbox_kernel.workspace.send import hydrate_over
from sandbox_kernel.workspace.store import Store

SERVE = """
import socket, sys
from sandbox_kernel.guest.workspace.helper import serve
serve(socket.socket(fileno=int(sys.argv[1])))
"""


class Guest:
    """``folder`` is the workspace; each persist and hydrate is a connection of its own."""

    def __init__(self, folder: Path, name: str = "guest") -> None:
        self.folder = folder
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return ours

    def persist(self, store: Store, name: str = "work", **limits: int) -> SaveReport:
        with self.connect() as sock:
            facts = facts_of(name, self.name)
            return persist_over(Talk(sock), store, facts, str(self.folder), Quota(**limits))

    def hydrate(
        self, store: Store, name: str = "work", at: str = "", *, exact: bool = True
    ) -> HydrateReport:
        with self.connect() as sock:
            save = store.find(name, at)
            return hydrate_over(Talk(sock), store, save, self.name, str(self.folder), exact=exact)

    def close(self) -> None:
        self._control.close()
        self.process.wait(60)


def facts_of(name: str, sandbox: str = "guest") -> SaveInfo:
    return SaveInfo(id="", workspace=name, root="", created=0.0, sandbox=sandbox, backend="test")


def snapshot(folder: Path) -> dict[str, Any]:
    """Everything about a folder's contents that a workspace must keep."""
    found: dict[str, Any] = {}
    inodes: dict[int, str] = {}
    for root, folders, files in os.walk(os.fsencode(folder)):
        folders.sort()
        for name in sorted(folders + files):
            path = os.path.join(root, name)
            status = os.lstat(path)
            key = os.path.relpath(path, os.fsencode(folder)).decode("utf-8", "surrogateescape")
            value: list[Any] = [stat.S_IFMT(status.st_mode), status.st_mtime_ns]
            if stat.S_ISLNK(status.st_mode):
                value.append(os.readlink(path))
            elif stat.S_ISREG(status.st_mode):
                value += [stat.S_IMODE(status.st_mode), Path(os.fsdecode(path)).read_bytes()]
                if status.st_nlink > 1:
                    value.append(inodes.setdefault(status.st_ino, key))
            else:
                value.append(stat.S_IMODE(status.st_mode))
            found[key] = value
    return found


WRITER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
for line in sys.stdin:
    at, byte = map(int, line.split())
    memory[at] = byte
    print(memory[at], flush=True)
"""
