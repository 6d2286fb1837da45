"""Emulators as processes of their own: the main program, and what starts it for tests.

By hand, ``python -m tests.emulators.NAME`` prints the lines to export and runs until Ctrl+C. A
fixture uses ``started("NAME")``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from .faults import Faults
from .http import Server
from .network import Gateway

START_TIMEOUT = 60.0


class Service(Protocol):
    """The state of an emulated service."""

    api_key: str

    async def close(self) -> None:
        """End all sandboxes."""


class Emulator(ABC):
    """One emulated service. The main program makes it, and closes it in any case."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._server: Server | None = None

    @abstractmethod
    def make(self, folder: Path, server: Server, faults: Faults) -> Service:
        """The service, whose routes are added to the server."""

    @abstractmethod
    async def environment(
        self, key: str, base: str, *, folder: Path, server: Server, delay: float
    ) -> Mapping[str, str]:
        """The variables by which the SDK finds the service, which listens at ``base`` in plain
        HTTP, and for this API key."""

    async def start(self, folder: Path, delay: float) -> tuple[str, Mapping[str, str]]:
        """Serve; the address of its own routes (faults and more), and the environment variables
        by which the SDK finds the service."""
        faults = Faults()
        server = self._server = Server(faults.around)
        faults.add_routes(server)
        service = self._service = self.make(folder, server, faults)
        plain = await server.listen()
        port = await Gateway(plain, delay=delay).listen() if delay else plain
        env = await self.environment(
            service.api_key, f"http://127.0.0.1:{port}", folder=folder, server=server, delay=delay
        )
        return f"http://127.0.0.1:{plain}", env

    async def close(self) -> None:
        """End all sandboxes, then stop to serve."""
        if self._service is not None:
            await self._service.close()
        if self._server is not None:
            await self._server.close()


def main(emulator: Emulator, name: str) -> None:
    """The body of ``python -m tests.emulators.NAME``."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.emulators.{name}")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds added to a round trip")
    parser.add_argument("--json", action="store_true", help="for programs: end with stdin")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-emulator-"))
    # The jails' own records and sockets, apart from those of the process under test.
    os.environ["SANDBOX_KERNEL_DATA_DIR"] = str(folder / "data")
    os.environ["SANDBOX_KERNEL_RUNTIME_DIR"] = str(folder / "run")
    try:
        asyncio.run(_run(emulator, folder, options.delay, options.json))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run(emulator: Emulator, folder: Path, delay: float, as_json: bool) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if as_json:
        loop.add_reader(0, lambda: None if os.read(0, 1) else ended.set())
    try:
        control, env = await emulator.start(folder, delay)
        if as_json:
            print(json.dumps({"control": control, "env": dict(env)}), flush=True)
        else:
            for key, value in env.items():
                print(f"export {key}={value}")
            print(f"# faults and more: {control}/_emulator/", flush=True)
        await ended.wait()
    finally:
        await emulator.close()


class Running:
    """A started emulator, as tests see it."""

    def __init__(self, control: str, env: Mapping[str, str], pid: int) -> None:
        self.control = control
        self.env = env
        self.pid = pid

    def fault(self, match: str, kind: str, **fields: Any) -> None:
        """See ``faults.py``."""
        self.ask("POST", "/_emulator/faults", {"match": match, "kind": kind, **fields})

    def clear(self) -> None:
        """Forget faults and the log of requests."""
        self.ask("DELETE", "/_emulator/faults")

    def requests(self) -> list[str]:
        """``"METHOD path"`` of all requests so far."""
        found: list[str] = self.ask("GET", "/_emulator/requests")
        return found

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.control + path, data, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=START_TIMEOUT) as answer:
            text = answer.read()
        return json.loads(text) if text else None


@contextlib.contextmanager
def started(name: str, *, delay: float = 0.0) -> Iterator[Running]:
    """The emulator of a service, until the block ends (or this process does)."""
    command = [sys.executable, "-m", f"tests.emulators.{name}", "--json", "--delay", str(delay)]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, cwd=root, start_new_session=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the emulator of {name} did not start; see its output above")
        said = json.loads(line)
        yield Running(said["control"], said["env"], process.pid)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(START_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
