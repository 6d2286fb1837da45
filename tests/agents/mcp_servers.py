"""Real servers of ``sandbox-kernel mcp``, and the official client in front of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, ImageContent, ResourceLink, TextContent

from sandbox_kernel.errors import SandboxNotFound
from sandbox_kernel.sandboxes.local import LocalClient
from tests.helpers.coroutines import finish
from tests.helpers.waiting import until

PROGRAM = [sys.executable, "-m", "sandbox_kernel"]
_TELL_ID = 'echo $$ > "$0"; exec "$@"'


class Refused(Exception):
    """The server has answered a call with an error."""


@dataclass
class Answer:
    """What a tool has answered."""

    facts: dict[str, Any]
    text: str
    images: list[ImageContent]
    links: list[ResourceLink]

    @classmethod
    def of(cls, result: CallToolResult) -> Answer:
        texts = [block.text for block in result.content if isinstance(block, TextContent)]
        if result.is_error:
            raise Refused(texts[0])
        return cls(
            json.loads(texts[0]),
            "\n".join(texts[1:]),
            [block for block in result.content if isinstance(block, ImageContent)],
            [block for block in result.content if isinstance(block, ResourceLink)],
        )


@dataclass
class Agent:
    """An MCP client, and the calls that a model would make."""

    client: Client
    told: list[str] = field(default_factory=list)
    """The progress that the server has reported."""

    async def call(self, tool: str, **arguments: Any) -> Answer:
        """Again for as long as the sandbox is not ready."""
        while True:
            answer = await self.once(tool, **arguments)
            if tool == "open" or answer.facts.get("status") != "starting":
                return answer

    async def once(self, tool: str, **arguments: Any) -> Answer:
        async def tell(progress: float, total: float | None, message: str | None) -> None:
            self.told.append(message or "")

        return Answer.of(await self.client.call_tool(tool, arguments, progress_callback=tell))

    async def open(self, **arguments: Any) -> str:
        name = (await self.call("open", **arguments)).facts["sandbox"]
        assert isinstance(name, str)
        return name

    async def until_over(self, answer: Answer) -> Answer:
        """Poll a job to its end; the answer has all of the text since."""
        text = answer.text
        while answer.facts["status"] in ("queued", "running"):
            facts = answer.facts
            answer = await self.call(
                "poll", sandbox=facts["sandbox"], job=facts["job"], after=facts["cursor"]
            )
            text = f"{text}\n{answer.text}"
        answer.text = text
        return answer


@dataclass
class Servers:
    """Starts servers with the folders of a test, and knows what they leave behind."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Of the server on stdio that was started last."""
        return int((self.folder / "pid").read_text())

    def stdio(self, *options: str) -> StdioServerParameters:
        program = [*PROGRAM, "mcp", *options]
        arguments = ["-c", _TELL_ID, str(self.folder / "pid"), *program]
        return StdioServerParameters(command="/bin/sh", args=arguments, env=dict(os.environ))

    @contextlib.asynccontextmanager
    async def agent(self, *options: str, mode: str = "auto") -> AsyncIterator[Agent]:
        """A client that starts a server of its own."""
        async with Client(self.stdio(*options), mode=mode) as client:
            yield Agent(client)

    def http(self, *options: str) -> str:
        """Start a server on HTTP; its address."""
        server = subprocess.Popen([*PROGRAM, "mcp", "--http", *options], stdout=subprocess.PIPE)
        self.started.append(server)
        assert server.stdout is not None
        return server.stdout.readline().decode().strip()

    def token(self) -> str:
        return (self.folder / "data" / "mcp" / "token").read_text()

    @contextlib.asynccontextmanager
    async def http_agent(self, url: str, mode: str = "auto") -> AsyncIterator[Agent]:
        headers = {"Authorization": f"Bearer {self.token()}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(url, http_client=http), mode=mode) as client,
        ):
            yield Agent(client)

    async def sandboxes(self) -> list[str]:
        """All that run."""
        client, found = LocalClient(), []
        for name in await client.list():
            with contextlib.suppress(SandboxNotFound):  # it ends meanwhile
                if (await (await client.get(name)).info()).status == "running":
                    found.append(name)
        return found

    async def no_sandbox_is_left(self) -> None:
        async def none() -> bool:
            return not await self.sandboxes()

        await until(none, "the sandboxes end")

    def end(self) -> None:
        for server in self.started:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
            assert server.stdout is not None
            server.stdout.close()


def png(width: int, height: int, noise: bytes = b"") -> bytes:
    """A picture of so many pixels; of noise, if that is given, which keeps it large."""
    rows = (noise * (3 * width * height // len(noise) + 1)) if noise else bytes(3 * width * height)
    raw = b"".join(b"\0" + rows[3 * width * y : 3 * width * (y + 1)] for y in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def servers_of_a_test(folder: Path) -> Iterator[Servers]:
    """For fixtures: nothing is left when the test has ended."""
    servers = Servers(folder)
    try:
        yield servers
    finally:
        servers.end()
        finish(_remove_all())


async def _remove_all() -> None:
    client = LocalClient()
    for name in await client.list():
        await client.remove(name)
