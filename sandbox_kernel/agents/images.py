"""Pictures among a cell's outputs, and their size, read from a bounded part of their header.

Nothing is decoded but base64: no image library sees what a sandbox sent.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MIMES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml")
"""The kinds of pictures that are told from other data, the best first."""
MOST_BYTES = 32 * 2**20
_HEADER = 2**17
_MOST_SEGMENTS = 500
_MOST_PIXELS = 2**31
_SVG = "image/svg+xml"
_MAGIC = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
}
"""How these pictures begin. What does not would be refused by whoever is shown it."""
_SVG_TAG = re.compile(r"<svg\b[^<>]*>")
_LENGTHS = {
    name: re.compile(rf"\s{name}\s*=\s*[\"']\s*([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)(?:px|pt)?\s*[\"']")
    for name in ("width", "height")
}
_NUMBER = r"[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_VIEW_BOX = re.compile(
    rf"\sviewBox\s*=\s*[\"']\s*{_NUMBER}[\s,]+{_NUMBER}[\s,]+({_NUMBER})[\s,]+({_NUMBER})"
)
# Markers of a JPEG's frame header: all kinds of coding but DHT, JPG and DAC, which share the range.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
Size = tuple[int | None, int | None]


@dataclass(frozen=True)
class Image:
    """A picture that a cell displayed. Width and height are None if its header does not tell."""

    mime: str
    data: bytes
    width: int | None = None
    height: int | None = None


def images_in(outputs: Iterable[Mapping[str, Any]]) -> list[Image]:
    """The pictures of outputs in nbformat 4, one for each output: the best of its kinds."""
    found = []
    for output in outputs:
        mime, value = picture_of(output.get("data"))
        data = decoded(mime, value)
        if data:
            found.append(Image(mime, data, *size_of(mime, data)))
    return found


def picture_of(bundle: object) -> tuple[str, str]:
    """Kind and undecoded value of a MIME bundle's best picture; two empty strings if it has none.
    A value that is a list of strings, as a file may have it, is joined."""
    if isinstance(bundle, Mapping):
        for mime in MIMES:
            value = joined(bundle.get(mime))
            if value:
                return mime, value
    return "", ""


def joined(value: object) -> str:
    """A value of a MIME bundle as one string; empty if it is no string or list of strings."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return ""


def decoded(mime: str, value: str) -> bytes:
    """The bytes of a picture; none if they are not base64, too many, or begin as no picture of
    that kind does."""
    if not value or len(value) > MOST_BYTES * 4 // 3 + 4096:
        return b""
    if mime == _SVG:
        return value.encode(errors="replace") if "<svg" in value[:_HEADER] else b""
    try:
        data = base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        return b""
    return data if mime in _MAGIC and _MAGIC[mime].match(data) else b""


def described(mime: str, value: str) -> str:
    """A picture in brackets, with its kind, its width and height if known, and its size."""
    data = decoded(mime, value)
    if not data:
        return f"[image: {mime}, {in_bytes(len(value))} that cannot be read]"
    width, height = size_of(mime, data)
    size = f" {width}x{height}" if width is not None and height is not None else ""
    return f"[image: {mime}{size}, {in_bytes(len(data))}]"


def in_bytes(count: int) -> str:
    """A number of bytes as people write it."""
    for unit, size in (("MB", 10**6), ("kB", 1000)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if count < 10 * size else f"{count // size} {unit}"
    return f"{count} bytes"


def size_of(mime: str, data: bytes) -> Size:
    """Width and height in pixels from a picture's header, which may lie; None if it tells none."""
    head = data[:_HEADER]
    try:
        width, height = _READERS[mime](head) if mime in _READERS else (None, None)
    except (struct.error, IndexError, ValueError):
        return None, None
    if width is None or height is None:
        return None, None
    return (
        (width, height) if 0 < width < _MOST_PIXELS and 0 < height < _MOST_PIXELS else (None,) * 2
    )


def _png(head: bytes) -> Size:
    if not head.startswith(b"\x89PNG\r\n\x1a\n") or head[12:16] != b"IHDR":
        return None, None
    width, height = struct.unpack_from(">II", head, 16)
    return width, height


def _gif(head: bytes) -> Size:
    if head[:6] not in (b"GIF87a", b"GIF89a"):
        return None, None
    width, height = struct.unpack_from("<HH", head, 6)
    return width, height


def _jpeg(head: bytes) -> Size:
    if not head.startswith(b"\xff\xd8"):
        return None, None
    at = 2
    for _ in range(_MOST_SEGMENTS):
        if head[at] != 0xFF:
            break
        marker = head[at + 1]
        if marker == 0xFF:  # padding
            at += 1
        elif marker in _FRAMES:
            height, width = struct.unpack_from(">HH", head, at + 5)
            return width, height
        else:
            (length,) = struct.unpack_from(">H", head, at + 2)
            at += 2 + length
    return None, None


def _webp(head: bytes) -> Size:
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None, None
    if head[12:16] == b"VP8X":
        return (
            int.from_bytes(head[24:27], "little") + 1,
            int.from_bytes(head[27:30], "little") + 1,
        )
    if head[12:16] == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    if head[12:16] == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None, None


def _svg(head: bytes) -> Size:
    tag = _SVG_TAG.search(head.decode(errors="replace"))
    if tag is None:
        return None, None
    width, height = (pattern.search(tag.group()) for pattern in _LENGTHS.values())
    if width and height:
        return round(float(width.group(1))), round(float(height.group(1)))
    box = _VIEW_BOX.search(tag.group())
    return (round(float(box.group(1))), round(float(box.group(2)))) if box else (None, None)


_READERS = {
    "image/png": _png,
    "image/jpeg": _jpeg,
    "image/gif": _gif,
    "image/webp": _webp,
    _SVG: _svg,
}
