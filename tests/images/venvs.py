"""A backend for tests whose "image" is a virtual environment: its sandboxes are plain processes.

No isolation whatsoever; but a real interpreter of its own, real streams, a real agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from sandbox_kernel.errors import ExecFailed
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.base import (
    Diagnosis,
    ExecStream,
    SandboxClient,
    SandboxHandle,
    SandboxInfo,
)
from sandbox_kernel.sandboxes.capabilities import Capabilities
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.spec import SandboxSpec


class VenvStream(ExecStream):
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdin is not None
        self._out, self._err, self._in = process.stdout, process.stderr, process.stdin

    async def read(self) -> bytes:
        return await self._out.read(65536)

    async def read_stderr(self) -> bytes:
        return await self._err.read(65536)

    async def write(self, data: bytes) -> None:
        self._in.write(data)
        await self._in.drain()

    async def close_stdin(self) -> None:
        self._in.close()

    async def wait(self) -> int:
        return await self._process.wait()

    async def send_signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)

    async def resize(self, rows: int, columns: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        if self._process.returncode is None:
            await self.send_signal(signal.SIGKILL)
        await self._process.wait()


class VenvHandle(SandboxHandle):
    """A folder with a home, sockets and the guest program; ``python`` is the venv's."""

    backend = "venv"

    def __init__(self, spec: SandboxSpec, folder: Path, python: str) -> None:
        self.name = self.id = spec.name
        self.spec = spec
        self.folder = folder
        self.agent_folder = str(folder / "agent")
        self.workdir = str(folder)
        self.python = python
        self.commands: list[list[str]] = []
        """All that was run in here."""
        self.uploads: list[str] = []
        self._spawned: list[subprocess.Popen[bytes]] = []

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        own = {"HOME": str(self.folder / "home"), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        return {**own, **self.spec.env, **env}

    async def open_command(self, command: Command) -> ExecStream:
        argv, pipe = list(command.argv), asyncio.subprocess.PIPE
        self.commands.append(argv)
        env = self._environment(command.env)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=command.cwd
            )
        except OSError as error:
            raise ExecFailed(f"{argv[0]} cannot be run: {error}") from None
        return VenvStream(process)

    async def spawn_command(self, command: Command) -> None:
        with (self.folder / "log").open("ab") as log:
            self._spawned.append(
                subprocess.Popen(
                    command.argv,
                    env=self._environment(command.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def guest_argv(self, *arguments: str) -> Sequence[str]:
        assert self.python is not None
        return [self.python, "-I", str(self.folder / "guest.pyz"), *arguments]

    async def install_guest(self, zipapp: bytes) -> None:
        (self.folder / "guest.pyz").write_bytes(zipapp)

    async def upload(self, folder: str, target: str) -> None:
        self.uploads.append(target)
        await super().upload(folder, target)

    async def stop(self) -> None:
        for process in self._spawned:
            process.terminate()
            await asyncio.to_thread(process.wait, 30)
        self._spawned.clear()

    async def resume(self) -> None:
        """Its files are there."""

    async def kill(self) -> None:
        await self.stop()

    async def logs(self, *, tail: int | None = None) -> str:
        return (self.folder / "log").read_text()

    async def info(self) -> SandboxInfo:
        return SandboxInfo(self.name, self.id, self.backend, "running", 0.0)


class VenvClient(SandboxClient):
    backend = "venv"
    capabilities: ClassVar[Capabilities] = Capabilities(byte_exact_streams=True, restart=True)

    def __init__(self, python: str) -> None:
        self._python = python
        self.handles: dict[str, VenvHandle] = {}

    async def create(self, spec: SandboxSpec) -> VenvHandle:
        Records().reserve(Record(self.backend, spec.name, spec.name, spec.to_dict()))
        folder = Path(tempfile.mkdtemp(prefix="sk-"))
        (folder / "home").mkdir()
        self.handles[spec.name] = VenvHandle(spec, folder, self._python)
        return self.handles[spec.name]

    async def get(self, name: str) -> SandboxHandle:
        return self.handles[name]

    async def list(self) -> list[str]:
        return sorted(self.handles)

    async def remove(self, name: str) -> None:
        handle = self.handles.pop(name, None)
        if handle is not None:
            await handle.kill()
            shutil.rmtree(handle.folder)
        Records().delete(self.backend, name)

    async def diagnose(self) -> Sequence[Diagnosis]:
        return []
