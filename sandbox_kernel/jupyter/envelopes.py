"""Envelopes of Jupyter messages: topic, headers and types, without the rest.

The one place that takes messages apart. None of them is trusted; clients check signatures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_DELIMITER = b"<IDS|MSG>"
_MAX_HEADER = 2**20


@dataclass(frozen=True)
class Envelope:
    topic: bytes
    """The parts before the delimiter: a topic (iopub) or identities (other channels)."""
    header: dict[str, Any]
    parent: dict[str, Any]
    content_part: bytes

    @property
    def id(self) -> str:
        return str(self.header["msg_id"])

    @property
    def kind(self) -> str:
        return str(self.header.get("msg_type"))

    @property
    def parent_kind(self) -> str:
        return str(self.parent.get("msg_type"))

    def content(self) -> dict[str, Any]:
        return json_object(self.content_part) or {}


def open_envelope(parts: Sequence[bytes]) -> Envelope | None:
    """None if that is no Jupyter message."""
    try:
        start = list(parts).index(_DELIMITER)
        header_part, parent_part, content_part = (bytes(parts[start + i]) for i in (2, 3, 5))
    except (ValueError, IndexError):
        return None
    if len(header_part) > _MAX_HEADER or len(parent_part) > _MAX_HEADER:
        return None
    header, parent = json_object(header_part), json_object(parent_part)
    if header is None or not isinstance(header.get("msg_id"), str):
        return None
    return Envelope(b"".join(parts[:start]), header, parent or {}, content_part)


def json_object(data: str | bytes) -> dict[str, Any] | None:
    """None if that is no JSON object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
