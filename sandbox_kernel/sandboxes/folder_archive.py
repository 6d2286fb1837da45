"""A host folder as a tar archive, and the program that unpacks it in a sandbox."""

from __future__ import annotations

import io
import tarfile

UNPACK = """
import os, sys, tarfile
os.makedirs(sys.argv[1], exist_ok=True)
source = sys.stdin.buffer if sys.argv[2] == "-" else open(sys.argv[2], "rb")
with tarfile.open(fileobj=source, mode="r|gz") as archive:
    archive.extractall(sys.argv[1])
"""
"""For the sandbox's Python: unpacks an archive into the folder that is its first argument, from
the file that is its second argument, or from stdin (``-``)."""


def packed(folder: str) -> bytes:
    """The files of a host folder as a compressed tar archive."""
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w:gz", compresslevel=6) as archive:
        archive.add(folder, arcname=".", filter=_without_owner)
    return archived.getvalue()


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The sandbox does not have the host's users."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
