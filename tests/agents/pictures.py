"""Small pictures of each kind, and cells' outputs that have them."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress((b"\0" + bytes(width)) * height))
    return b"\x89PNG\r\n\x1a\n" + header + rows + chunk(b"IEND", b"")


def jpeg(width: int, height: int, before: int = 2) -> bytes:
    """Up to its frame header, with other segments before that."""
    segments = b"\xff\xe1\x10\x00" + bytes(0xFFE)
    frame = b"\xff\xc2\x00\x11\x08" + struct.pack(">HH", height, width)
    return b"\xff\xd8" + segments * before + b"\xff" + frame + bytes(20)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(10)


def webp(width: int, height: int) -> bytes:
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\0\0\0\0WEBPVP8X\n\0\0\0\0\0\0\0" + sizes


def displayed(**bundle: Any) -> dict[str, Any]:
    """An output with a MIME bundle; ``image_png`` stands for ``image/png``."""
    data = {name.replace("_", "/", 1).replace("svg", "svg+xml"): bundle[name] for name in bundle}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def encoded(data: bytes) -> str:
    return base64.encodebytes(data).decode()
