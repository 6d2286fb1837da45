"""Finding the broker, and starting it if there is none."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SandboxUnavailable
from sandbox_kernel.host_processes import adopt
from sandbox_kernel.host_programs import host_environment, own_python
from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.sandboxes.broker.main import EXIT_TAKEN, MAX_LOG
from sandbox_kernel.sandboxes.broker.protocol import MAX_MESSAGE, PROTOCOL
from sandbox_kernel.sandboxes.channel import Channel, Hangup, Unread
from sandbox_kernel.sandboxes.untrusted_files import read_tail

START_TIMEOUT = 60.0
_RETIRE_TIMEOUT = 30.0
_RETRY = 0.02
_PROGRAM = "sandbox_kernel.sandboxes.broker.main"


class Place:
    """Where the broker of a backend is: one for each set of folders that it would own."""

    def __init__(self, backend: str, factory: str, owned: str = "") -> None:
        identity = "\0".join([str(data_dir()), owned])
        key = hashlib.sha256(identity.encode()).hexdigest()[:8]
        self.backend = backend
        self.factory = factory
        self.socket = runtime_dir() / f"{backend}-{key}"
        self.log = Path(f"{self.socket}.log")

    async def request(
        self, message: dict[str, Any], fds: tuple[int, ...] = ()
    ) -> tuple[Channel, dict[str, Any]]:
        """Send a request and wait for the first answer, which may be an error.

        A broker ends only when no connection waits. If one dies with a request that
        it has not read, the next one gets it. If it may have carried it out, that is
        SandboxUnavailable.
        """
        deadline = time.monotonic() + _RETIRE_TIMEOUT
        while True:
            sock = self._connect()
            if sock is None:
                sock = await asyncio.to_thread(self._start)
            channel = Channel(sock, MAX_MESSAGE)
            try:
                await channel.send({"protocol": PROTOCOL, **message}, fds)
                answer = await channel.receive()
            except Hangup as error:
                channel.close()
                if isinstance(error, Unread) and time.monotonic() < deadline:
                    await asyncio.sleep(_RETRY)
                    continue
                raise SandboxUnavailable(
                    f"The broker of the backend {self.backend!r} went away in the middle of a "
                    f"request. Its log: {self.log}. Try again."
                ) from None
            except BaseException:
                channel.close()
                raise
            if "protocol" not in answer:
                return channel, answer
            channel.close()
            if not answer.get("retiring") or time.monotonic() > deadline:
                raise SandboxUnavailable(
                    f"The broker of the backend {self.backend!r} is another version's (protocol "
                    f"{answer.get('protocol')!r}, and this process speaks {PROTOCOL}). Restart the "
                    f"programs that use the older version of sandbox-kernel; the sandboxes live on."
                )
            await asyncio.sleep(_RETRY)  # it ends as soon as it has nothing to do

    def _connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)  # one that accepts nobody must not hold up this loop
        try:
            sock.connect(str(self.socket))
        except (FileNotFoundError, ConnectionError, BlockingIOError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def _start(self) -> socket.socket:
        """Start the broker, unless another process does so just now; connect to it."""
        deadline = time.monotonic() + START_TIMEOUT
        with _locked(Path(f"{self.socket}.start"), deadline):
            while time.monotonic() < deadline:
                found = self._connect()
                if found is not None:
                    return found
                if not self._launch(deadline - time.monotonic()):
                    time.sleep(_RETRY)  # one that is about to end holds the lock
        raise SandboxUnavailable(self._not_started(f"not within {START_TIMEOUT:g} s"))

    def _launch(self, timeout: float) -> bool:
        """False if the lock is held by another broker."""
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > MAX_LOG:
                self.log.unlink()
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                own_python("-m", _PROGRAM, self.factory, str(self.socket)),
                env=host_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(log)
        assert process.stdout is not None
        with process.stdout:
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            if poll.poll(max(0.0, timeout) * 1000) and os.read(process.stdout.fileno(), 1):
                adopt(process)
                return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(1.0) == EXIT_TAKEN:
                return False
        process.kill()
        process.wait()
        raise SandboxUnavailable(self._not_started(f"exit code {process.returncode}"))

    def _not_started(self, why: str) -> str:
        tail = read_tail(self.log, 1500).strip()
        return (
            f"The broker of the backend {self.backend!r} could not be started ({why}). Its log "
            f"{self.log} ends: {tail or '(empty)'}"
        )


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SandboxUnavailable(
                        f"Another process has been starting a broker for too long; it holds {path}."
                    ) from None
                time.sleep(_RETRY)
        yield
    finally:
        os.close(fd)
