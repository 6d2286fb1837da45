"""Messages between the broker and its clients: JSON lines, and descriptors that come with them.

A connection carries one request:

    {"protocol": 1, "kind": "create" | "stop" | ..., ...}    with the ends of a stream's pipes
    {"result": ...}  or  {"error": class, "message": text}

After ``open_stream`` it stays open for ``{"signal": n}`` and ``{"resize": [rows, columns]}`` one
way and ``{"exit": code}`` or an error the other way; hanging up ends the command, and the broker
hangs up in turn when it has ended.
"""

from __future__ import annotations

from typing import Any

import sandbox_kernel.errors as errors
from sandbox_kernel.errors import SandboxError

PROTOCOL = 1
"""Raised when client and broker of different versions could not understand each other."""
MAX_MESSAGE = 4 * 2**20


def error_message(error: BaseException) -> dict[str, Any]:
    """An error as a message."""
    if isinstance(error, SandboxError):
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "SandboxError", "message": f"{type(error).__name__}: {error}"}


def raise_error(message: dict[str, Any]) -> None:
    """Raise what a message says, if it is about an error."""
    if "error" in message:
        found = getattr(errors, str(message["error"]), SandboxError)
        if not (isinstance(found, type) and issubclass(found, SandboxError)):
            found = SandboxError
        raise found(str(message.get("message", "")))
