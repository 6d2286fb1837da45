"""The tools for files in a sandbox's workspace: list_files, read_file, write_file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Annotated
from urllib.parse import quote

from mcp.server.mcpserver import Context
from mcp_types import ImageContent
from pydantic import Field

from sandbox_kernel.agents.mcp.arguments import FilePath, SandboxName
from sandbox_kernel.agents.mcp.cells import told
from sandbox_kernel.agents.mcp.content import SHOWN, Content, link, status, text_block
from sandbox_kernel.agents.mcp.sandboxes import Sandboxes
from sandbox_kernel.errors import SpecError, SpecRefused

_MOST_FILES = 1000
_MAGIC = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"<svg": "image/svg+xml",
    b"%PDF-": "application/pdf",
}


class Files:
    """Tools over the sandboxes of one server."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._limits = sandboxes.policy.limits

    async def list_files(self, sandbox: SandboxName, ctx: Context, path: FilePath = ".") -> Content:
        """List a folder of the sandbox's workspace, as JSON lines with path and size."""
        notebook = await self._sandboxes.use(sandbox, told(ctx))
        found = await notebook.list(path)
        rows = [
            json.dumps({"path": one.path, "kind": one.kind, "size": one.size}, ensure_ascii=False)
            for one in found[:_MOST_FILES]
        ]
        left_out = len(found) - len(rows)
        head = status(sandbox=sandbox, files=len(found), left_out=left_out or None)
        return [head, text_block("\n".join(rows))] if rows else [head]

    async def read_file(
        self,
        sandbox: SandboxName,
        path: FilePath,
        ctx: Context,
        offset: Annotated[int, Field(ge=0, description="character of the text to begin with")] = 0,
    ) -> Content:
        """Read a file of the workspace: text in parts, a picture as such, other data as a link to a
        resource."""
        notebook = await self._sandboxes.use(sandbox, told(ctx))
        data = await notebook.read(path, max_bytes=self._limits.file_bytes)
        mime = mime_of(data)
        digest = hashlib.sha256(data).hexdigest()
        facts = {"sandbox": sandbox, "path": path, "size": len(data), "sha256": digest}
        uri = f"sandbox://{sandbox}/files/{quote(path)}"
        if mime in SHOWN and len(data) <= self._limits.image_bytes:
            encoded = base64.b64encode(data).decode()
            return [status(**facts), ImageContent(type="image", data=encoded, mime_type=mime)]
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return [status(**facts), link(uri, path, mime, len(data))]
        part = text[offset : offset + self._limits.output_chars]
        more = offset + len(part) if offset + len(part) < len(text) else None
        return [status(**facts, next_offset=more), text_block(part)]

    async def write_file(
        self,
        sandbox: SandboxName,
        path: FilePath,
        ctx: Context,
        text: Annotated[str | None, Field(description="the whole content")] = None,
        base64: Annotated[str | None, Field(description="the content, if it is no text")] = None,
    ) -> Content:
        """Write a file of the workspace, and the folders above it. An existing file is replaced."""
        if (text is None) == (base64 is None):
            raise SpecError("write_file takes either text or base64.")
        data = text.encode(errors="surrogatepass") if text is not None else _decoded(base64 or "")
        if len(data) > self._limits.file_bytes:
            raise SpecRefused(
                f"{path!r} would have {len(data)} bytes, and {self._limits.file_bytes} are allowed."
            )
        notebook = await self._sandboxes.use(sandbox, told(ctx))
        await notebook.write(path, data)
        return [status(sandbox=sandbox, path=path, size=len(data))]


def mime_of(data: bytes) -> str:
    """What kind of data that is, by its first bytes."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next(
        (mime for magic, mime in _MAGIC.items() if data.startswith(magic)),
        "application/octet-stream",
    )


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SpecError(f"base64 is not valid: {error}.") from None
