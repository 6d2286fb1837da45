"""The base of backends that keep records: a record names a sandbox before it exists, and is deleted
after the sandbox.

So a creation that fails or is cut short leaves nothing that cannot be found: the maker undoes it,
or, if that process died, the next ``create`` sweeps it away. A backend subclasses RecordingClient
and implements ``create``, ``handle``, ``destroy`` and ``diagnose``; its handles subclass
RecordedHandle, its snapshots SnapshotKeeper.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from sandbox_kernel.audit.trail import Trail, forget_unused, without_values
from sandbox_kernel.errors import (
    SandboxError,
    SandboxExists,
    SandboxNotFound,
    SandboxTimeout,
    SpecRefused,
)
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import creation_marker
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle, SandboxInfo, SnapshotInfo
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.sandboxes.unattended import is_spare
from sandbox_kernel.spec import SandboxSpec, check_name
from sandbox_kernel.untrusted_text import printable

_log = logging.getLogger(__name__)

H = TypeVar("H", bound=SandboxHandle)
T = TypeVar("T")
_POLL = 0.05


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that blocks, in a thread. A cancellation waits until it has returned."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def trail_of(record: Record) -> Trail:
    """The audit of a recorded sandbox, beside the records."""
    data = Path(record.folder).parent.parent if record.folder else None
    keeps, command = record.spec.get("audit", "all"), record.spec.get("audit_command")
    return Trail(record.backend, record.name, keeps=keeps, command=command, data=data)


class RecordKeeper(ABC):
    """Makes, removes and sweeps what the records in one folder name: sandboxes, or snapshots."""

    folder: str
    """Name of the records' folder, which is the backend's name in a Record."""
    kind: ClassVar[str] = "Sandbox"
    hosted: ClassVar[bool] = False
    """Whether every host can reach them; if not, only the host that made one may remove it."""
    sdk_errors: ClassVar[tuple[type[Exception], ...]] = ()
    """What ``destroy`` and ``is_unwanted`` may raise in addition to SandboxError and OSError."""

    @property
    @abstractmethod
    def records(self) -> Records: ...

    @abstractmethod
    async def destroy(self, record: Record) -> None:
        """Delete what the record names. No error if it does not exist."""

    def made(self, record: Record) -> None:  # noqa: B027  (optional hook)
        """Called after one was made."""

    def removed(self, record: Record, why: str = "") -> None:  # noqa: B027  (optional hook)
        """Called after one was removed that had been whole. Blocks."""

    async def is_unwanted(self, record: Record) -> bool:
        """Whether ``sweep`` deletes one that is whole, e.g. because its lease ran out."""
        return False

    async def explained(self, error: BaseException, record: Record) -> BaseException:
        """The error to raise for a creation that failed. Called before it is undone."""
        if isinstance(error, TimeoutError) and not isinstance(error, SandboxTimeout):
            timeout = record.sandbox_spec().start_timeout
            return SandboxTimeout(
                f"Sandbox {record.name!r} did not start within {timeout:g} s. Give a longer "
                f"start_timeout."
            )
        return error

    async def undo(self, record: Record) -> None:
        """Delete what a failed creation made. If that fails, the next sweep tries again."""
        try:
            await self.discard(record)
        except (OSError, SandboxError) as error:
            _log.warning("%s %s: %s", self.kind, record.name, error)

    async def make(
        self, record: Record, work: Callable[[], Awaitable[None]], timeout: float | None
    ) -> None:
        """Reserve the record's name, do the work within the timeout, and save the record as
        whole; or leave nothing. SandboxExists if the name is taken."""
        creation_marker.begin(record)
        try:
            await in_thread(self.records.reserve, record)
        except asyncio.CancelledError:
            if record.folder:  # it was reserved before the cancellation
                await asyncio.shield(self.undo(record))
            raise
        try:
            async with asyncio.timeout(timeout):
                await work()
            if creation_marker.unfinished(record):  # else the work has saved it as whole
                creation_marker.finish(record)
                await self.save(record)
        except BaseException as error:
            failure = await asyncio.shield(self._failed(record, error))
            if failure is error:
                raise
            raise failure from error
        self.made(record)

    async def _failed(self, record: Record, error: BaseException) -> BaseException:
        try:
            return await self.explained(error, record)
        finally:
            await self.undo(record)

    async def save(self, record: Record) -> None:
        await in_thread(self.records.save, record)

    async def remove(self, name: str) -> None:
        """Delete one and its record. Waits while another process makes it, which would not notice
        the removal. Removing twice is no error."""
        record = await self._settled(name)
        if record is not None:
            await asyncio.shield(self.discard(record))
            await in_thread(self.removed, record)

    async def _settled(self, name: str) -> Record | None:
        record = self._found(name)
        if record is None or not creation_marker.under_way(record):
            return record
        async for _ in attempts(record.sandbox_spec().start_timeout, most=_POLL):
            record = self._found(name)
            if record is None or not creation_marker.under_way(record):
                break
        return record

    def _found(self, name: str) -> Record | None:
        try:
            record = self.records.load(self.folder, name)
        except SandboxNotFound:
            return None
        if not self.hosted:
            creation_marker.check_here(record)
        return record

    async def discard(self, record: Record) -> None:
        """Delete what a record names, and the record."""
        try:
            await self.destroy(record)
        except self.sdk_errors as error:
            raise SandboxError(
                f"{self.kind} {record.name!r} could not be removed: {error}. Try again later."
            ) from error
        self.records.delete(self.folder, record.name)

    async def sweep(self) -> None:
        """Delete what nobody wants: whatever was left half-made by a process that died, and
        ``is_unwanted``. Called by ``create``; never raises for a single one."""
        expected: tuple[type[Exception], ...] = (OSError, SandboxError, *self.sdk_errors)
        for record in self.records.list(self.folder):
            try:
                if await self._is_swept(record):
                    await self.discard(record)
                    await in_thread(self.removed, record, "nobody wanted it any more")
            except expected as error:
                _log.warning("%s %s could not be swept away: %s", self.kind, record.name, error)

    async def _is_swept(self, record: Record) -> bool:
        if record.where == "elsewhere" and not self.hosted:
            return False
        if creation_marker.unfinished(record):
            return not creation_marker.under_way(record)
        return await self.is_unwanted(record)


class RecordingClient(RecordKeeper, SandboxClient, Generic[H]):
    """A backend whose sandboxes are known by their records."""

    snapshot_keeper: SnapshotKeeper | None = None

    def __init__(self) -> None:
        self._records = Records()
        self.folder = self.backend

    @property
    def records(self) -> Records:
        return self._records

    async def make(
        self, record: Record, work: Callable[[], Awaitable[None]], timeout: float | None
    ) -> None:
        """Note in the record, too, which way what leaves the sandbox takes."""
        way = self.capabilities.egress_way(record.sandbox_spec().egress)
        record.data["egress"] = way.value
        await super().make(record, work, timeout)

    def made(self, record: Record) -> None:
        trail_of(record).note("created", id=record.id, spec=without_values(record.spec))

    def removed(self, record: Record, why: str = "") -> None:
        trail = trail_of(record)
        if is_spare(record):
            forget_unused(trail.path)
        else:
            trail.note("removed", id=record.id, why=why)
        from sandbox_kernel.audit.upkeep import look_after  # lazy: start-up time

        try:
            look_after(trail.path.parent)
        except OSError as error:
            _log.debug("Old audits could not be deleted: %s", error)

    @abstractmethod
    def handle(self, record: Record) -> H:
        """A handle on the sandbox that a record names."""

    async def get(self, name: str) -> H:
        return self.handle(self.records.load(self.backend, name))

    async def list(self) -> list[str]:
        return [record.name for record in self.records.list(self.backend)]

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        return self.snapshot_keeper.list() if self.snapshot_keeper else []

    async def remove_snapshot(self, name: str) -> None:
        if self.snapshot_keeper is None:
            raise self._no_snapshots()
        await self.snapshot_keeper.remove(name)


class SnapshotKeeper(RecordKeeper):
    """A backend's snapshots. With ``memory`` their records have the token of the agent in them."""

    kind = "Snapshot"
    timeout: ClassVar[float | None] = None
    memory: ClassVar[bool] = True

    async def explained(self, error: BaseException, record: Record) -> BaseException:
        if isinstance(error, self.sdk_errors):
            sandbox, why = record.data["sandbox"], printable(str(error))
            return SandboxError(f"No snapshot of sandbox {sandbox!r} could be made: {why}")
        return error

    def __init__(self, backend: str, folder: str | None = None) -> None:
        self.backend = backend
        self.folder = folder or backend

    @property
    def records(self) -> Records:
        return Records(private_dir(data_dir() / "snapshots"))

    async def take(
        self, name: str, source: Record, work: Callable[[Record], Awaitable[None]]
    ) -> SnapshotInfo:
        """Make a snapshot of the source's sandbox; ``work`` gets the snapshot's record."""
        check_name(name, "A snapshot name")
        await self.sweep()
        record = Record(self.folder, name, secrets.token_hex(6), source.spec)
        record.kernel = dict(source.kernel) if self.memory else {}
        record.data["sandbox"] = source.name
        try:
            await self.make(record, lambda: work(record), self.timeout)
        except SandboxExists:
            raise SandboxExists(
                f"A snapshot named {name!r} exists already in the backend {self.backend!r}."
            ) from None
        trail_of(source).note("snapshot", snapshot=name)
        return self._info(record)

    def load(self, name: str) -> Record:
        """The record of a whole snapshot. SandboxNotFound."""
        try:
            record = self.records.load(self.folder, name)
        except SandboxNotFound:
            record = None
        if record is None or creation_marker.unfinished(record):
            raise SandboxNotFound(f"No snapshot named {name!r} in the backend {self.backend!r}.")
        return record

    def refuse_changes(self, snapshot: Record, spec: SandboxSpec, *fields: str) -> None:
        """SpecRefused if a spec asks for other values than a restored sandbox keeps."""
        taken = snapshot.sandbox_spec()
        for field in fields:
            if getattr(spec, field) not in (None, getattr(taken, field)):
                raise SpecRefused(
                    f"Sandbox {spec.name!r} was not created: the snapshot {snapshot.name!r} has "
                    f"{field}={getattr(taken, field)!r}, which a restored sandbox keeps. Leave "
                    f"{field} out."
                )

    def list(self) -> list[SnapshotInfo]:
        """Whole snapshots, oldest first."""
        found = self.records.list(self.folder)
        return [self._info(record) for record in found if not creation_marker.unfinished(record)]

    def _info(self, record: Record) -> SnapshotInfo:
        sandbox = str(record.data.get("sandbox", ""))
        return SnapshotInfo(record.name, self.backend, sandbox, record.created, self.memory)


class RecordedHandle(SandboxHandle):
    """A handle on a sandbox that a record names."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.name = record.name
        self.id = record.id
        self.spec = record.sandbox_spec()

    def _stored(self) -> Record | None:
        """The sandbox's record as it is on disk now; None if the sandbox was removed."""
        return Records().current(self._record)

    def _noted(self, fact: str) -> str:
        """What the record on disk says about ``ended``, ``paused`` or the like."""
        record = self._stored()
        return str(record.data.get(fact) or "") if record else ""

    def _note(self, **facts: Any) -> None:
        """Add facts to the record on disk."""
        Records().note(self._record, **facts)

    def _info(self, status: str, **more: Any) -> SandboxInfo:
        """A SandboxInfo with the facts that the record has."""
        limits = {str(k): str(v) for k, v in self._record.data.get("limits", {}).items()}
        return SandboxInfo(
            name=self.name,
            id=self.id,
            backend=self.backend,
            status=status,
            created=self._record.created,
            egress=str(self._record.data.get("egress") or ""),
            **{"limits": limits, **more},
        )
