"""Links that misbehave: slow, text-only, cut, stalled, lossy, or dead without saying so.

    with install(Shape(delay=0.05, byte_exact=False, plan=Plan(("cut", "stall"), seed=7))) as link:
        manager.start_kernel()
        ...
        link.faults    # what went wrong so far, counted

A Shape wraps any backend: only the stream of the connector is changed, and it goes through the
tunnel's path for provider streams (no socket), with the codec that ``byte_exact`` asks for. The
benchmarks use shapes without a plan; the tests of this folder use all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from sandbox_kernel.jupyter import kernel_factory
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import ExecStream
from sandbox_kernel.sandboxes.capabilities import Capabilities
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.tunnel.background import background_loop
from sandbox_kernel.wire.codec import PREAMBLE
from sandbox_kernel.wire.frames import HEADER_SIZE

FAULTS = (
    "cut",  # the stream breaks, and what was under way is lost
    "truncate",  # part of a write arrives, then the stream breaks
    "lose",  # part of a write is lost, and the stream goes on
    "damage",  # a byte arrives as another
    "duplicate",  # a whole line or frame arrives twice, as from a provider that retries
    "stall",  # nothing moves for a while
    "bytewise",  # byte-at-a-time delivery, for a while
    "rechunk",  # pieces of other sizes than were written, for a while
    "refuse",  # the stream breaks, and no other can be made for a while
    "half-open",  # bytes vanish from now on, and nothing says so
)

_IN_FLIGHT = 4 * 2**20
_PIECE = 16 * 1024


@dataclass(frozen=True)
class Plan:
    """What goes wrong: one of ``faults`` after about ``every`` bytes, ``limit`` times in all, so
    that whatever is carried does arrive."""

    faults: tuple[str, ...] = ()
    seed: int = 0
    every: int = 100_000
    limit: int = 30

    @classmethod
    def random(cls, seed: int) -> Plan:
        """Some of all faults, more or less often."""
        rng = random.Random(f"plan {seed}")
        faults = rng.sample(FAULTS, rng.randint(2, len(FAULTS)))
        return cls(tuple(faults), seed, rng.choice((20_000, 100_000, 300_000)))


@dataclass(frozen=True)
class Shape:
    """How a link is. Each direction has the delay and the bandwidth (bytes a second) to itself."""

    delay: float = 0.0
    bandwidth: float | None = None
    byte_exact: bool = True
    plan: Plan = field(default_factory=Plan)

    @classmethod
    def random(cls, seed: int) -> Shape:
        rng = random.Random(f"shape {seed}")
        return cls(
            delay=rng.choice((0.0, 0.0, 0.001, 0.05, 0.3)),
            bandwidth=rng.choice((None, None, 2e6, 10e6)),
            byte_exact=rng.random() < 0.5,
            plan=Plan.random(seed),
        )


@contextlib.contextmanager
def install(shape: Shape) -> Iterator[Faults]:
    """Kernels that the provisioner starts inside this block have links of this shape, for good."""
    faults = Faults(shape)
    with mock.patch.object(
        kernel_factory, "load_backend", lambda name: ShapedClient(load_backend(name), faults)
    ):
        yield faults


class Faults:
    """The plan as it is carried out, over all links of the kernels of one ``install``."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.faults: Counter[str] = Counter()
        self.links = 0
        self.refused_until = 0.0
        self.streams: set[ShapedStream] = set()
        self.rng = random.Random(f"faults {shape.plan.seed}")
        self._left = self._distance()

    def __repr__(self) -> str:
        return f"{self.shape} gave {dict(self.faults)} over {self.links} links"

    def cut(self) -> bool:
        """Break the present streams, from any thread's point of view at some time soon."""
        streams = list(self.streams)
        for stream in streams:
            background_loop().call_soon_threadsafe(stream.break_off)
        return bool(streams)

    def split(self, data: bytes) -> Iterator[tuple[bytes, str]]:
        """The data in pieces, each with the fault that happens behind it (or ""). The fault
        ``duplicate`` is about the whole piece, so it is not split for that."""
        plan = self.shape.plan
        while plan.faults and self._left < len(data) and self.faults.total() < plan.limit:
            kind = self.rng.choice(plan.faults)
            self.faults[kind] += 1
            at = len(data) if kind == "duplicate" else self._left
            self._left = self._distance()
            yield data[:at], kind
            data = data[at:]
        self._left -= len(data)
        if data:
            yield data, ""

    def _distance(self) -> int:
        return int(self.rng.expovariate(1 / self.shape.plan.every)) + 1


class ShapedClient:
    """A backend whose handles give shaped streams; everything else is the inner backend's."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def capabilities(self) -> Capabilities:
        inner: Capabilities = self._inner.capabilities
        return replace(inner, byte_exact_streams=self._faults.shape.byte_exact)

    async def create(self, spec: Any) -> ShapedHandle:
        return ShapedHandle(await self._inner.create(spec), self._faults)

    async def get(self, name: str) -> ShapedHandle:
        return ShapedHandle(await self._inner.get(name), self._faults)


class ShapedHandle:
    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open_command(self, command: Command) -> Any:
        if not command.duplex:  # not the connector
            return await self._inner.open_command(command)
        if asyncio.get_running_loop().time() < self._faults.refused_until:
            raise ConnectionRefusedError("no stream can be opened now (a fault of the test)")
        plain = replace(command, duplex=False)
        return ShapedStream(await self._inner.open_command(plain), self._faults)


class ShapedStream(ExecStream):
    """The stream of one connector, as the plan has it."""

    def __init__(self, inner: ExecStream, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._rng = faults.rng
        shape = faults.shape
        self._plain = not (shape.delay or shape.bandwidth or shape.plan.faults)
        self._silent = self._broken = False
        self._down = _Pipe(shape.delay, shape.bandwidth)
        self._up = _Pipe(shape.delay, shape.bandwidth)
        units = "duplicate" in shape.plan.faults
        self._down_way = _Way(_Units(shape.byte_exact, after=PREAMBLE) if units else None)
        self._up_way = _Way(_Units(shape.byte_exact) if units else None)
        loop = asyncio.get_running_loop()
        self._tasks = (
            [] if self._plain else [loop.create_task(self._pull()), loop.create_task(self._push())]
        )
        faults.links += 1
        faults.streams.add(self)

    async def read(self) -> bytes:
        return await (self._inner.read() if self._plain else self._down.get())

    async def write(self, data: bytes) -> None:
        await (self._inner.write(data) if self._plain else self._up.put(data))

    def break_off(self) -> None:
        """As when a proxy drops a connection: an error or an end, and what was under way is
        lost."""
        self._broken = True
        error = ConnectionResetError("the stream was cut (a fault of the test)")
        if self._plain:
            self._plain = False  # from now on the pipes speak
            # Whoever waits in the inner stream must hear of it.
            self._tasks.append(asyncio.get_running_loop().create_task(self._inner.close()))
        self._down.break_off(self._rng.choice((error, None)))
        self._up.break_off(error)

    async def _pull(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._inner.read():
                await self._carry(data, self._down_way, self._down.put)
        self._down.finish()

    async def _push(self) -> None:
        try:
            while data := await self._up.get():
                await self._carry(data, self._up_way, self._inner.write)
        except OSError:
            self.break_off()

    async def _carry(
        self, data: bytes, way: _Way, deliver: Callable[[bytes], Awaitable[None]]
    ) -> None:
        for unit in way.units.feed(data) if way.units else [data]:
            for piece, fault in self._faults.split(unit):
                for part in way.distorted(piece, self._rng):
                    if not self._silent:
                        await deliver(part)
                        if fault == "duplicate":
                            await deliver(part)
                if fault:
                    await self._happens(fault, way)
                if self._broken:
                    return

    async def _happens(self, fault: str, way: _Way) -> None:
        rng = self._rng
        if fault == "stall":
            await asyncio.sleep(rng.uniform(0.02, 0.6))
        elif fault == "half-open":
            self._silent = True
        elif fault == "lose":
            way.lose = rng.randint(1, 3000)
        elif fault == "damage":
            way.damage = True
        elif fault == "bytewise":
            way.small, way.small_size = 300, 1
        elif fault == "rechunk":
            way.small, way.small_size = 30_000, rng.choice((7, 100, 1000))
        elif fault in ("cut", "truncate", "refuse"):
            if fault == "refuse":
                now = asyncio.get_running_loop().time()
                self._faults.refused_until = now + rng.uniform(0.1, 1.5)
            if fault == "truncate":
                await asyncio.sleep(0)  # what came before it has arrived
            self.break_off()

    async def read_stderr(self) -> bytes:
        return await self._inner.read_stderr()

    async def close_stdin(self) -> None:
        await self._inner.close_stdin()

    async def wait(self) -> int:
        return await self._inner.wait()

    async def send_signal(self, signum: int) -> None:
        await self._inner.send_signal(signum)

    async def resize(self, rows: int, columns: int) -> None:
        await self._inner.resize(rows, columns)

    async def close(self) -> None:
        self._faults.streams.discard(self)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.close()


class _Pipe:
    """Pieces under way in one direction: in order, delayed, as fast as the bandwidth allows, and
    pushing back on the writer when too many are."""

    def __init__(self, delay: float, bandwidth: float | None) -> None:
        self._delay = delay
        self._bandwidth = bandwidth
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._free_at = 0.0
        self._ended = False
        self._error: OSError | None = None
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        for at in range(0, len(data), _PIECE) if self._bandwidth else (0,):
            while self._size >= _IN_FLIGHT and not self._ended:
                self._room.clear()
                await self._room.wait()
            if self._ended:
                raise self._error or BrokenPipeError("the stream has ended")
            piece = data[at : at + _PIECE] if self._bandwidth else data
            self._free_at = max(self._free_at, loop.time())
            self._free_at += len(piece) / self._bandwidth if self._bandwidth else 0.0
            self._pieces.append((self._free_at + self._delay, piece))
            self._size += len(piece)
            self._changed.set()

    async def get(self) -> bytes:
        loop = asyncio.get_running_loop()
        while True:
            while not self._pieces:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    return b""
                self._changed.clear()
                await self._changed.wait()
            wait = self._pieces[0][0] - loop.time()
            if wait <= 0:
                _, piece = self._pieces.popleft()
                self._size -= len(piece)
                self._room.set()
                return piece
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait)

    def finish(self) -> None:
        """No more comes; what is under way arrives."""
        self._ended = True
        self._changed.set()
        self._room.set()

    def break_off(self, error: OSError | None) -> None:
        """No more comes, and what has not arrived yet is lost."""
        if not self._ended:
            self._error = error
        now = asyncio.get_running_loop().time()
        while self._pieces and self._pieces[-1][0] > now:
            self._size -= len(self._pieces.pop()[1])
        self.finish()


class _Way:
    """What is wrong with one direction of a stream just now."""

    def __init__(self, units: _Units | None) -> None:
        self.units = units
        self.lose = 0
        self.damage = False
        self.small = 0
        self.small_size = 1

    def distorted(self, piece: bytes, rng: random.Random) -> Iterator[bytes]:
        lost = min(self.lose, len(piece))
        self.lose -= lost
        piece = piece[lost:]
        if piece and self.damage:
            self.damage = False
            at = rng.randrange(len(piece))
            piece = piece[:at] + bytes([piece[at] ^ 1 << rng.randrange(8)]) + piece[at + 1 :]
        while piece and self.small > 0:
            size = min(len(piece), self.small_size)
            self.small -= size
            yield piece[:size]
            piece = piece[size:]
        if piece:
            yield piece


class _Units:
    """Cuts bytes into what a provider would send again: lines, or frames."""

    def __init__(self, frames: bool, after: bytes = b"") -> None:
        self._frames = frames
        self._after = after if frames else b""
        self._held = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._held += data
        while (size := self._next()) and size <= len(self._held):
            yield self._held[:size]
            self._held = self._held[size:]

    def _next(self) -> int:
        """Size of the first unit; 0 if it cannot be told yet."""
        if self._after:
            at = self._held.find(self._after)
            if at < 0:
                return 0
            size = at + len(self._after)
            self._after = b""
            return size
        if not self._frames:
            return self._held.find(b"\n") + 1
        if len(self._held) < HEADER_SIZE:
            return 0
        return HEADER_SIZE + int(struct.unpack_from(">I", self._held)[0])
