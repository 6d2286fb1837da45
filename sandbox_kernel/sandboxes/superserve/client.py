"""Superserve as a sandbox backend: making, finding, copying and removing hosted sandboxes.

What a request has done is never guessed. Each sandbox carries the tag of the one request that made
it; if the answer to a request is lost, the sandbox is looked up by that tag and taken, and never
asked for a second time. What could not be looked up is noted, and cleared away later.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import superserve as sdk

from sandbox_kernel.errors import (
    SandboxError,
    SandboxExists,
    SandboxNotFound,
    SandboxTimeout,
    SandboxUnavailable,
    SpecRefused,
)
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import creation
from sandbox_kernel.sandboxes.base import Capabilities, Diagnosis, SandboxClient, SnapshotInfo
from sandbox_kernel.sandboxes.hosted import label
from sandbox_kernel.sandboxes.superserve import api, request
from sandbox_kernel.sandboxes.superserve.handle import SuperserveHandle
from sandbox_kernel.spec import SandboxSpec, check_name

_LOOK_UP = 10.0
"""Seconds for a sandbox whose creation was not answered to be seen."""
_LOOK_UP_PAUSE = 0.5
_BACKOFF = (0.5, 1.0, 2.0)
_ABANDONED_FOR = 24 * 3600.0
_DELETE_TIMEOUT = 120.0


class SuperserveClient(SandboxClient):
    """The sandboxes of a Superserve account that carry our label. Needs its API key."""

    backend = request.BACKEND
    capabilities: ClassVar[Capabilities] = request.CAPABILITIES

    def __init__(self) -> None:
        self.log = logging.getLogger(__name__)
        self._records = Records()
        self._remotes: dict[str, Any] = {}

    # --- making

    def check(self, spec: SandboxSpec) -> None:
        request.arguments(spec, "")

    async def create(self, spec: SandboxSpec) -> SuperserveHandle:
        return await self._make(spec, None)

    async def _make(
        self, spec: SandboxSpec, source: Record | None, snapshot: str = ""
    ) -> SuperserveHandle:
        """Reserve the name, make the sandbox, see that it works; or leave nothing."""
        tag = secrets.token_hex(12)
        arguments = request.arguments(spec, tag)
        if snapshot:
            arguments = {**arguments, "from_snapshot": snapshot}
            arguments.pop("from_template", None)
        base_url = api.endpoint()
        await self.sweep()
        record = Record(self.backend, spec.name, "", spec.to_dict())
        record.data = {"request": tag, "base_url": base_url}
        creation.begin(record)
        if source is not None and source.kernel:
            record.kernel = {"token": source.kernel["token"]}
        self._records.reserve(record)
        try:
            making = self._start(record, arguments, set_up=not snapshot)
            return await asyncio.wait_for(making, spec.start_timeout)
        except BaseException as error:
            await asyncio.shield(self._undo(record))
            if isinstance(error, asyncio.TimeoutError) and not isinstance(error, SandboxTimeout):
                raise SandboxTimeout(
                    f"Sandbox {spec.name!r} did not start within {spec.start_timeout:g} s. Give a "
                    f"longer start_timeout."
                ) from error
            raise

    async def _start(
        self, record: Record, arguments: dict[str, Any], *, set_up: bool
    ) -> SuperserveHandle:
        remote = await self._ask_for_one(record, arguments)
        self._remotes[remote.id] = remote
        record.id = remote.id
        record.data["active_since"] = time.time()
        self._records.save(record)
        handle = SuperserveHandle(record, self, remote)
        if set_up:
            result = await handle.exec("mkdir", ["-p", handle.workdir], cwd="/")
            if not result.ok:
                raise SandboxError(
                    f"Sandbox {record.name!r} could not be set up: {result.output.strip()[:500]}"
                )
        await self._remove_doubles(record)
        creation.finish(record)
        self._records.save(record)
        return handle

    async def _ask_for_one(self, record: Record, arguments: dict[str, Any]) -> Any:
        """The SDK's object of the one sandbox that the request makes."""
        what = f"Sandbox {record.name!r} was not created"
        base_url = record.data["base_url"]
        for pause in (*_BACKOFF, None):
            try:
                return await sdk.AsyncSandbox.create(**arguments, base_url=base_url)
            except sdk.RateLimitError as error:
                # Refused before anything was done, so asking again is safe.
                if pause is None or error.code != "rate_limited":
                    raise api.translated(error, what) from error
                await asyncio.sleep(pause)
            except api.ERRORS as error:
                if not api.is_ambiguous(error):
                    raise api.translated(error, what) from error
                found = await self._look_up(record)
                if found is None:
                    raise api.translated(error, what) from error
                self.log.info("sandbox %s was made, though no answer came", record.name)
                return api.remote(found, base_url)
        raise AssertionError("unreachable")

    async def _look_up(self, record: Record) -> str | None:
        """The id of the sandbox that a request has made, whose answer was lost."""
        deadline = time.monotonic() + _LOOK_UP
        while True:
            try:
                found = await api.find(_tag(record), record.data["base_url"])
                if found:
                    return str(found[0].id)
            except api.ERRORS as error:
                self.log.debug("looking for sandbox %s: %s", record.name, error)
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(_LOOK_UP_PAUSE)

    async def _remove_doubles(self, record: Record) -> None:
        """A request may arrive twice, by no fault of anybody's."""
        try:
            for info in await api.find(_tag(record), record.data["base_url"]):
                if info.id != record.id:
                    self.log.warning("Superserve made sandbox %s twice; one is deleted", info.name)
                    await self.delete_remote(None, info.id, record.data["base_url"])
        except (*api.ERRORS, SandboxError) as error:
            self.log.warning("whether %s was made twice is not known: %s", record.name, error)

    async def _undo(self, record: Record) -> None:
        """Delete what was made, now or as soon as it can be."""
        try:
            await self._delete_all_of(record)
        except (*api.ERRORS, SandboxError) as error:
            self.log.warning("Sandbox %s could not be cleared away: %s", record.name, error)
            self._abandon(record)
        else:
            if not record.id:
                self._abandon(record)  # it may still come into being
        self._records.delete(self.backend, record.name)

    async def _delete_all_of(self, record: Record) -> None:
        base_url = record.data["base_url"]
        ids = {record.id} - {""}
        ids |= {info.id for info in await api.find(_tag(record), base_url)}
        for sandbox_id in ids:
            await self.delete_remote(None, sandbox_id, base_url)

    async def delete_remote(self, remote: Any, sandbox_id: str, base_url: str = "") -> None:
        """Delete a sandbox at the service. Idempotent."""
        remote = self._remotes.pop(sandbox_id, None) or remote
        try:
            if remote is not None:
                deleting = remote.kill()
            else:
                url = api.endpoint(base_url or None)
                deleting = sdk.AsyncSandbox.kill_by_id(sandbox_id, base_url=url)
            await asyncio.wait_for(deleting, _DELETE_TIMEOUT)
        except (*api.ERRORS, asyncio.TimeoutError) as error:
            raise api.translated(error, f"Sandbox {sandbox_id} could not be deleted") from error

    # --- finding

    async def get(self, name: str) -> SuperserveHandle:
        """By its name, or by the id that Superserve gave it. Also one that another machine has
        made under the same label."""
        check_name(name)
        record = self._recorded(name)
        if record is None and api.has_key():
            record = await self._foreign(name)
        if record is None:
            return self._handle(self._records.load(self.backend, name))  # SandboxNotFound
        return self._handle(record)

    def _handle(self, record: Record) -> SuperserveHandle:
        remote = self._remotes.get(record.id)
        if remote is None:
            remote = api.remote(record.id, record.data["base_url"])
            self._remotes[record.id] = remote
        return SuperserveHandle(record, self, remote)

    def _recorded(self, name: str) -> Record | None:
        try:
            return self._records.load(self.backend, name)
        except SandboxNotFound:
            known = self._records.list(self.backend)
            return next((record for record in known if record.id == name), None)

    async def _foreign(self, name: str) -> Record | None:
        try:
            found = await api.find({request.LABEL: label(), request.NAME: name}, None)
            if not found and _is_id(name):
                remote = api.remote(name, None)
                found = [await remote.get_info()]
                await api.forget(remote)
        except sdk.NotFoundError:
            return None
        except api.ERRORS as error:
            raise api.translated(error, f"Sandbox {name!r} could not be looked up") from error
        if len(found) > 1:
            ids = ", ".join(info.id for info in found)
            raise SandboxError(
                f"Other machines have made {len(found)} sandboxes named {name!r}; say which: {ids}."
            )
        return _foreign_record(found[0], api.endpoint()) if found else None

    async def list(self) -> list[str]:
        """Also those of other machines; by id where the name is taken here."""
        records = self._records.list(self.backend)
        names = [record.name for record in records]
        if not api.has_key():
            return names
        try:
            found = await api.find({request.LABEL: label()}, None)
        except api.ERRORS as error:
            raise api.translated(error, "The sandboxes could not be listed") from error
        known = {record.id for record in records}
        requests = {record.data.get("request") for record in records}
        for info in found:
            if info.id not in known and info.metadata.get(request.REQUEST) not in requests:
                name = _foreign_record(info, "").name
                names.append(info.id if name in names else name)
        return names

    # --- removing

    async def remove(self, name: str) -> None:
        check_name(name)
        record = self._recorded(name)
        if record is None:
            record = await self._foreign(name) if api.has_key() else None
            if record is not None:
                await self.delete_remote(None, record.id)
            return
        record = await creation.settled(self._records, self.backend, record.name, hosted=True)
        if record is None:
            return
        # A removal that was begun is carried through, also if the caller is cancelled.
        await asyncio.shield(self._destroy(record))

    async def _destroy(self, record: Record) -> None:
        try:
            if record.id:
                await self.delete_remote(None, record.id, record.data["base_url"])
            else:
                await self._delete_all_of(record)
        except (*api.ERRORS, SandboxError) as error:
            if isinstance(error, SandboxError):
                raise
            raise api.translated(error, f"Sandbox {record.name!r} was not removed") from error
        self._records.delete(self.backend, record.name)

    async def sweep(self) -> None:
        """Clear away what nobody wants: sandboxes whose creation was cut short, or was thought to
        have failed. Called by ``create``; never raises for a single one."""
        for record in self._records.list(self.backend):
            if creation.cut_short(record):
                await self._swept(record, self._records)
        notes = _notes()
        for record in notes.list(self.backend):
            if await self._swept(record, notes, keep=True):
                self.log.info("a sandbox of %s, thought not to be there, was deleted", record.name)

    async def _swept(self, record: Record, store: Records, *, keep: bool = False) -> bool:
        try:
            found = await api.find(_tag(record), record.data["base_url"])
            for info in found:
                await self.delete_remote(None, info.id, record.data["base_url"])
        except (*api.ERRORS, SandboxError) as error:
            self.log.warning("Sandbox %s could not be cleared away: %s", record.name, error)
            return False
        if found or not keep or time.time() - record.created > _ABANDONED_FOR:
            store.delete(self.backend, record.name)
        return bool(found)

    def _abandon(self, record: Record) -> None:
        noted = Record(self.backend, record.data["request"], record.id, {})
        noted.data = dict(record.data)
        _notes().save(noted)

    # --- snapshots

    async def keep(self, handle: SuperserveHandle, name: str) -> SnapshotInfo:
        """Make a snapshot of a sandbox with its memory (``SandboxHandle.snapshot``)."""
        check_name(name, "A snapshot name")
        kept = _kept()
        record = Record(self.backend, name, "", handle.spec.to_dict())
        creation.begin(record)
        try:
            kept.reserve(record)
        except SandboxExists:
            raise SandboxExists(
                f"A snapshot named {name!r} exists already in the backend {self.backend!r}."
            ) from None
        try:
            record.id = await handle.take_snapshot(name)
        except BaseException:
            kept.delete(self.backend, name)
            raise
        source = self._recorded(handle.name)
        record.kernel = dict(source.kernel) if source else {}
        record.data = {"sandbox": handle.name, "base_url": api.endpoint()}
        kept.save(record)
        return _snapshot_info(record)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> SuperserveHandle:
        """As the surface says: the sandbox goes on where the snapshot was taken."""
        try:
            record = _kept().load(self.backend, snapshot)
        except SandboxNotFound:
            record = None
        if record is None or creation.unfinished(record):
            raise SandboxNotFound(
                f"No snapshot named {snapshot!r} in the backend {self.backend!r}."
            )
        taken = SandboxSpec.from_mapping(record.spec)
        if spec.image not in (None, taken.image):
            raise SpecRefused(
                f"Sandbox {spec.name!r} was not created: the snapshot {snapshot!r} has "
                f"image={taken.image!r}, and goes on with it. Leave image out."
            )
        spec = replace(spec, image=taken.image, env={**taken.env, **spec.env})
        return await self._make(spec, record, record.id)

    async def fork(self, handle: SuperserveHandle, spec: SandboxSpec) -> SuperserveHandle:
        """For ``SandboxHandle.fork``."""
        snapshot = await handle.take_snapshot(f"fork-{spec.name}")
        try:
            return await self._make(spec, self._recorded(handle.name), snapshot)
        finally:
            await asyncio.shield(self._delete_snapshot(snapshot))

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        return [_snapshot_info(r) for r in _kept().list(self.backend) if not creation.unfinished(r)]

    async def remove_snapshot(self, name: str) -> None:
        try:
            record = _kept().load(self.backend, name)
        except SandboxNotFound:
            return
        await self._delete_snapshot(record.id, record.data.get("base_url"))
        _kept().delete(self.backend, name)

    async def _delete_snapshot(self, snapshot_id: str, base_url: str | None = None) -> None:
        try:
            deleting = sdk.AsyncSnapshot.delete_by_id(snapshot_id, base_url=api.endpoint(base_url))
            await asyncio.wait_for(deleting, _DELETE_TIMEOUT)
        except (*api.ERRORS, asyncio.TimeoutError) as error:
            raise api.translated(error, f"Snapshot {snapshot_id} was not deleted") from error

    # --- diagnosis

    async def diagnose(self) -> Sequence[Diagnosis]:
        """Asks the service for our sandboxes. None is made: that would cost money."""
        found = [Diagnosis(True, f"superserve {api.version()}")]
        if not api.has_key():
            return [*found, Diagnosis(False, f"{api.KEY} is not set", api.NO_KEY)]
        try:
            listed = await api.find({request.LABEL: label()}, None)
        except (*api.ERRORS, SandboxUnavailable) as error:
            said = str(api.translated(error, "it was asked for our sandboxes"))
            where = f"Is the network there, and {api.KEY} right?"
            return [*found, Diagnosis(False, f"{api.endpoint()} cannot be used: {said}", where)]
        what = f"{api.endpoint()} answers; {len(listed)} sandboxes have our label"
        return [*found, Diagnosis(True, what)]

    async def close(self) -> None:
        remotes, self._remotes = self._remotes, {}
        for remote in remotes.values():
            await api.forget(remote)


def _tag(record: Record) -> dict[str, str]:
    # Without the label: that may be another one by now, and the request is unique.
    return {request.REQUEST: record.data["request"]}


def _notes() -> Records:
    """Requests whose outcome is not known: what they may have made is deleted when it is seen."""
    return Records(private_dir(data_dir() / "abandoned"))


def _kept() -> Records:
    """Records of snapshots, with the tokens of the agents in them."""
    return Records(private_dir(data_dir() / "snapshots"))


def _snapshot_info(record: Record) -> SnapshotInfo:
    return SnapshotInfo(
        name=record.name,
        backend=record.backend,
        sandbox=str(record.data.get("sandbox", "")),
        created=record.created,
        memory=True,
    )


def _foreign_record(info: sdk.SandboxInfo, base_url: str) -> Record:
    """What is known about a sandbox that has no record here. It is not stored."""
    name = info.metadata.get(request.NAME, "")
    try:
        spec = SandboxSpec(name=check_name(name))
    except SandboxError:
        spec = SandboxSpec(name=info.id)
    return Record(
        request.BACKEND,
        spec.name,
        info.id,
        spec.to_dict(),
        created=info.created_at.timestamp(),
        data={"base_url": base_url, "foreign": True},
    )


def _is_id(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False
