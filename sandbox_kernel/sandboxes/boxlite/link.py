"""The host's end of the way to a box's supervisor, and the commands that go over it.

One link a box: an execution of the relay, whose text streams carry the lines that supervisor.py
describes. Everything that comes from the box is checked: a line that is too long, no line at all
or more than was asked for ends the link, and with it the commands.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from sandbox_kernel.errors import ExecFailed, SandboxError, SandboxGone, SandboxTimeout
from sandbox_kernel.sandboxes.base import ExecStream
from sandbox_kernel.sandboxes.boxlite.supervisor import MAX_LINE, WINDOW
from sandbox_kernel.text import printable

_log = logging.getLogger(__name__)

MAX_LOG = 2 * 2**20
_MAX_RECEIVED = 2 * MAX_LOG
_MAX_INPUT = 48 * 1024
_START_TIMEOUT, _REPLY_TIMEOUT, _CLOSE_TIMEOUT = 60.0, 30.0, 15.0


class Carrier(Protocol):
    """What a link needs of an execution."""

    async def read(self) -> str:
        """The next piece of stdout; empty at its end."""

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


class BoxLink:
    """The way to one box. ``closed`` is set when it is over, whatever the cause.

    ``why_lost`` is asked once then, for the error that the commands' users get.
    """

    def __init__(
        self, carrier: Carrier, sandbox: str, why_lost: Callable[[], Awaitable[SandboxError]]
    ) -> None:
        self.closed = asyncio.Event()
        self.sandbox = sandbox
        self.error: SandboxError | None = None
        self.boot = ""
        self._carrier = carrier
        self._why_lost = why_lost
        self._numbers = itertools.count(1)
        self._streams: dict[int, BoxStream] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._outgoing: list[bytes] = []
        self._more = asyncio.Event()
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._transmit())]
        self._ending: asyncio.Task[None] | None = None

    async def opened(self, timeout: float) -> None:
        """Wait until the supervisor has said hello. SandboxError if it does not."""
        try:
            await asyncio.wait_for(asyncio.shield(self._hello), timeout)
        except asyncio.TimeoutError:
            raise SandboxTimeout(
                f"The supervisor in sandbox {self.sandbox!r} did not answer within {timeout:g} s."
            ) from None

    # --- what the client calls

    def configure(self, lease: float, env: Mapping[str, str], workdir: str) -> None:
        self.send(0, "configure", {"lease": lease, "env": dict(env), "workdir": workdir})

    async def request(self, kind: str, value: Any = None, timeout: float = _REPLY_TIMEOUT) -> Any:
        """Ask something and wait for the reply, which is the word of the box."""
        self._check()
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(number, kind, value)
            return await asyncio.wait_for(reply, timeout)
        except asyncio.TimeoutError:
            raise SandboxTimeout(
                f"Sandbox {self.sandbox!r} did not answer within {timeout:g} s."
            ) from None
        finally:
            self._replies.pop(number, None)

    async def spawn(self, command: dict[str, Any]) -> None:
        started = await self.request("spawn", command, _START_TIMEOUT)
        if isinstance(started, str):
            raise self._not_run(command["argv"], started)

    async def open(self, command: dict[str, Any]) -> BoxStream:
        """Start a command. ExecFailed if that cannot be done."""
        self._check()
        number = next(self._numbers)
        stream = BoxStream(self, number)
        started = self._replies[number] = asyncio.get_running_loop().create_future()
        self._streams[number] = stream
        try:
            self.send(number, "exec", command)
            answer = await asyncio.wait_for(started, _START_TIMEOUT)
        except BaseException as error:
            self.send(number, "close", None)
            self._streams.pop(number, None)
            if isinstance(error, asyncio.TimeoutError):
                raise SandboxTimeout(
                    f"Sandbox {self.sandbox!r} did not start {command['argv'][0]!r} within "
                    f"{_START_TIMEOUT:g} s."
                ) from None
            raise
        finally:
            self._replies.pop(number, None)
        if isinstance(answer, str):
            self._streams.pop(number, None)
            raise self._not_run(command["argv"], answer)
        return stream

    def _not_run(self, argv: Sequence[str], why: str) -> ExecFailed:
        return ExecFailed(
            f"{argv[0]!r} could not be run in sandbox {self.sandbox!r}: {printable(why[:500])}."
        )

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    # --- lines

    def send(self, number: int, kind: str, value: Any) -> None:
        if not self.closed.is_set():
            line = json.dumps([number, kind, value], separators=(",", ":")).encode() + b"\n"
            if len(line) > MAX_LINE:
                raise SandboxError(
                    f"A command with arguments and environment of {len(line)} bytes is too long "
                    f"for sandbox {self.sandbox!r}, which takes {MAX_LINE}. Pass large values "
                    f"through a file or stdin."
                )
            self._outgoing.append(line)
            self._more.set()

    async def _transmit(self) -> None:
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                data, self._outgoing = b"".join(self._outgoing), []
                await self._carrier.write(data)
        except Exception as error:  # noqa: BLE001  (an SDK may raise anything)
            self._lost(f"writing failed: {error}")

    async def _receive(self) -> None:
        received: list[str] = []
        size = 0
        try:
            while piece := await self._carrier.read():
                head, newline, rest = piece.rpartition("\n")
                if newline:
                    for line in "".join([*received, head]).split("\n"):
                        self._take(line)
                    received, size = [], 0
                received.append(rest)
                size += len(rest)
                if size > _MAX_RECEIVED:
                    raise ValueError("a line without end")
            self._lost("its relay ended")
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            self._lost(f"the box broke the protocol: {error}")
        except Exception as error:  # noqa: BLE001
            self._lost(f"reading failed: {error}")

    def _take(self, line: str) -> None:
        number, kind, value = json.loads(line)
        if kind == "hello":
            self.boot = str(value["boot"])[:64]
            if not self._hello.done():
                self._hello.set_result(None)
        elif kind in ("reply", "started", "failed"):
            waiting = self._replies.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(str(value) if kind == "failed" else value)
        elif (stream := self._streams.get(number)) is not None:
            stream.take(kind, value)

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    # --- the end

    def _lost(self, why: str) -> None:
        if self._ending is None:
            _log.info("the link to sandbox %s is over: %s", self.sandbox, printable(why[:300]))
            self._ending = asyncio.create_task(self._end(why))

    async def _end(self, why: str) -> None:
        self.closed.set()
        try:
            self.error = await self._why_lost()
        except Exception as error:  # noqa: BLE001
            self.error = SandboxError(f"Sandbox {self.sandbox!r} was lost: {why}; {error}.")
        for waiting in [*self._replies.values(), self._hello]:
            if not waiting.done():
                waiting.set_exception(self.error)
                waiting.exception()  # it may be that nobody waits
        for stream in list(self._streams.values()):
            stream.lost(self.error)
        self._streams.clear()
        await self._finish()

    async def close(self) -> None:
        """End the link; its commands are ended by the supervisor. Idempotent."""
        if self._ending is None:
            gone = SandboxGone(f"The way to sandbox {self.sandbox!r} was closed.")

            async def why() -> SandboxError:
                return gone

            self._why_lost = why
            self._lost("closed")
        assert self._ending is not None
        await asyncio.shield(self._ending)

    async def _finish(self) -> None:
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._carrier.close(), _CLOSE_TIMEOUT)


class BoxStream(ExecStream):
    """A command in a box. Byte-exact: what the box sends as base64 is bytes here."""

    def __init__(self, link: BoxLink, number: int) -> None:
        self._link = link
        self._number = number
        self._kept: dict[str, bytearray] = {"out": bytearray(), "err": bytearray()}
        self._ended: set[str] = set()
        self._room = WINDOW
        self._exit: int | None = None
        self._error: SandboxError | None = None
        self._closed = False
        self._done = asyncio.Event()
        self._over = asyncio.Event()
        self._news: dict[str, asyncio.Event] = {
            name: asyncio.Event() for name in ("out", "err", "in")
        }

    def take(self, kind: str, value: Any) -> None:
        """What the supervisor says about this command. ValueError if it may not say that."""
        if kind in ("out", "err"):
            self._take_output(kind, value)
        elif kind == "took_in":
            if not isinstance(value, int) or not 0 < value <= WINDOW - self._room:
                raise ValueError("it took more input than there was")
            self._room += value
            self._news["in"].set()
        elif kind == "exit":
            self._exit = value if isinstance(value, int) and abs(value) < 2**31 else -1
            self._done.set()
        elif kind == "closed":
            self._over.set()
            self._news["in"].set()
            self._link.forget(self._number)
        else:
            raise ValueError(f"an unknown line {str(kind)[:40]!r}")

    def _take_output(self, name: str, value: str) -> None:
        try:
            data = base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError("output that is no base64") from error
        if not data:
            self._ended.add(name)
        elif not self._closed:
            self._kept[name] += data
            if len(self._kept[name]) > WINDOW:
                raise ValueError("more output than was asked for")
        self._news[name].set()

    def lost(self, error: SandboxError) -> None:
        self._error = error
        self._ended |= {"out", "err"}
        for news in (*self._news.values(), self._done, self._over):
            news.set()

    async def _read(self, name: str) -> bytes:
        kept = self._kept[name]
        while not kept and name not in self._ended and not self._closed:
            self._news[name].clear()
            await self._news[name].wait()
        data = bytes(kept)
        kept.clear()
        if data:
            self._link.send(self._number, f"took_{name}", len(data))
        return data

    async def read(self) -> bytes:
        return await self._read("out")

    async def read_stderr(self) -> bytes:
        return await self._read("err")

    async def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            while self._room <= 0 and not self._finished:
                self._news["in"].clear()
                await self._news["in"].wait()
            if self._finished:
                raise BrokenPipeError("the command's stdin is closed")
            piece, left = left[: min(self._room, _MAX_INPUT)], left[min(self._room, _MAX_INPUT) :]
            self._room -= len(piece)
            self._link.send(self._number, "in", base64.b64encode(piece).decode())

    @property
    def _finished(self) -> bool:
        return self._closed or self._error is not None or self._over.is_set()

    async def close_stdin(self) -> None:
        if not self._finished:
            self._link.send(self._number, "in", "")

    async def wait(self) -> int:
        await self._done.wait()
        if self._exit is None:
            raise self._error or SandboxGone(f"Sandbox {self._link.sandbox!r} has ended.")
        return self._exit

    async def send_signal(self, signum: int) -> None:
        if self._exit is None and not self._finished:
            self._link.send(self._number, "signal", int(signum))

    async def resize(self, rows: int, columns: int) -> None:
        if not self._finished:
            self._link.send(self._number, "resize", [rows, columns])

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            for news in self._news.values():
                news.set()
            if not self._over.is_set():
                self._link.send(self._number, "close", None)
        if self._error is None:
            try:
                await asyncio.wait_for(self._over.wait(), _CLOSE_TIMEOUT)
            except asyncio.TimeoutError:
                _log.warning(
                    "a command in sandbox %s did not end within %g s",
                    self._link.sandbox,
                    _CLOSE_TIMEOUT,
                )
        self._link.forget(self._number)
