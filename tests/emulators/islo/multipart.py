"""The one file of a multipart upload."""

from __future__ import annotations

import re

from ..http import Request


def uploaded(request: Request) -> bytes:
    """The content of the form field ``file``."""
    found = re.search(r'boundary="?([^";]+)', request.headers.get("content-type", ""))
    if found is None:
        raise ValueError("no multipart form")
    boundary = b"--" + found[1].encode()
    for part in request.body.split(boundary)[1:-1]:
        head, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if b'name="file"' in head:
            return content.removesuffix(b"\r\n")
    raise ValueError("the form has no field 'file'")
