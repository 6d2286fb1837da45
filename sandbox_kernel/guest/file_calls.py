"""Single files and folders, for ``agents/files.py``. Runs in the sandbox, as the text of a ``-c``.

The answer begins with a line of JSON, ``{"error": ..., "kind": ...}`` if something failed.

    read PATH MOST     {"size": N}, then N bytes
    write PATH SIZE    reads SIZE bytes from stdin, then {}
    list PATH MOST     {"count": N}, then a line for each of at most MOST entries:
                       [name, kind, size, mtime]; the path itself, with an empty name, if it is
                       no folder
"""

import json
import os
import stat
import sys
from typing import Any, BinaryIO, List

_CHUNK = 2**18
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def read(path: str, most: int, sink: BinaryIO) -> None:
    # Not blocking: a named pipe has perhaps no writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        return _answer(sink, error="is " + kind, kind="not a file")
    with os.fdopen(fd, "rb") as file:
        # Files of /proc say that they are empty.
        data = file.read(min(most, status.st_size or most) + 1)
        if len(data) > most:
            size = max(status.st_size, len(data))
            return _answer(sink, error="has %d bytes" % size, kind="large")
        _answer(sink, size=len(data))
        sink.write(data)


def write(path: str, size: int, source: BinaryIO, sink: BinaryIO) -> None:
    path = os.path.realpath(path)
    if os.path.isdir(path):
        return _answer(sink, error="is a folder", kind="not a file")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = os.path.join(os.path.dirname(path), ".sandbox-kernel-write-%d" % os.getpid())
    try:
        with open(temporary, "wb") as file:
            left = size
            while left:
                data = source.read(min(left, _CHUNK))
                if not data:
                    return _answer(sink, error="did not arrive as a whole", kind="")
                file.write(data)
                left -= len(data)
        try:
            os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode))
        except FileNotFoundError:
            pass
        os.replace(temporary, path)
    finally:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass
    _answer(sink)


def list_(path: str, most: int, sink: BinaryIO) -> None:
    if not stat.S_ISDIR(os.stat(path).st_mode):
        _answer(sink, count=1)
        return _entry(sink, "", os.stat(path))
    names = sorted(os.listdir(path))
    _answer(sink, count=len(names))
    for name in names[:most]:
        try:
            _entry(sink, name, os.lstat(os.path.join(path, name)))
        except FileNotFoundError:
            continue


def _entry(sink: BinaryIO, name: str, status: os.stat_result) -> None:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
    line: List[Any] = [name, kind, status.st_size, status.st_mtime]
    sink.write(json.dumps(line).encode() + b"\n")


def _answer(sink: BinaryIO, **values: Any) -> None:
    sink.write(json.dumps(values).encode() + b"\n")


def main(call: str, path: str, number: str) -> int:
    sink = sys.stdout.buffer
    try:
        if call == "read":
            read(path, int(number), sink)
        elif call == "write":
            write(path, int(number), sys.stdin.buffer, sink)
        else:
            list_(path, int(number), sink)
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        _answer(sink, error=error.strerror or str(error), kind="missing" if missing else "")
    sink.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
