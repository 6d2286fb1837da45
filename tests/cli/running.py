"""Running the real command, with all its files in a folder of the test's."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec

PROGRAM = [sys.executable, "-m", "sandbox_kernel"]


@dataclass
class Cli:
    """``sandbox-kernel`` as a subprocess."""

    folder: Path
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def __call__(
        self, *arguments: str, stdin: str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            env={**self.env, **(env or {})},
            timeout=300,  # doctor may boot VMs
            check=False,
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Run it at the same time as the test."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
        return subprocess.Popen([*PROGRAM, *arguments], env=self.env, **streams)

    def names(self) -> list[str]:
        """All sandboxes, in the words of ``ps``."""
        ran = self("ps", "--all", "--json")
        assert ran.returncode == 0, ran.stderr
        return [sandbox["name"] for sandbox in json.loads(ran.stdout)]

    @property
    def records(self) -> Path:
        return self.folder / "data" / "records" / "local"

    def create(self, name: str, **spec: Any) -> None:
        """A real jail, made by this process."""
        asyncio.run(LocalClient().create(SandboxSpec(name=name, **spec)))

    def stop(self, name: str) -> None:
        """End a jail, but keep it."""

        async def stop() -> None:
            await (await LocalClient().get(name)).stop()

        asyncio.run(stop())

    def remove_all(self) -> None:
        async def remove() -> None:
            client = LocalClient()
            for path in self.records.glob("[!.]*.json"):
                await client.remove(path.stem)

        asyncio.run(remove())


class Terminal:
    """A user at a terminal, in front of a process."""

    def __init__(self, cli: Cli, *arguments: str) -> None:
        self.fd, theirs = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(self.fd)
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**cli.env, "TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._theirs = theirs
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, pattern: str) -> None:
        """Read until the pattern is seen, and forget everything up to it."""
        deadline = time.monotonic() + 60
        while not (found := re.search(pattern, self.seen)):
            left = deadline - time.monotonic()
            readable = left > 0 and select.select([self.fd], [], [], left)[0]
            assert readable, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self.fd, 4096).decode()
        self.seen = self.seen[found.end() :]

    def end(self) -> int:
        code = self.process.wait(60)
        assert termios.tcgetattr(self.fd) == self.before
        return code


@contextmanager
def at_terminal(cli: Cli, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(cli, *arguments)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)
        os.close(terminal._theirs)
