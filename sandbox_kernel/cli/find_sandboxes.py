"""Sandboxes by name, in all backends. A backend that is broken never hides the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from sandbox_kernel.cli.foreground import within
from sandbox_kernel.errors import SandboxError, SandboxNotFound, SandboxUnavailable, SpecError
from sandbox_kernel.paths import data_dir
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.backends import backend_names, load_backend
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle, SandboxInfo, Usage
from sandbox_kernel.sandboxes.unattended import is_spare
from sandbox_kernel.sandboxes.unsaved_files import Unsaved, unsaved_in
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.suggestions import closest

ANSWER_TIMEOUT = 30.0
"""Seconds for one question to a backend."""

T = TypeVar("T")
Note = Callable[[str], object]


@dataclass(frozen=True)
class FoundSandbox:
    """A sandbox, for ``ps``, ``stats`` and ``rm``."""

    info: SandboxInfo
    has_kernel: bool
    """A kernel runs in it, or will in a moment (``starting``)."""
    kernel_pid: int | None
    elsewhere: bool = False
    """Another machine made it, under the same label or in a shared folder."""
    place: str = ""
    """Which machine, if that is known."""
    unsaved: Unsaved | None = None
    """Files of a workspace that could not be saved, and exist only in this sandbox."""
    starting: bool = False
    spare: bool = False
    """It was made ahead, and waits for a kernel."""
    notebook: str = ""
    usage: Usage | None = None

    @property
    def running(self) -> bool:
        return self.info.status not in ("stopped", "gone")


@contextlib.asynccontextmanager
async def sandbox(
    name: str, backend: str | None
) -> AsyncIterator[tuple[SandboxClient, SandboxHandle]]:
    """The sandbox of that name, of the notebook with that path, or the only one whose name begins
    with the text. SandboxNotFound if no backend has it, SpecError if several do."""
    name = _meant(name, backend)
    # Backends with a record of that name are on this disk; others need a network to be asked.
    recorded = [b for b in backend_names() if name in record_names(b)]
    candidates = [backend] if backend else recorded or backend_names()
    found: list[tuple[SandboxClient, SandboxHandle]] = []
    problems: dict[str, SandboxError] = {}
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
                problems[candidate] = error
        if not found:
            where = f" in the backend {backend!r}" if backend else ""
            asked = "".join(
                f" The backend {candidate!r} could not be asked: {problem}"
                for candidate, problem in problems.items()
                # A backend that was never set up here has no sandboxes.
                if not isinstance(problem, SandboxUnavailable) or record_names(candidate)
            )
            close = closest(name, [n for b in candidates for n in record_names(b)])
            hint = f" Did you mean {close!r}?" if close else ""
            raise SandboxNotFound(
                f"There is no sandbox {name!r}{where}.{hint} `sandbox-kernel ps --all` lists them."
                f"{asked}"
            )
        if len(found) > 1:
            names = ", ".join(client.backend for client, _ in found)
            raise SpecError(f"Several backends ({names}) have a sandbox {name!r}. Add --backend.")
        yield found[0]


def _meant(text: str, backend: str | None) -> str:
    """The full name of a sandbox, as far as the records on this disk tell."""
    backends = [backend] if backend else backend_names()
    names = {name: candidate for candidate in backends for name in record_names(candidate)}
    if text in names:
        return text
    if text.endswith(NOTEBOOK):
        path = os.path.abspath(os.path.expanduser(text))
        found = [name for name, where in names.items() if _notebook(where, name) == path]
        if not found:
            raise SandboxNotFound(
                f"No sandbox has a kernel of the notebook {path}. `sandbox-kernel ps` shows the "
                f"notebooks that have one."
            )
    else:
        found = [name for name in names if name.startswith(text)]
    if len(found) > 1:
        raise SpecError(f"{text!r} may mean {', '.join(sorted(found))}. Give more of the name.")
    return found[0] if found else text


def _notebook(backend: str, name: str) -> str:
    try:
        return str(Records().load(backend, name).kernel.get("notebook", ""))
    except SandboxError:
        return ""  # unreadable, or just removed


async def survey(note: Note) -> list[FoundSandbox]:
    """All sandboxes of all backends that can be used, oldest first. Problems go to ``note``."""
    found: list[FoundSandbox] = []
    for backend in backend_names():
        try:
            client = load_backend(backend)
        except SandboxError as error:
            # A missing SDK matters only if sandboxes were made with it.
            if record_names(backend):
                note(str(error))
            continue
        try:
            found += await _survey_one(client, note)
        finally:
            await client.close()
    return sorted(found, key=lambda sandbox: sandbox.info.created)


async def _survey_one(client: SandboxClient, note: Note) -> list[FoundSandbox]:
    try:
        names = await _in_time(client.list(), client.backend)
    except (SandboxError, OSError) as error:
        note(f"The backend {client.backend!r}: {error}")
        names = record_names(client.backend)

    async def look(name: str) -> FoundSandbox | None:
        try:
            return await _look(client, name)
        except SandboxNotFound:
            pass  # just removed
        except Exception as error:  # noqa: BLE001  (it never hides the others)
            note(f"The sandbox {name!r} of the backend {client.backend!r}: {error}")
        return None

    return [found for found in await asyncio.gather(*map(look, names)) if found is not None]


async def _look(client: SandboxClient, name: str) -> FoundSandbox:
    async def look() -> tuple[SandboxInfo, Usage | None]:
        handle = await client.get(name)
        return await handle.info(), await handle.usage()

    known, usage = await _in_time(look(), client.backend)
    try:
        record = Records().load(client.backend, known.name)
    except SandboxNotFound:
        return FoundSandbox(known, False, None, elsewhere=True)
    if "place" in known.detail:
        return FoundSandbox(known, False, None, elsewhere=True, place=str(known.detail["place"]))
    facts, unsaved = record.kernel, unsaved_in(record)
    pid = facts.get("pid")
    spare = is_spare(record)
    has_kernel = bool(facts.get("running", facts)) and not (unsaved and unsaved.kept) and not spare
    return FoundSandbox(
        known,
        has_kernel,
        pid if isinstance(pid, int) else None,
        starting=bool(facts) and "running" not in facts,
        spare=spare,
        notebook=str(facts.get("notebook", "")),
        usage=usage,
        unsaved=unsaved,
    )


async def _in_time(asked: Awaitable[T], backend: str) -> T:
    problem = f"The backend {backend!r} did not answer within {ANSWER_TIMEOUT:g} s."
    async with within(ANSWER_TIMEOUT, problem):
        return await asked


def record_names(backend: str) -> list[str]:
    """Names of the sandboxes that have a record on this disk, readable or not."""
    return sorted(path.stem for path in (data_dir() / "records" / backend).glob("[!.]*.json"))
