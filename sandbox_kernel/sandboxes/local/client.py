"""The local jail as a sandbox backend: creating, finding and removing jails.

A jail belongs to no process: it runs on when its creator dies, and whoever reads its record, with
folders, process ids and cgroups, can use it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from sandbox_kernel.errors import SandboxError, SandboxTimeout, SandboxUnavailable
from sandbox_kernel.guest import landlock
from sandbox_kernel.host_processes import reap
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes import creation_marker
from sandbox_kernel.sandboxes.capabilities import GATEWAY_PARTS, Capabilities
from sandbox_kernel.sandboxes.channel import Hangup
from sandbox_kernel.sandboxes.local import bubblewrap, environment, jail_state
from sandbox_kernel.sandboxes.local.cgroup import Cgroup, sweep_cgroups
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.sandboxes.local.hidden_paths import contains
from sandbox_kernel.sandboxes.local.jail_folders import JailFolders
from sandbox_kernel.sandboxes.local.jail_request import open_request
from sandbox_kernel.sandboxes.local.jail_start import Launch
from sandbox_kernel.sandboxes.local.limits import MIB, Limits
from sandbox_kernel.sandboxes.local.placeholders import (
    Placeholder,
    make_placeholders,
    missing_in,
    remove_placeholders,
)
from sandbox_kernel.sandboxes.local.shared_folder import check_folder
from sandbox_kernel.sandboxes.recording_client import RecordingClient, in_thread
from sandbox_kernel.sandboxes.results import Diagnosis
from sandbox_kernel.sandboxes.unsaved_files import unsaved_in
from sandbox_kernel.spec import SandboxSpec


class LocalClient(RecordingClient[LocalHandle]):
    """Jails on this machine, for this user. Needs no daemon, no root and no account."""

    backend = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(
        *("memory_mib", "cpus", "processes", "open_files", "disk_mib", "volume", "folder"),
        *("readable", "python", "egress", "secrets", "gateway", "byte_exact_streams", "reattach"),
        egress_parts=GATEWAY_PARTS,
        notes={
            "image": "The local jail shows the host's own system; choose the interpreter with "
            "python, or use a backend with images.",
        },
    )
    commands_apart: ClassVar[bool] = True
    """Whether commands cannot look into each other's processes. (A test double allows it.)"""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, Record] = {}
        """Jails that this client has started, in case somebody deletes their records."""

    def handle(self, record: Record) -> LocalHandle:
        return LocalHandle(record)

    async def create(self, spec: SandboxSpec) -> LocalHandle:
        self.check(spec)
        if spec.folder is not None:
            await asyncio.to_thread(check_folder, spec)
        await self.sweep()
        # The only slow step: it may have to run the interpreter. Nothing exists yet.
        sandbox_id = secrets.token_hex(6)
        folders = JailFolders.of(spec, sandbox_id)
        launch = await asyncio.to_thread(self._launch, spec, sandbox_id, folders)
        record = Record(self.backend, spec.name, sandbox_id, spec.to_dict())
        record.data["folders"] = folders.to_json()
        await self.make(record, lambda: self._start(launch, record), spec.start_timeout)
        self._made[record.name] = record
        return self.handle(record)

    def _launch(self, spec: SandboxSpec, sandbox_id: str, folders: JailFolders) -> Launch:
        python = environment.describe(spec.python or sys.executable)
        return Launch(spec, sandbox_id, folders, python, self.commands_apart)

    def usual_limit(self, name: str) -> float | None:
        usual = Limits.of(SandboxSpec())
        return {
            "memory_mib": usual.memory // MIB,
            "cpus": len(os.sched_getaffinity(0)),
            "processes": usual.processes,
            "disk_mib": usual.disk // MIB,
        }.get(name)

    def makes_spares(self, spec: SandboxSpec) -> bool:
        """Not with disk space that is set aside, nor for a folder that others use, too."""
        return spec.disk_mib is None and spec.volume is None and spec.folder is None

    async def likeness(self, spec: SandboxSpec) -> str:
        return await asyncio.to_thread(self._likeness, spec)

    def _likeness(self, spec: SandboxSpec) -> str:
        return self._launch(spec, "", JailFolders.of(spec, "")).likeness()

    async def _start(self, launch: Launch, record: Record) -> None:
        spec = record.sandbox_spec()
        if spec.folder is not None:
            if spec.folder_writable:
                await asyncio.to_thread(self._make_placeholders, record, spec)
            await asyncio.to_thread(self._look, launch, record, spec.folder)
        try:
            launch.start()
            if not await launch.let_go():
                raise Hangup
            record.data.update(launch.facts())
            creation_marker.finish(record)
            await self.save(record)
            runtime = Path(record.data["folders"]["runtime"])
            timeout = record.sandbox_spec().start_timeout
            request, _ = await open_request(runtime, {"kind": "info"}, timeout=timeout)
            request.close()
            await asyncio.to_thread(launch.check_folder)
        except BaseException:
            launch.abort()
            raise
        launch.done()

    async def explained(self, error: BaseException, record: Record) -> BaseException:
        excerpt = jail_state.log_excerpt(JailFolders.from_json(record.data["folders"]))
        if isinstance(error, Hangup):
            why = await asyncio.to_thread(bubblewrap.why_not) or excerpt
            return SandboxUnavailable(f"Sandbox {record.name!r} could not be started. {why}")
        explained = await super().explained(error, record)
        return SandboxTimeout(f"{explained} {excerpt}") if explained is not error else error

    async def remove(self, name: str) -> None:
        await super().remove(name)
        if name in self._made:  # somebody deleted its record
            record = self._made[name]
            await asyncio.shield(self.discard(record))
            await in_thread(self.removed, record)

    async def destroy(self, record: Record) -> None:
        await asyncio.to_thread(_destroy, record)
        await asyncio.to_thread(self._remove_placeholders, record)
        self._made.pop(record.name, None)

    def _make_placeholders(self, record: Record, spec: SandboxSpec) -> None:
        """In a folder that the jail may write. Those of other jails become its own, too. The record
        names each before it exists: this process may be killed any time."""
        folder = check_folder(spec)
        others = self._placeholders_but(record)
        shared = [one for one in others if os.path.dirname(one[0]) == folder]
        wanted = missing_in(folder)
        record.data["placeholders"] = [*shared, *wanted]
        self.records.save(record)
        record.data["placeholders"] = [*shared, *make_placeholders(wanted)]
        self.records.save(record)

    def _remove_placeholders(self, record: Record) -> None:
        """Those that no other jail needs."""
        made = [tuple(one) for one in record.data.get("placeholders", ())]
        if made:
            needed = self._placeholders_but(record)
            remove_placeholders([one for one in made if one not in needed])

    def _placeholders_but(self, record: Record) -> list[Placeholder]:
        others = (other for other in self.records.list(self.backend) if other.id != record.id)
        return [tuple(one) for other in others for one in other.data.get("placeholders", ())]

    def _look(self, launch: Launch, record: Record, folder: str) -> None:
        others = (one for one in self.records.list(self.backend) if one.id != record.id)
        specs = [other.sandbox_spec() for other in others]
        written = [os.path.realpath(s.folder) for s in specs if s.folder and s.folder_writable]
        real = os.path.realpath(folder)
        contested = any(contains(real, other) or contains(other, real) for other in written)
        launch.look(contested=contested)

    async def is_unwanted(self, record: Record) -> bool:
        """A jail whose lease ran out, with all files saved."""
        init = jail_state.process(record, "init")
        if (init is not None and init.alive) or unsaved_in(record) is not None:
            return False
        folders = JailFolders.from_json(record.data["folders"])
        return jail_state.saved_state(folders).get("ended") == "lease"

    async def sweep(self) -> None:
        """Sweep cgroups without a sandbox, too."""
        reap()
        await super().sweep()
        known = {record.id for record in self.records.list(self.backend)}
        await asyncio.to_thread(sweep_cgroups, known)

    async def diagnose(self) -> Sequence[Diagnosis]:
        try:
            bwrap = await asyncio.to_thread(bubblewrap.find)
        except SandboxError as error:
            return [Diagnosis(False, "bubblewrap is not installed", str(error))]
        version = ".".join(map(str, bwrap.version))
        found = [Diagnosis(True, f"bubblewrap {version} ({bwrap.source}: {bwrap.path})")]
        name = f"doctor-{secrets.token_hex(4)}"
        try:
            spec = SandboxSpec(name=name, start_timeout=30.0, audit="none")
            handle = await self.create(spec)
            result = await handle.exec("/bin/sh", ["-c", "exit 0"], timeout=30.0)
            limits = (await handle.info()).limits
        except (OSError, SandboxError) as error:
            return [*found, Diagnosis(False, "no jail can be started", str(error))]
        finally:
            await self.remove(name)
        return [
            *found,
            Diagnosis(result.ok, "a jail starts and runs a command"),
            _limits_diagnosis(limits),
            _landlock_diagnosis(),
            _ipykernel_diagnosis(),
        ]


def _destroy(record: Record) -> None:
    if not jail_state.kill(record):
        raise SandboxError(
            f"Sandbox {record.name!r} could not be removed: its process "
            f"{record.data['init'][0]} does not end. Try again later."
        )
    JailFolders.from_json(record.data["folders"]).remove()
    cgroup = Cgroup.from_json(record.data.get("cgroup"))
    if cgroup is not None:
        cgroup.remove()


def _landlock_diagnosis() -> Diagnosis:
    version = landlock.abi()
    if version >= landlock.LEAST_ABI:
        return Diagnosis(True, f"Landlock (version {version}) backs up the jail's mounts")
    return Diagnosis(
        None,
        "this kernel has no usable Landlock, so only the jail's mounts keep it from files",
        "Linux 5.19 and later have it; it may have to be turned on at boot (lsm=landlock,...).",
    )


def _limits_diagnosis(limits: Mapping[str, str]) -> Diagnosis:
    held = [limits[name] for name in ("memory_mib", "processes") if name in limits]
    if all("cgroup" in words for words in held):
        return Diagnosis(True, f"cgroups limit memory and processes ({held[0]})")
    return Diagnosis(
        None,
        "no cgroup can be made here, so rlimits and a watch enforce the limits more coarsely: "
        + "; ".join(f"{name} {words}" for name, words in limits.items()),
        "Start the server in a delegated cgroup: systemd-run --user --scope -p Delegate=yes "
        "jupyter lab",
    )


def _ipykernel_diagnosis() -> Diagnosis:
    if importlib.util.find_spec("ipykernel"):
        return Diagnosis(True, f"ipykernel is installed for {sys.executable}")
    fix = f"{sys.executable} -m pip install ipykernel"
    return Diagnosis(False, f"ipykernel is not installed for {sys.executable}", fix)
