"""Islo as a sandbox backend: making, finding and removing sandboxes.

Islo's sandboxes have no labels, so ours is in their names: ``sk-LABEL--NAME``. By it other machines
of the account list them; what only this machine knows (token, gateway profile, endpoint) is in the
records.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, ClassVar

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
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.capabilities import GATEWAY_PARTS, Capabilities, EgressWay
from sandbox_kernel.sandboxes.hosted import HostedClient, label
from sandbox_kernel.sandboxes.islo import gateway_profiles
from sandbox_kernel.sandboxes.islo.api import Api, ServiceAddress, Unsure, api_key
from sandbox_kernel.sandboxes.islo.handle import MARKER, STATES, IsloHandle
from sandbox_kernel.sandboxes.islo.plan import SandboxPlan
from sandbox_kernel.sandboxes.results import Diagnosis
from sandbox_kernel.spec import SandboxSpec, check_name

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


class IsloClient(HostedClient[IsloHandle]):
    """Sandboxes of one Islo account. Needs ``ISLO_API_KEY``; looked at when it is used."""

    backend = "islo"
    capabilities: ClassVar[Capabilities] = Capabilities(
        *("image", "memory_mib", "cpus", "disk_mib", "egress", "gateway", "options"),
        *("hosted", "byte_exact_streams", "reattach", "pause", "restart"),
        egress_parts=GATEWAY_PARTS,
        beyond_own_rules=gateway_profiles.beyond_own_rules,
        notes={
            "processes": _IN_GUEST,
            "open_files": _IN_GUEST,
            "volume": _ELSEWHERE,
            "readable": _ELSEWHERE,
            "python": "The sandbox runs the image's own Python; choose an image.",
            "secrets": "Secrets of Islo's environments are not mapped; pass what the code may know "
            "in env.",
            "delete_after_seconds": "Islo's own delete_after seems to count from the creation; if "
            "that is what you want, give options.delete_after.",
        },
    )

    def __init__(self) -> None:
        super().__init__()
        self._apis: dict[ServiceAddress, Api] = {}

    def handle(self, record: Record) -> IsloHandle:
        return IsloHandle(record, self)

    def api(self, record: Record | None = None) -> Api:
        """The service where the record's sandbox is; without a record, the environment's."""
        kept = record.data.get("endpoint") if record is not None else None
        endpoint = ServiceAddress(**kept) if kept else ServiceAddress.from_environment()
        if endpoint not in self._apis:
            self._apis[endpoint] = Api(endpoint)
        return self._apis[endpoint]

    async def close(self) -> None:
        apis, self._apis = list(self._apis.values()), {}
        for api in apis:
            await api.close()

    # --- making

    def check(self, spec: SandboxSpec) -> None:
        self.plan(spec)

    def plan(self, spec: SandboxSpec) -> SandboxPlan:
        """What Islo is asked for. SpecRefused, SpecError."""
        super().check(spec)
        own_rules = self.capabilities.egress_way(spec.egress) is EgressWay.BACKEND
        return SandboxPlan.of(spec, own_rules=own_rules)

    async def create(self, spec: SandboxSpec) -> IsloHandle:
        plan = self.plan(spec)
        api_key()
        record = Record(self.backend, spec.name, "", spec.to_dict())
        record.data = {
            "sandbox": prefix() + spec.name,
            "endpoint": asdict(ServiceAddress.from_environment()),
            "marker": secrets.token_hex(16),
            "limits": plan.limits,
        }
        await self.sweep()
        await self.make(record, lambda: self._start(record, spec, plan), None)
        return self.handle(record)

    async def _start(self, record: Record, spec: SandboxSpec, plan: SandboxPlan) -> None:
        api = self.api(record)
        profile = plan.profile
        if isinstance(profile, str):
            identity = await gateway_profiles.existing(api, profile)
            record.data["profile"] = {"id": identity, "owned": False}
        else:
            name = f"{record.data['sandbox']}-{record.data['marker'][:8]}"
            # Saved first: if this process is killed now, the profile is found by its name.
            record.data["profile"] = {"id": None, "name": name, "owned": True}
            await self.save(record)
            identity = await gateway_profiles.provision(api, profile, name)
            record.data["profile"]["id"] = identity
        await self.save(record)
        made = await self._create(api, record, {**plan.fields, "gateway_profile": identity})
        record.id = made.id
        await self.save(record)
        handle = self.handle(record)
        await handle.reached("running", timeout=spec.start_timeout)
        await handle.set_up()

    async def explained(self, error: BaseException, record: Record) -> BaseException:
        if isinstance(error, Unsure):
            return SandboxTimeout(
                f"Sandbox {record.name!r} was not created: {error} Nothing of it was found; try "
                f"again later."
            )
        if isinstance(error, SandboxNotFound):
            # Islo does not know something that the request names.
            return SpecError(f"Sandbox {record.name!r} was not created: {error}")
        return error

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
        remote, doing = record.data["sandbox"], "it was looked up"
        try:
            found = await api.call(api.sandboxes.get_sandbox, remote, doing=doing)
        except SandboxNotFound:
            return None
        candidate = Record(**{**vars(record), "id": found.id})
        handle = self.handle(candidate)
        await handle.reached("running", timeout=record.sandbox_spec().start_timeout)
        return found if await handle.set_up() == record.data["marker"] else None

    # --- finding and removing

    def has_our_label(self, record: Record) -> bool:
        return bool(record.data["sandbox"].startswith(prefix()))

    async def look_up(self, name: str) -> Record | None:
        api, doing = self.api(), "it was looked up"
        try:
            found = await api.call(api.sandboxes.get_sandbox, prefix() + name, doing=doing)
        except SandboxNotFound:
            try:
                found = await api.call(api.sandboxes.get_sandbox_by_id, name, doing=doing)
            except (SandboxNotFound, SpecRefused):
                return None
        if not _is_listed(found):
            return None
        own_name = check_name(str(found.name).removeprefix(prefix()))
        data = {"sandbox": str(found.name), "endpoint": asdict(api.endpoint)}
        try:
            created = datetime.fromisoformat(str(found.created_at)).timestamp()
        except ValueError:
            created = time.time()  # it is as old as our knowledge of it
        return self.recorded(own_name) or self.record_elsewhere(
            own_name, str(found.id), created, image=str(found.image) or None, **data
        )

    async def list(self) -> list[str]:
        """Those that this machine knows, and all of the account that are named as ours are."""
        known = filter(self.has_our_label, self.records.list(self.backend))
        names = {record.name for record in known}
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
            names |= {str(i.name).removeprefix(prefix()) for i in page.items if _is_listed(i)}
            cursor = page.next_cursor
            if not cursor or not page.items:
                break
        return sorted(names)

    async def destroy(self, record: Record) -> None:
        """The sandbox, then its profile, which it uses until it is gone."""
        api = self.api(record)
        if not record.data.get("foreign"):
            with contextlib.suppress(SandboxNotFound):
                await self._delete(api, record)
        profile = record.data.get("profile") or {}
        if profile.get("owned"):
            await gateway_profiles.tear_down(api, profile["id"], re.escape(profile["name"]))
        elif record.data.get("elsewhere"):
            # Only its maker has the id, but no other sandbox has the name.
            pattern = re.escape(record.data["sandbox"]) + "-[0-9a-f]{8}"
            await gateway_profiles.tear_down(api, None, pattern)

    async def _delete(self, api: Api, record: Record) -> None:
        remote = record.data["sandbox"]
        if record.id:
            found = await api.call(api.sandboxes.get_sandbox, remote, doing="it was looked up")
            if found.id != record.id:
                return  # the name is another's by now
        else:  # its creation was cut short
            found = await self._ours(api, record)
            if found is None:
                return
            record.id = found.id
        await api.call(api.sandboxes.delete_sandbox, remote, doing=f"{remote!r} was deleted")
        with contextlib.suppress(SandboxGone):
            timeout = record.sandbox_spec().start_timeout
            await self.handle(record).reached(timeout=timeout)

    # --- diagnosis

    async def diagnose(self) -> Sequence[Diagnosis]:
        found = [Diagnosis(True, f"islo {importlib.metadata.version('islo')}")]
        try:
            api_key()
            api = self.api()
            await api.call(api.sandboxes.list_sandboxes, limit=1, doing="the sandboxes were listed")
        except SandboxError as error:
            return [*found, Diagnosis(False, "Islo cannot be used", str(error))]
        return [*found, Diagnosis(True, f"Islo answers at {api.endpoint.compute}")]


def _is_listed(found: Any) -> bool:
    """Whether it is one of ours, by its name, and there to be used."""
    return str(found.name).startswith(prefix()) and STATES.get(str(found.status)) != "gone"
