"""A secret that is bound to ``a.example``, and a server that echoes what it gets."""

from __future__ import annotations

import asyncio
from typing import Any

from sandbox_kernel.gateway.placeholders import placeholder_for
from sandbox_kernel.gateway.secret_rewriting import HeldSecret
from sandbox_kernel.gateway.secret_values import SecretValue
from sandbox_kernel.secret_declarations import read_secrets

VALUE = 'real/"value"+0123456789=ABCDEF'
PLACEHOLDER = placeholder_for(VALUE)
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
KEY_ID, FAKE_ID = "AKIAREALREALREALREAL", "AKIAFAKEFAKEFAKEFAKE"


def held(value: str | None = VALUE, placeholder: str = PLACEHOLDER, **declared: Any) -> HeldSecret:
    [one] = read_secrets([{"name": "KEY", "hosts": ["a.example:1"], **declared}])
    problem = "" if value is not None else "The secret 'KEY' has no value on this host: gone."
    return HeldSecret(one, placeholder, None if value is None else SecretValue(value), problem)


async def echoing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with what it got, in the reason, a header and the body."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.partition(b"\r\n")[0].decode("latin-1")
        key = next((row[7:] for row in head.split(b"\r\n") if row.startswith(b"X-Key: ")), b"none")
        if b"X-Early" in head:
            writer.write(b"HTTP/1.1 103 Early %b\r\nLink: %b\r\n\r\n" % (key, key))
        writer.write(b"HTTP/1.1 200 OK %b\r\nSet-Cookie: a=%b\r\n" % (key, key))
        writer.write(b"Content-Length: %d\r\n\r\n" % (len(head) + 9))
        for byte in head + b"the end.\n":
            writer.write(bytes([byte]))
            await writer.drain()
        assert line
