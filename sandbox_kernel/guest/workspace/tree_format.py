"""Chunks and trees: the format of files and folders.

A file is cut into chunks (``cut.py``), each named by its SHA-256. A folder is a *tree*: JSON, in
one page if it is small, else as an index of pages. An entry is a list:

    [name, "f", mode, mtime_ns, size, chunks]    a file
    [name, "d", mode, mtime_ns, tree]            a folder, by the hash of its tree
    [name, "l", mtime_ns, target]                a symlink
    [name, "h", path]                            a hard link to a file of this workspace

A chunk is 64 hex digits for the next CHUNK bytes of the file, or what is left of it; the same with
a colon and a length for fewer; or the number n for a hole, n times CHUNK zeros that are not stored.

Names are text; bytes that are not UTF-8 are escaped as U+DC80 to U+DCFF (surrogateescape).
"""

import hashlib
import json
import zlib
from typing import Any, Iterable, Iterator, List, Sequence, Tuple

CHUNK, LEAST_CHUNK = 2**20, 2**18
PAGE_MASK, PAGE_MOST, PAGE_BYTES = 127, 1024, 2**20
MAX_TREE = 8 * 2**20
MAX_ENTRY = MAX_TREE - 4096
MAX_DEPTH = 128
MAX_NAME, MAX_PATH = 255, 4095
MAX_LINK = 4095
MAX_SIZE = 2**44
RESERVED = ".sandbox-kernel-"
"""Prefix of our own names, which are never saved."""
RAW, ZLIB = 0, 1
CHUNK_KIND, TREE_KIND = 0, 1
_SAMPLE, _WORTH = 4096, 0.9


def digest(data: "bytes | memoryview") -> bytes:
    return hashlib.sha256(data).digest()


def name_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def name_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def path_parts(path: str) -> List[bytes]:
    return [name_bytes(part) for part in path.split("/")]


def encode_entry(entry: Sequence[Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode()


def build_tree(
    entries: "Iterable[Tuple[bytes, bytes]]",
) -> "Tuple[bytes, List[Tuple[bytes, bytes]]]":
    """The hash of a folder, and its objects (hash and contents), the root last. ``entries`` are
    pairs of a name's bytes and an encoded entry, sorted by name. Hashes of names decide where a
    page ends, so a change of one entry changes one page."""
    pages: List[List[bytes]] = [[]]
    size = 0
    for name, entry in entries:
        if size + len(entry) > PAGE_BYTES and pages[-1]:
            pages.append([])
            size = 0
        pages[-1].append(entry)
        size += len(entry)
        if zlib.crc32(name) & PAGE_MASK == 0 or len(pages[-1]) >= PAGE_MOST:
            pages.append([])
            size = 0
    if len(pages) > 1 and not pages[-1]:
        pages.pop()
    objects = []
    for page in pages:
        data = b'{"entries":[\n' + b",\n".join(page) + b"]}\n"
        objects.append((digest(data), data))
    if len(objects) > 1:
        data = json.dumps({"pages": [h.hex() for h, _ in objects]}).encode() + b"\n"
        objects.append((digest(data), data))
    return objects[-1][0], objects


def pack(data: "bytes | memoryview") -> "Tuple[int, bytes | memoryview]":
    """A codec, and the data compressed with it if worthwhile."""
    if len(data) > 128:
        sample = data[:_SAMPLE]
        if len(zlib.compress(sample, 1)) < _WORTH * len(sample):
            packed = zlib.compress(data, 1)
            if len(packed) < len(data):
                return ZLIB, packed
    return RAW, data


def unpack(codec: int, data: "bytes | memoryview", limit: int) -> "bytes | memoryview":
    """Decode data of at most ``limit`` bytes. ValueError."""
    if codec == RAW:
        plain = data
    elif codec == ZLIB:
        decoder = zlib.decompressobj()
        try:
            plain = decoder.decompress(data, limit + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if not decoder.eof and len(plain) <= limit:
            raise ValueError("truncated compressed data")
    else:
        raise ValueError("unknown codec %d" % codec)
    if len(plain) > limit:
        raise ValueError("more than %d bytes" % limit)
    return plain


def chunk_text(hash_: bytes, length: int, left: int) -> str:
    """How a chunk is written where ``left`` bytes of its file are left."""
    return hash_.hex() if length == min(CHUNK, left) else "%s:%d" % (hash_.hex(), length)


def pieces(chunks: Sequence[Any], size: int) -> Iterator[Tuple[int, str, int]]:
    """Offset, hash (in hex digits) and length of each chunk that is not a hole, for a file of that
    size."""
    offset = 0
    for chunk in chunks:
        if isinstance(chunk, int):
            offset += chunk * CHUNK
        else:
            hash_, _, length = chunk.partition(":")
            count = int(length) if length else min(CHUNK, size - offset)
            yield offset, hash_, count
            offset += count
