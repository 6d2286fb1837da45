"""Sandboxes by name, in all backends. A backend that is broken never hides the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from sandbox_kernel.errors import SandboxError, SandboxNotFound, SandboxTimeout, SpecError
from sandbox_kernel.paths import data_dir
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.backends import backend_names, load_backend
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle, SandboxInfo

ANSWER_TIMEOUT = 30.0
"""Seconds for one question to a backend."""

T = TypeVar("T")
Note = Callable[[str], object]


@dataclass(frozen=True)
class Found:
    """A sandbox as ``ps`` and ``rm`` see it."""

    info: SandboxInfo
    has_kernel: bool
    kernel_pid: int | None
    elsewhere: bool = False
    """Another machine has made it, under the same label."""

    @property
    def running(self) -> bool:
        return self.info.status not in ("stopped", "gone")


@contextlib.asynccontextmanager
async def sandbox(
    name: str, backend: str | None
) -> AsyncIterator[tuple[SandboxClient, SandboxHandle]]:
    """The sandbox of that name. SandboxNotFound if no backend has it, SpecError if several do."""
    # Backends with a record of that name are on this disk; others need a network to be asked.
    recorded = [b for b in backend_names() if name in record_names(b)]
    candidates = [backend] if backend else recorded or backend_names()
    found: list[tuple[SandboxClient, SandboxHandle]] = []
    problems: list[SandboxError] = []
    async with contextlib.AsyncExitStack() as stack:
        for candidate in candidates:
            try:
                client = load_backend(candidate)
                stack.push_async_callback(client.close)
                found.append((client, await _in_time(client.get(name), candidate)))
            except SandboxNotFound:
                continue
            except SandboxError as error:
                if candidates == [candidate]:
                    raise
                problems.append(error)
        if not found:
            where = f" in the backend {backend!r}" if backend else ""
            asked = "".join(f" Not asked: {problem}" for problem in problems)
            raise SandboxNotFound(
                f"There is no sandbox {name!r}{where}. `sandbox-kernel ps --all` lists what there "
                f"is.{asked}"
            )
        if len(found) > 1:
            names = ", ".join(client.backend for client, _ in found)
            raise SpecError(f"Several backends ({names}) have a sandbox {name!r}. Add --backend.")
        yield found[0]


async def survey(note: Note) -> list[Found]:
    """All sandboxes of all backends that can be used, oldest first. Problems go to ``note``."""
    found: list[Found] = []
    for backend in backend_names():
        try:
            client = load_backend(backend)
        except SandboxError as error:
            # An SDK that was never installed is no news, unless sandboxes were made with it.
            if record_names(backend):
                note(str(error))
            continue
        try:
            found += await _survey_one(client, note)
        finally:
            await client.close()
    return sorted(found, key=lambda sandbox: sandbox.info.created)


async def _survey_one(client: SandboxClient, note: Note) -> list[Found]:
    try:
        names = await _in_time(client.list(), client.backend)
    except (SandboxError, OSError) as error:
        note(f"The backend {client.backend!r}: {error}")
        names = record_names(client.backend)
    looked = await asyncio.gather(*(_look(client, name) for name in names), return_exceptions=True)
    found = []
    for name, result in zip(names, looked, strict=True):
        if isinstance(result, Found):
            found.append(result)
        elif isinstance(result, SandboxNotFound):
            continue  # removed meanwhile
        elif isinstance(result, Exception):
            note(f"The sandbox {name!r} of the backend {client.backend!r}: {result}")
        else:
            raise result
    return found


async def _look(client: SandboxClient, name: str) -> Found:
    async def info() -> SandboxInfo:
        return await (await client.get(name)).info()

    known = await _in_time(info(), client.backend)
    try:
        facts = Records().load(client.backend, known.name).kernel
    except SandboxNotFound:
        return Found(known, False, None, elsewhere=True)
    pid = facts.get("pid")
    return Found(known, bool(facts), pid if isinstance(pid, int) else None)


async def _in_time(asked: Awaitable[T], backend: str) -> T:
    try:
        return await asyncio.wait_for(asked, ANSWER_TIMEOUT)
    except SandboxTimeout:
        raise  # it says more
    except asyncio.TimeoutError:
        raise SandboxTimeout(
            f"The backend {backend!r} did not answer within {ANSWER_TIMEOUT:g} s."
        ) from None


def record_names(backend: str) -> list[str]:
    """Names of the sandboxes that have a record on this disk, readable or not."""
    return sorted(path.stem for path in (data_dir() / "records" / backend).glob("[!.]*.json"))
