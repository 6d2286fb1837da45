"""Islo as a sandbox backend: making, finding and removing sandboxes.

Islo's sandboxes have no labels, so ours is in their names: ``sk-LABEL--NAME``. By it other machines
of the account list them; what only this machine knows (token, gateway profile, endpoint) is in the
records.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any, ClassVar

from islo.types import AutoResumePolicy, LifecyclePolicy

from sandbox_kernel.errors import (
    SandboxError,
    SandboxExists,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
    SandboxUnavailable,
    SpecError,
    SpecRefused,
)
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import creation
from sandbox_kernel.sandboxes.base import Capabilities, Diagnosis, SandboxClient
from sandbox_kernel.sandboxes.hosted import label
from sandbox_kernel.sandboxes.islo import gateway
from sandbox_kernel.sandboxes.islo.api import Api, Endpoint, Unsure, api_key
from sandbox_kernel.sandboxes.islo.handle import MARKER, STATES, IsloHandle, whole_seconds
from sandbox_kernel.sandboxes.islo.options import Options
from sandbox_kernel.spec import SandboxSpec, check_name

log = logging.getLogger(__name__)

_LABEL = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_PAGE = 100
_MOST = 10_000
_CREATE_ATTEMPTS = 4
_CREATE_TIMEOUT = 120.0
_IN_GUEST = "A hosted VM is root of its own kernel, so this could not be held; memory and cpus are."
_ELSEWHERE = "The sandbox runs elsewhere and sees nothing of this host; copy files in."


def prefix() -> str:
    """What the names of our sandboxes begin with; ``SANDBOX_KERNEL_LABEL`` sets ours apart."""
    ours = label()
    if not _LABEL.fullmatch(ours):
        raise SpecError(
            f"SANDBOX_KERNEL_LABEL has small letters, digits and single hyphens between them; "
            f"{ours!r} does not fit."
        )
    return f"sk-{ours}--"


class IsloClient(SandboxClient):
    """Sandboxes of one Islo account. Needs ``ISLO_API_KEY``; looked at when it is used."""

    backend = "islo"
    capabilities: ClassVar[Capabilities] = Capabilities(
        image=True,
        memory_mib=True,
        cpus=True,
        disk_mib=True,
        egress=True,
        egress_parts=gateway.ENFORCED,
        options=True,
        hosted=True,
        byte_exact_streams=True,
        reattach=True,
        pause=True,
        restart=True,
        notes={
            "processes": _IN_GUEST,
            "open_files": _IN_GUEST,
            "workspace": _ELSEWHERE,
            "readable": _ELSEWHERE,
            "python": "The sandbox runs the image's own Python; choose an image.",
            "secrets": "Secrets of Islo's environments are not mapped; pass what the code may know "
            "in env.",
            "delete_after_seconds": "Islo's own delete_after seems to count from the creation; if "
            "that is what you want, give options.delete_after.",
            "egress.ports": "Islo's gateway has no rules by port; leave ports out.",
            "egress.host": "Islo's gateway has rules for host names only.",
        },
    )

    def __init__(self) -> None:
        self._records = Records()
        self._apis: dict[Endpoint, Api] = {}

    def api(self, record: Record | None = None) -> Api:
        """The service where the record's sandbox is, or, without one, where the environment says.
        For the handles of this client."""
        kept = record.data.get("endpoint") if record is not None else None
        endpoint = Endpoint(**kept) if kept else Endpoint.from_environment()
        if endpoint not in self._apis:
            self._apis[endpoint] = Api(endpoint)
        return self._apis[endpoint]

    async def close(self) -> None:
        apis, self._apis = list(self._apis.values()), {}
        for api in apis:
            await api.close()

    # --- making

    def check(self, spec: SandboxSpec) -> None:
        super().check(spec)
        _Plan.of(spec)

    async def create(self, spec: SandboxSpec) -> IsloHandle:
        self.check(spec)
        plan = _Plan.of(spec)
        api_key()
        endpoint = Endpoint.from_environment()
        record = Record(self.backend, spec.name, "", spec.to_dict())
        record.data = {
            "sandbox": prefix() + spec.name,
            "endpoint": {"control": endpoint.control, "compute": endpoint.compute},
            "marker": secrets.token_hex(16),
            "limits": plan.limits,
        }
        await self.sweep()
        creation.begin(record)
        self._records.reserve(record)
        try:
            return await self._make(record, spec, plan)
        except BaseException as error:
            await asyncio.shield(self._undo(record))
            if isinstance(error, Unsure):
                raise SandboxTimeout(
                    f"Sandbox {spec.name!r} was not created: {error} Nothing of it was found; try "
                    f"again later."
                ) from error
            if isinstance(error, SandboxNotFound):
                # Islo does not know something that the request names.
                raise SpecError(f"Sandbox {spec.name!r} was not created: {error}") from error
            raise

    async def _make(self, record: Record, spec: SandboxSpec, plan: _Plan) -> IsloHandle:
        api = self.api(record)
        profile = plan.profile
        if isinstance(profile, str):
            identity = await gateway.existing(api, profile)
            record.data["profile"] = {"id": identity, "owned": False}
        else:
            name = f"{record.data['sandbox']}-{record.data['marker'][:8]}"
            # Noted first: who is killed now leaves a name by which it is found.
            record.data["profile"] = {"id": None, "name": name, "owned": True}
            self._records.save(record)
            identity = await gateway.provision(api, profile, name)
            record.data["profile"]["id"] = identity
        self._records.save(record)
        made = await self._create(api, record, {**plan.fields, "gateway_profile": identity})
        record.id = made.id
        self._records.save(record)
        handle = IsloHandle(record, self)
        await handle.reached("running", timeout=spec.start_timeout)
        await handle.set_up()
        creation.finish(record)
        self._records.save(record)
        return handle

    async def _create(self, api: Api, record: Record, fields: dict[str, Any]) -> Any:
        """Ask for the sandbox until it is known whether there is one. Names are unique at Islo,
        so asking again makes no second one; but what has the name must be shown to be ours."""
        remote = record.data["sandbox"]
        env = {**record.spec.get("env", {}), MARKER: record.data["marker"]}
        unsure: Unsure | None = None
        for number in range(_CREATE_ATTEMPTS):
            try:
                return await api.call(
                    api.sandboxes.create_sandbox,
                    name=remote,
                    env=env,
                    doing=f"the sandbox {remote!r} was created",
                    again=False,
                    timeout=_CREATE_TIMEOUT,
                    **fields,
                )
            except Unsure as error:
                unsure = error
                found = await self._ours(api, record)
                if found is not None:
                    return found
                await asyncio.sleep(0.5 * 2**number)
            except SandboxExists:
                found = await self._ours(api, record) if unsure else None
                if found is None:
                    record.data["foreign"] = True
                    raise SandboxExists(
                        f"A sandbox named {record.name!r} exists already in this Islo account, "
                        f"made by another machine. Choose another name, or remove it with "
                        f"`sandbox-kernel rm {record.name}`."
                    ) from None
                return found
        assert unsure is not None
        raise unsure

    async def _ours(self, api: Api, record: Record) -> Any:
        """The sandbox that has the name, if it is the one that this record asked for."""
        try:
            found = await api.call(
                api.sandboxes.get_sandbox, record.data["sandbox"], doing="it was looked up"
            )
        except SandboxNotFound:
            return None
        candidate = Record(**{**vars(record), "id": found.id})
        handle = IsloHandle(candidate, self)
        await handle.reached("running", timeout=record.sandbox_spec().start_timeout)
        return found if await handle.set_up() == record.data["marker"] else None

    async def _undo(self, record: Record) -> None:
        """Clear away what was made. What cannot be is kept in the record, for ``rm``."""
        try:
            await self._destroy(record, by_name=not record.data.get("foreign"))
        except SandboxError as error:
            log.warning("Sandbox %s could not be cleared away: %s", record.name, error)

    # --- finding and removing

    async def get(self, name: str) -> IsloHandle:
        """By name, or by Islo's id; also one that another machine made under the same label."""
        try:
            record = self._load(name)
        except SandboxNotFound:
            record = await self._look_up(name)
        if not record.id:
            raise SandboxNotFound(
                f"Sandbox {name!r} is being made, or was left half-made; remove it with "
                f"`sandbox-kernel rm {name}`."
            )
        return IsloHandle(record, self)

    def _load(self, name: str) -> Record:
        """What is known here of a sandbox with our label. SandboxNotFound."""
        record = self._records.load(self.backend, name)
        if not record.data["sandbox"].startswith(prefix()):
            raise SandboxNotFound(f"Sandbox {name!r} has another SANDBOX_KERNEL_LABEL.")
        return record

    async def _look_up(self, name: str) -> Record:
        unknown = SandboxNotFound(
            f"No sandbox named {name!r} in the backend {self.backend!r}. "
            f"`sandbox-kernel ps` lists what there is."
        )
        check_name(name)
        api = self.api()
        try:
            found = await api.call(
                api.sandboxes.get_sandbox, prefix() + name, doing="it was looked up"
            )
        except SandboxNotFound:
            try:
                found = await api.call(
                    api.sandboxes.get_sandbox_by_id, name, doing="it was looked up by its id"
                )
            except (SandboxNotFound, SpecRefused):
                raise unknown from None
        if not str(found.name).startswith(prefix()) or STATES.get(str(found.status)) == "gone":
            raise unknown
        own_name = check_name(str(found.name).removeprefix(prefix()))
        try:
            return self._load(own_name)
        except SandboxNotFound:
            return _foreign_record(own_name, found, api.endpoint)

    async def list(self) -> list[str]:
        """Those that this machine knows, and all of the account that are named as ours are."""
        names = {
            record.name
            for record in self._records.list(self.backend)
            if record.data["sandbox"].startswith(prefix())
        }
        try:
            api_key()
        except SandboxUnavailable:
            return sorted(names)
        api, cursor = self.api(), None
        while len(names) < _MOST:
            page = await api.call(
                api.sandboxes.list_sandboxes,
                name_prefix=prefix(),
                limit=_PAGE,
                cursor=cursor,
                doing="the sandboxes were listed",
            )
            names |= {
                str(item.name).removeprefix(prefix())
                for item in page.items
                if str(item.name).startswith(prefix()) and STATES.get(str(item.status)) != "gone"
            }
            cursor = page.next_cursor
            if not cursor or not page.items:
                break
        return sorted(names)

    async def remove(self, name: str) -> None:
        try:
            record = self._load(name)
        except SandboxNotFound:
            try:
                record = await self._look_up(name)
            except SandboxNotFound:
                return
        else:
            settled = await creation.settled(self._records, self.backend, record.name, hosted=True)
            if settled is None:
                return
            record = settled
        # A removal that was begun is carried through, also if the caller is cancelled.
        await asyncio.shield(self._destroy(record))

    async def sweep(self) -> None:
        """Remove sandboxes whose creation was cut short. Called by ``create``; never raises for a
        single one."""
        for record in self._records.list(self.backend):
            if creation.cut_short(record):
                try:
                    await self._destroy(record)
                except SandboxError as error:
                    log.warning("Sandbox %s could not be cleared away: %s", record.name, error)

    async def _destroy(self, record: Record, *, by_name: bool = True) -> None:
        """The sandbox, then its profile, which it uses until it is gone, then the record."""
        api = self.api(record)
        if by_name:
            try:
                await self._delete(api, record)
            except SandboxNotFound:
                pass
        profile = record.data.get("profile") or {}
        if profile.get("owned"):
            name = str(profile.get("name", ""))
            await gateway.clear(api, profile.get("id"), re.escape(name))
        elif record.data.get("elsewhere"):
            # Its maker has the id; the name is that of no other sandbox.
            await gateway.clear(api, None, re.escape(record.data["sandbox"]) + "-[0-9a-f]{8}")
        self._records.delete(self.backend, record.name)

    async def _delete(self, api: Api, record: Record) -> None:
        remote = record.data["sandbox"]
        if record.id:
            found = await api.call(api.sandboxes.get_sandbox, remote, doing="it was looked up")
            if found.id != record.id:
                return  # the name is another's by now
        elif not await self._made_by_us(api, record):
            return
        await api.call(api.sandboxes.delete_sandbox, remote, doing=f"{remote!r} was deleted")
        handle = IsloHandle(record, self)
        try:
            await handle.reached(timeout=record.sandbox_spec().start_timeout)
        except SandboxGone:
            pass

    async def _made_by_us(self, api: Api, record: Record) -> bool:
        """For a record whose creation was cut short before its sandbox's id was known."""
        found = await self._ours(api, record)
        if found is not None:
            record.id = found.id
        return found is not None

    # --- diagnosis

    async def diagnose(self) -> Sequence[Diagnosis]:
        version = importlib.metadata.version("islo")
        found = [Diagnosis(True, f"islo {version}")]
        try:
            api_key()
            api = self.api()
            await api.call(api.sandboxes.list_sandboxes, limit=1, doing="the sandboxes were listed")
        except SandboxError as error:
            return [*found, Diagnosis(False, "Islo cannot be used", str(error))]
        return [*found, Diagnosis(True, f"Islo answers at {api.endpoint.compute}")]


def _foreign_record(name: str, found: Any, endpoint: Endpoint) -> Record:
    """What can be known of a sandbox that another machine made. Not kept."""
    spec = SandboxSpec(name=name, image=str(found.image) or None)
    record = Record("islo", name, str(found.id), spec.to_dict())
    try:
        record.created = datetime.fromisoformat(
            str(found.created_at).replace("Z", "+00:00")
        ).timestamp()
    except ValueError:
        pass  # then it is as old as our knowledge of it
    record.data = {
        "sandbox": str(found.name),
        "endpoint": {"control": endpoint.control, "compute": endpoint.compute},
        "elsewhere": True,
    }
    return record


class _Plan:
    """A spec in Islo's words. Making it refuses what has none, before anything is made."""

    def __init__(
        self, profile: gateway.Profile | str, fields: dict[str, Any], limits: dict[str, str]
    ) -> None:
        self.profile = profile
        self.fields = fields
        self.limits = limits

    @classmethod
    def of(cls, spec: SandboxSpec) -> _Plan:
        options = Options.read(spec.options)
        if options.gateway_profile is not None and (spec.egress.rules or spec.egress):
            raise SpecError(
                f"Sandbox {spec.name!r} was not created: egress and options.gateway_profile both "
                f"say what may get out. Give one of them."
            )
        profile = options.gateway_profile or gateway.Profile.of(spec.egress, spec.name)
        lifecycle: dict[str, Any] = {
            "pause_after_idle": options.pause_after_idle or whole_seconds(spec.lease_seconds),
            "auto_resume": AutoResumePolicy(options.auto_resume),
        }
        if options.delete_after is not None:
            lifecycle["delete_after"] = options.delete_after
        fields: dict[str, Any] = {"lifecycle": LifecyclePolicy(**lifecycle)}
        if isinstance(profile, gateway.Profile):
            fields["internet_enabled"] = profile.internet_enabled
        limits = {}
        if spec.image:
            fields["image"] = spec.image
        if spec.memory_mib:
            fields["memory_mb"] = spec.memory_mib
            limits["memory_mib"] = f"{spec.memory_mib} MiB (memory of the VM)"
        if spec.cpus:
            fields["vcpus"] = _whole(spec, "cpus", spec.cpus, 1, "whole CPUs")
            limits["cpus"] = f"{fields['vcpus']} (virtual CPUs)"
        if spec.disk_mib:
            fields["disk_gb"] = _whole(spec, "disk_mib", spec.disk_mib, 1024, "GiB, so 1024 MiB")
            limits["disk_mib"] = f"{spec.disk_mib} MiB (disk of the VM)"
        return cls(profile, fields, limits)


def _whole(spec: SandboxSpec, field: str, value: float, unit: int, what: str) -> int:
    if value % unit:
        raise SpecRefused(
            f"Sandbox {spec.name!r} was not created: the backend 'islo' cannot enforce "
            f"{field}={value!r}. Islo counts in {what}; give a multiple."
        )
    return int(value // unit)
