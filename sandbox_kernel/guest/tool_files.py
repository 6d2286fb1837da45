"""Reads and writes one file for an agent framework, in the sandbox, as the text of a ``-c``.

stdin has a line of JSON, ``{"operation": name, "path": ..., ...}``, and for ``write`` the contents
in base64, since some providers' streams carry only text. stdout gets JSON: the result, or
``{"errno": number}``.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PIECE = 2**20
"""Characters of base64 at once: divisible by four."""


def read(request: dict[str, Any]) -> dict[str, Any]:
    """A regular file of at most ``limit`` bytes. A pipe or device is not waited for."""
    fd = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "no regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(request["limit"] + 1)
    finally:
        os.close(fd)
    if len(data) > request["limit"]:
        raise OSError(errno.EFBIG, "too large")
    return {"contents": base64.b64encode(data).decode()}


def write(request: dict[str, Any]) -> dict[str, Any]:
    """Write through a symlink, and make the folders on the way."""
    path = request["path"]
    parent = os.path.dirname(path)
    try:
        if parent:
            os.makedirs(parent, exist_ok=True)
        mode = os.stat(path).st_mode
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "not a folder") from None
    except FileNotFoundError:
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "not a regular file")
    with open(path, "wb") as file:
        while data := sys.stdin.buffer.read(PIECE):
            file.write(base64.b64decode(data))
    return {}


def described(path: str) -> dict[str, Any]:
    """A link that leads nowhere, or in a circle, is described itself."""
    try:
        found = os.stat(path)
    except OSError:
        found = os.lstat(path)
    is_dir = stat.S_ISDIR(found.st_mode)
    size = found.st_size if stat.S_ISREG(found.st_mode) else None
    return {"name": os.path.basename(path.rstrip("/")), "dir": is_dir, "size": size}


def stat_(request: dict[str, Any]) -> dict[str, Any]:
    os.stat(request["path"])
    return described(request["path"])


def list_(request: dict[str, Any]) -> dict[str, Any]:
    """At most ``limit`` entries."""
    entries: list[dict[str, Any]] = []
    with os.scandir(request["path"]) as found:
        for entry in found:
            if len(entries) == request["limit"]:
                raise OSError(errno.EFBIG, "too many entries")
            try:
                entries.append(described(entry.path))
            except FileNotFoundError:
                continue  # it was deleted meanwhile
    return {"entries": entries}


def make(request: dict[str, Any]) -> dict[str, Any]:
    os.makedirs(request["path"], exist_ok=True)
    return {}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """A file, a link, or a folder with all that is in it; but not this folder, nor one above."""
    path = request["path"]
    if os.path.isdir(path) and not os.path.islink(path):
        here, target = os.getcwd(), os.path.realpath(path)
        if os.path.commonpath([here, target]) == target:
            raise OSError(errno.EBUSY, "the working folder is in it")
        shutil.rmtree(path)
    else:
        os.unlink(path)
    return {}


def exists(request: dict[str, Any]) -> dict[str, Any]:
    return {"exists": os.path.exists(request["path"])}


def real(request: dict[str, Any]) -> dict[str, Any]:
    return {"path": os.path.realpath(request["path"])}


OPERATIONS = {
    "read": read,
    "write": write,
    "stat": stat_,
    "list": list_,
    "make": make,
    "remove": remove,
    "exists": exists,
    "real": real,
}


def main() -> int:
    request = json.loads(sys.stdin.buffer.readline())
    try:
        answer = OPERATIONS[request["operation"]](request)
    except OSError as error:
        answer = {"errno": error.errno or errno.EIO}
    except ValueError:  # a NUL in the path
        answer = {"errno": errno.EINVAL}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
