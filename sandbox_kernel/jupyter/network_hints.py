"""Hints for a cell that looks for the network in a sandbox that has none.

The text, and the host in it, come from the sandbox and may be anything: only a plain name is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MOST_TEXT = 64 * 1024
_SIGNS = (
    *("ame resolution", "ame or service not known", "ailed to resolve", "ould not resolve host"),
    *("etwork is unreachable", "No address associated with hostname"),
)
SAID_BY_PIP = b"this sandbox has no network"
"""In the note of a local jail's own pip (``overlay_venv``)."""
_SIGN_BYTES = tuple(sign.encode() for sign in _SIGNS)
_NAMED = re.compile(
    r"(?:ailed to resolve(?: host)? |ould not resolve host: |host=|to host |host name )"
    r"['\"]?([A-Za-z0-9.-]{1,253})"
)
_HOST = re.compile(
    r"(?=.{4,253}\Z)([A-Za-z0-9][A-Za-z0-9-]{0,62}\.){1,10}[A-Za-z][A-Za-z0-9-]{0,62}"
)
_PIP = re.compile(r"/simple/|No matching distribution found|pip\._vendor")


def may_concern(content: bytes) -> bool:
    """Whether the content of a message (as JSON) may tell of a missing network. Costs little."""
    return any(sign in content for sign in _SIGN_BYTES)


def text_of(content: Mapping[str, Any]) -> str:
    """What the content of an error or of a stream's message says."""
    if "evalue" in content:
        return f"{content.get('ename')}: {content.get('evalue')}"[:MOST_TEXT]
    return str(content.get("text", ""))[-MOST_TEXT:]


def hint(text: str, backend: str, variable: str) -> str:
    """What to say after this text of a cell whose sandbox has no network, or an empty string."""
    if not any(sign in text for sign in _SIGNS):
        return ""
    found = next((name for name in _NAMED.findall(text) if _HOST.fullmatch(name.rstrip("."))), "")
    word = "@pip" if _PIP.search(text) else found.rstrip(".") or "HOST"
    wanted = {"@pip": "the package index", "HOST": "a host"}.get(word, word)
    return (
        f"This kernel runs in a sandbox without a network. To let it reach {wanted}: "
        f"`sandbox-kernel install {backend} --name NAME --egress {word}`, or {variable}={word}; "
        f"then shut this kernel down, and start it again."
    )
