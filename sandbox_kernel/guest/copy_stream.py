"""Files as one stream, for ``sandbox-kernel cp``. Runs in the sandbox, as the text of a ``-c``.

    entry   = length (4 bytes, big endian) header [contents]
    header  = JSON: {"path": "a/b", "kind": "f", "mode": M, "mtime": ns, "size": N}, N bytes follow
              {"path": ..., "kind": "d", "mode": ..., "mtime": ...}
              {"path": ..., "kind": "l", "target": "..."}
              {"path": ..., "kind": "x"}                          a kind that is not copied
              {"error": "..."}                                    and nothing after it
    the end = a length of zero

The path of the requested file or folder itself is empty. Names that are not UTF-8 are escaped with
Python's surrogateescape. The format is not tar, whose many extensions are hard to bound.
"""

import json
import os
import stat
import struct
import sys
from typing import Any, BinaryIO, Dict, Iterator, List, Tuple

LENGTH = struct.Struct(">I")
_CHUNK = 2**18


def headers(path: str) -> "Iterator[Tuple[str, Dict[str, Any]]]":
    """Path and header of a file or folder and of all below it. The path itself may be a symlink,
    which is followed; symlinks below it are copied as symlinks."""
    waiting: "List[Tuple[str, str]]" = [(path, "")]
    while waiting:
        here, inside = waiting.pop()
        status = os.lstat(here) if inside else os.stat(here)
        mode = status.st_mode
        header: Dict[str, Any] = {"path": inside, "mode": stat.S_IMODE(mode)}
        header["mtime"] = status.st_mtime_ns
        if stat.S_ISDIR(mode):
            yield here, {**header, "kind": "d"}
            names = sorted(os.listdir(here), reverse=True)
            waiting += [(os.path.join(here, n), os.path.join(inside, n)) for n in names]
        elif stat.S_ISREG(mode):
            yield here, {**header, "kind": "f", "size": status.st_size}
        elif stat.S_ISLNK(mode):
            yield here, {**header, "kind": "l", "target": os.readlink(here)}
        else:
            yield here, {**header, "kind": "x"}


def entries(path: str) -> "Iterator[bytes]":
    """The stream of a file or folder, piece by piece."""
    try:
        for here, header in headers(path):
            if header["kind"] != "f":
                yield _framed(header)
                continue
            with open(here, "rb") as file:
                left = header["size"] = os.fstat(file.fileno()).st_size
                yield _framed(header)
                while left:
                    # A file that has become shorter meanwhile is filled up with zeros.
                    data = file.read(min(left, _CHUNK)) or bytes(min(left, _CHUNK))
                    left -= len(data)
                    yield data
    except OSError as error:
        yield _framed({"error": "{}: {}".format(error.filename, error.strerror)})
        return
    yield LENGTH.pack(0)


def _framed(header: "Dict[str, Any]") -> bytes:
    data = json.dumps(header).encode()
    return LENGTH.pack(len(data)) + data


def receive(source: BinaryIO, target: str, name: str) -> int:
    """Write a stream to ``target``, or as ``name`` in that folder. The number of files."""
    if os.path.isdir(target):
        target = os.path.join(target, name)
    count = 0
    folders = []
    while True:
        (length,) = LENGTH.unpack(_exactly(source, LENGTH.size))
        if not length:
            break
        header = json.loads(_exactly(source, length))
        if "error" in header:
            raise OSError(header["error"])
        path = os.path.join(target, header["path"]) if header["path"] else target
        if header["kind"] == "d":
            os.makedirs(path, exist_ok=True)
            folders.append((path, header))
        elif header["kind"] == "l":
            if os.path.islink(path):
                os.unlink(path)
            os.symlink(header["target"], path)
        elif header["kind"] == "f":
            count += 1
            left = header["size"]
            with open(path, "wb") as file:
                while left:
                    data = _exactly(source, min(left, _CHUNK))
                    file.write(data)
                    left -= len(data)
            _settle(path, header)
    for path, header in reversed(folders):
        _settle(path, header)
    return count


def _settle(path: str, header: "Dict[str, Any]") -> None:
    os.chmod(path, header["mode"])
    os.utime(path, ns=(header["mtime"], header["mtime"]))


def _exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise OSError("the stream ended early")
    return data


def main(direction: str, path: str, name: str = "") -> int:
    if direction == "out":
        for piece in entries(path):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return 0
    try:
        print(receive(sys.stdin.buffer, path, name))
    except OSError as error:
        sys.stderr.write("{}\n".format(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
