"""Where a file is cut into chunks: by its contents.

So an insertion changes the chunks around it, and not all that follow. Only the ends of lines are
looked at (or of fields, or of words, if there are hardly any lines): a rolling hash over every byte
takes a hundred times as long in Python.
"""

import re
import zlib
from itertools import islice
from typing import List

from .tree_format import CHUNK, LEAST_CHUNK

_QUARTER = b"[" + b"".join(re.escape(bytes([byte])) for byte in range(0, 256, 4)) + b"]"
_PLACES = [
    re.compile(pattern)
    for end in (b"\n", b",", b" ")
    for pattern in (*(end + b"(?<=" + n * _QUARTER + end + b")" for n in (4, 2)), end)
]
"""Of each end first a part, chosen by the bytes before it: all of them would take longer."""
_ENOUGH, _MOST = 16, 4096
_CONTEXT = 64
_BY_CONTENT = 2**34
"""Larger files have chunks of one size: the list of shorter ones would not fit into an entry."""
_ZEROS = bytes(CHUNK)


def is_zeros(data: bytes) -> bool:
    return data == (_ZEROS if len(data) == CHUNK else _ZEROS[: len(data)])


def length_of_chunk(data: bytes, size: int) -> int:
    """The length of the chunk that begins with ``data``: the next CHUNK bytes of a file of that
    size, or all that are left of it."""
    if not CHUNK < size <= _BY_CONTENT:
        return len(data)
    # The least CRC of all, because others who look at most of these places find the same.
    return min(
        _places(data),
        key=lambda at: zlib.crc32(data[at - _CONTEXT : at]),
        default=len(data),
    )


def _places(data: bytes) -> "List[int]":
    places: List[int] = []
    for pattern in _PLACES:
        places = [found.end() for found in islice(pattern.finditer(data, LEAST_CHUNK), _MOST)]
        if len(places) >= _ENOUGH:
            break
    return places
