"""Superserve as a sandbox backend: making, finding, copying and removing hosted sandboxes.

A request is never repeated when its outcome is unknown. Each sandbox carries the tag of the request
that made it; if the answer is lost, the client looks the sandbox up by that tag. A request whose
sandbox it cannot find is noted as abandoned, and a later sweep deletes what shows up.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import superserve as sdk

from sandbox_kernel.errors import SandboxError, SandboxNotFound, SandboxUnavailable
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import creation_marker
from sandbox_kernel.sandboxes.capabilities import Capabilities
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.hosted import HostedClient, label
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.sandboxes.recording_client import SnapshotKeeper
from sandbox_kernel.sandboxes.results import Diagnosis
from sandbox_kernel.sandboxes.superserve import api, network, request
from sandbox_kernel.sandboxes.superserve.handle import SuperserveHandle
from sandbox_kernel.spec import SandboxSpec, check_name

_log = logging.getLogger(__name__)

_LOOK_UP = 10.0
"""Seconds for a sandbox whose creation was not answered to be seen."""
_LOOK_UP_PAUSE = 0.5
_BACKOFF = (0.5, 1.0, 2.0)
_ABANDONED_FOR = 24 * 3600.0


class Snapshots(SnapshotKeeper):
    """Snapshots at the service, with memory; a record has the id that the service gave."""

    hosted = True

    async def destroy(self, record: Record) -> None:
        if not creation_marker.unfinished(record):  # else there is no id at the service
            await api.delete_snapshot(record.id, record.data.get("base_url"))


class SuperserveClient(HostedClient[SuperserveHandle]):
    """The sandboxes of a Superserve account that carry our label. Needs its API key."""

    backend = request.BACKEND
    capabilities: ClassVar[Capabilities] = request.CAPABILITIES

    def __init__(self) -> None:
        super().__init__()
        self.snapshot_keeper: Snapshots = Snapshots(self.backend)
        self._remotes: dict[str, Any] = {}

    def handle(self, record: Record) -> SuperserveHandle:
        if record.id not in self._remotes:
            self._remotes[record.id] = api.remote(record.id, record.data["base_url"])
        return SuperserveHandle(record, self, self._remotes[record.id])

    # --- making

    def check(self, spec: SandboxSpec) -> None:
        request.arguments(spec, "")

    async def create(self, spec: SandboxSpec) -> SuperserveHandle:
        return await self.copy(spec, None, "")

    async def copy(
        self, spec: SandboxSpec, source: Record | None, snapshot: str
    ) -> SuperserveHandle:
        """A sandbox, from a snapshot if it is named; its agent then has ``source``'s token."""
        tag = secrets.token_hex(12)
        arguments = request.arguments(spec, tag)
        if snapshot:
            arguments = {**arguments, "from_snapshot": snapshot}
            arguments.pop("from_template", None)
        base_url = api.endpoint()
        await self.sweep()
        record = Record(self.backend, spec.name, "", spec.to_dict())
        record.data = {"request": tag, "base_url": base_url}
        if source is not None and source.kernel:
            record.kernel = {"token": source.kernel["token"]}
        work = functools.partial(self._start, record, arguments, set_up=not snapshot)
        await self.make(record, work, spec.start_timeout)
        return self.handle(record)

    async def _start(self, record: Record, arguments: dict[str, Any], *, set_up: bool) -> None:
        remote = await self._ask_for_one(record, arguments)
        self._remotes[remote.id] = remote
        record.id = remote.id
        record.data["active_since"] = time.time()
        await self.save(record)
        if arguments["network"] == network.OFF:
            await self._verify_network(record, remote)
        if set_up:
            handle = self.handle(record)
            command = Command(["mkdir", "-p", handle.workdir], cwd="/")
            result = await handle.run_command(command)
            if not result.ok:
                raise SandboxError(
                    f"Sandbox {record.name!r} could not be set up: {result.output.strip()[:500]}"
                )
        await self._remove_doubles(record)

    async def _verify_network(self, record: Record, remote: Any) -> None:
        """The network that must be off is off, as far as the service tells."""
        with api.translating(f"Sandbox {record.name!r} was not created"):
            told = (await remote.get_info()).network
        if not network.is_off(told):
            raise SandboxError(
                f"Sandbox {record.name!r} was not created: its network could not be switched off. "
                f"Superserve says that its rules are {told.model_dump() if told else None}."
            )

    async def _ask_for_one(self, record: Record, arguments: dict[str, Any]) -> Any:
        """The SDK's object of the one sandbox that the request makes."""
        what = f"Sandbox {record.name!r} was not created"
        base_url = record.data["base_url"]
        for pause in (*_BACKOFF, None):
            try:
                return await sdk.AsyncSandbox.create(**arguments, base_url=base_url)
            except api.ERRORS as error:
                if pause is not None and getattr(error, "code", "") == "rate_limited":
                    # Refused before anything was done, so asking again is safe.
                    await asyncio.sleep(pause)
                    continue
                found = await self._look_up(record) if api.is_ambiguous(error) else None
                if found is None:
                    raise api.translated(error, what) from error
                _log.info("sandbox %s was made, though no answer came", record.name)
                return api.remote(found, base_url)
        raise AssertionError("unreachable")

    async def _look_up(self, record: Record) -> str | None:
        """The id of the sandbox that a request has made, whose answer was lost."""
        async for _ in attempts(_LOOK_UP, first=_LOOK_UP_PAUSE, most=_LOOK_UP_PAUSE):
            try:
                found = await api.find(_tag(record), record.data["base_url"])
                if found:
                    return str(found[0].id)
            except api.ERRORS as error:
                _log.debug("looking for sandbox %s: %s", record.name, error)
        return None

    async def _remove_doubles(self, record: Record) -> None:
        """Delete further sandboxes of the same request: it may arrive twice."""
        try:
            if await self._delete_all_of(record, but=record.id):
                _log.warning("Superserve made sandbox %s twice; one is deleted", record.name)
        except SandboxError as error:
            _log.warning("whether %s was made twice is not known: %s", record.name, error)

    async def undo(self, record: Record) -> None:
        """Delete what was made, now or when the service shows it."""
        try:
            await self._delete_all_of(record)
        except SandboxError as error:
            _log.warning("Sandbox %s could not be deleted yet: %s", record.name, error)
            self._abandon(record)
        else:
            if not record.id:
                self._abandon(record)  # the service may still make it
        self.records.delete(self.backend, record.name)

    async def _delete_all_of(self, record: Record, *, but: str = "") -> bool:
        """Delete what the request of a record has made; whether there was any."""
        base_url = record.data["base_url"]
        with api.translating(f"Sandbox {record.name!r} was not removed"):
            found = await api.find(_tag(record), base_url)
        ids = {record.id, *(info.id for info in found)} - {"", but}
        for sandbox_id in ids:
            await self.delete_remote(sandbox_id, base_url)
        return bool(ids)

    async def delete_remote(self, sandbox_id: str, base_url: str | None = None) -> None:
        """Delete a sandbox at the service. Idempotent."""
        remote = self._remotes.pop(sandbox_id, None)
        with api.translating(f"Sandbox {sandbox_id} could not be deleted"):
            async with asyncio.timeout(api.DELETE_TIMEOUT):
                if remote is not None:
                    await remote.kill()
                else:
                    url = api.endpoint(base_url)
                    await sdk.AsyncSandbox.kill_by_id(sandbox_id, base_url=url)

    # --- finding

    async def look_up(self, name: str) -> Record | None:
        if not api.has_key():
            return None
        try:
            with api.translating(f"Sandbox {name!r} could not be looked up"):
                found = await api.find({request.LABEL: label(), request.NAME: name}, None)
                if not found and _is_id(name):
                    remote = api.remote(name, None)
                    found = [await remote.get_info()]
                    await api.forget(remote)
        except SandboxNotFound:
            return None
        if len(found) > 1:
            ids = ", ".join(info.id for info in found)
            raise SandboxError(
                f"Other machines have made {len(found)} sandboxes named {name!r}; say which: {ids}."
            )
        return self._elsewhere(found[0]) if found else None

    def _elsewhere(self, info: sdk.SandboxInfo) -> Record:
        try:
            name = check_name(info.metadata.get(request.NAME, ""))
        except SandboxError:
            name = info.id
        created = info.created_at.timestamp()
        return self.record_elsewhere(name, info.id, created, base_url=api.endpoint())

    async def list(self) -> list[str]:
        """Also those of other machines; by id where the name is taken here."""
        records = self.records.list(self.backend)
        names = [record.name for record in records]
        if not api.has_key():
            return names
        with api.translating("The sandboxes could not be listed"):
            found = await api.find({request.LABEL: label()}, None)
        known = {record.id for record in records}
        requests = {record.data.get("request") for record in records}
        for info in found:
            if info.id not in known and info.metadata.get(request.REQUEST) not in requests:
                name = self._elsewhere(info).name
                names.append(info.id if name in names else name)
        return names

    # --- removing

    async def destroy(self, record: Record) -> None:
        if record.id and not creation_marker.unfinished(record):
            await self.delete_remote(record.id, record.data["base_url"])
        else:
            await self._delete_all_of(record)

    async def sweep(self) -> None:
        """Delete, too, what the service made of requests that seemed to have failed."""
        await super().sweep()
        abandoned = _abandoned()
        for record in abandoned.list(self.backend):
            try:
                found = await self._delete_all_of(record)
            except SandboxError as error:
                _log.warning("Sandbox %s could not be swept away: %s", record.name, error)
                continue
            if found:
                _log.info("deleted a sandbox of the abandoned request %s", record.name)
            if found or time.time() - record.created > _ABANDONED_FOR:
                abandoned.delete(self.backend, record.name)

    def _abandon(self, record: Record) -> None:
        data = dict(record.data)
        _abandoned().save(Record(self.backend, data["request"], "", {}, data=data))

    # --- snapshots

    async def restore(self, snapshot: str, spec: SandboxSpec) -> SuperserveHandle:
        """As the surface says: the sandbox goes on where the snapshot was taken."""
        record = self.snapshot_keeper.load(snapshot)
        self.snapshot_keeper.refuse_changes(record, spec, "image")
        taken = record.sandbox_spec()
        spec = replace(spec, image=taken.image, env={**taken.env, **spec.env})
        return await self.copy(spec, record, record.id)

    # --- diagnosis

    async def diagnose(self) -> Sequence[Diagnosis]:
        """Asks the service for our sandboxes. None is made: that would cost money."""
        found = [Diagnosis(True, f"superserve {importlib.metadata.version('superserve')}")]
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


def _abandoned() -> Records:
    """Requests whose outcome is not known: what they may have made is deleted when it shows up."""
    return Records(private_dir(data_dir() / "abandoned"))


def _is_id(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False
