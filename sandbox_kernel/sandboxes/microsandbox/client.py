"""microsandbox as a sandbox backend: making, finding, copying and removing microVMs.

A VM belongs to no process of ours: the SDK's own program runs it. Which VMs are sandboxes of ours,
and under which name, is decided by the records; a VM's own name is its sandbox's with a random
end, so that what is left of an earlier one can never be taken for it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import microsandbox as sdk

from sandbox_kernel.errors import (
    SandboxError,
    SandboxExists,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
    SandboxUnavailable,
    SpecRefused,
)
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.base import Capabilities, Diagnosis, SandboxClient, SnapshotInfo
from sandbox_kernel.sandboxes.bootcheck import boot_check, boot_timeout, kvm_problem
from sandbox_kernel.sandboxes.local.processes import ProcessId
from sandbox_kernel.sandboxes.microsandbox import images, machine
from sandbox_kernel.sandboxes.microsandbox.handle import MicrosandboxHandle, snapshot_info
from sandbox_kernel.sandboxes.tinyimage import tiny_layout
from sandbox_kernel.spec import SandboxSpec, check_name

DEFAULT_MEMORY_MIB = 1024
_JOURNAL_MIB = 64
"""What an ext4 file system needs for itself, at least; the SDK cannot make one without it."""
_COPY_TIMEOUT = 600.0
_POLL = 0.1
_IN_GUEST = (
    "A microVM is root of its own kernel, so this could not be held; memory_mib and cpus are."
)


class MicrosandboxClient(SandboxClient):
    """microVMs on this machine, for this user. Needs KVM; no daemon and no account."""

    backend = "microsandbox"
    capabilities: ClassVar[Capabilities] = Capabilities(
        image=True,
        memory_mib=True,
        cpus=True,
        disk_mib=True,
        byte_exact_streams=True,
        reattach=True,
        pause=True,
        restart=True,
        snapshot=True,
        memory=True,
        fork=True,
        notes={
            "processes": _IN_GUEST,
            "open_files": _IN_GUEST,
            "workspace": "No folder of the host is shown to a microVM; copy files in and out.",
            "readable": "No folder of the host is shown to a microVM; copy files in.",
            "python": "The sandbox runs the image's own Python; choose an image.",
            "secrets": "There is no way yet to use a secret without showing it; pass what the "
            "code may know in env.",
            "egress": "The network of these microVMs is off. microsandbox can allow domains, but "
            "that was not shown to hold, so it is not offered; leave egress empty.",
        },
    )

    def __init__(self) -> None:
        self.log = logging.getLogger(__name__)
        self._records = Records()

    # --- making

    async def create(self, spec: SandboxSpec) -> MicrosandboxHandle:
        self.capabilities.check(spec, self.backend)
        _check_cpus(spec)
        await self.sweep()
        image, is_here = await images.reference(spec)
        root_disk = spec.disk_mib + _JOURNAL_MIB if spec.disk_mib else None

        async def boot(vm: str) -> None:
            await sdk.Sandbox.create(
                vm,
                image=sdk.Image.oci(image, root_disk=root_disk),
                memory=spec.memory_mib or DEFAULT_MEMORY_MIB,
                cpus=int(spec.cpus or 1),
                env=dict(spec.env),
                network=sdk.Network.none(),
                idle_timeout=max(1.0, spec.lease_seconds),
                pull_policy=sdk.PullPolicy.NEVER if is_here else sdk.PullPolicy.IF_MISSING,
                detached=True,
            )

        return await self._make(Record(self.backend, spec.name, "", spec.to_dict()), boot)

    async def copy(
        self,
        spec: SandboxSpec,
        source: Record | None,
        make: Callable[[str], Awaitable[None]],
    ) -> MicrosandboxHandle:
        """A sandbox that goes on from the state of another, whose agent knows ``source``'s token
        until it is re-keyed. For forks and snapshots."""
        record = Record(self.backend, spec.name, "", spec.to_dict())
        record.kernel = {"token": source.kernel["token"]} if source and source.kernel else {}
        return await self._make(record, make, booted=False)

    async def _make(
        self, record: Record, make: Callable[[str], Awaitable[None]], *, booted: bool = True
    ) -> MicrosandboxHandle:
        """Reserve the name, make the VM, see that it works; or leave nothing."""
        spec = record.sandbox_spec()
        record.id = secrets.token_hex(6)
        record.data = {
            "vm": f"sk-{spec.name}-{record.id}",
            "creator": _this_process(),
            "limits": _limits(spec),
        }
        self._records.reserve(record)
        handle = MicrosandboxHandle(record, self)
        try:
            await asyncio.wait_for(self._start(handle, record, make, booted), spec.start_timeout)
        except BaseException as error:
            raised = await asyncio.shield(self._undo(record, error))
            raise raised from error
        return handle

    async def _start(
        self,
        handle: MicrosandboxHandle,
        record: Record,
        make: Callable[[str], Awaitable[None]],
        booted: bool,
    ) -> None:
        vm = record.data["vm"]
        await machine.insist(lambda: make(vm), vm)
        # The SDK keeps a log of all output there, readable for everybody.
        private_dir(machine.folder(vm))
        if not machine.network_is_off((await sdk.Sandbox.get(vm)).config()):
            raise SandboxError(f"The network of the microVM {vm!r} is not off, as it must be.")
        if booted:
            await handle.set_up()
        record.data["ready"] = True
        self._records.save(record)

    async def _undo(self, record: Record, error: BaseException) -> BaseException:
        """Clear away what was made, and say what failed."""
        why = await asyncio.to_thread(machine.why_not_started, record.data["vm"])
        try:
            await self._destroy(record)
        except (SandboxError, sdk.MicrosandboxError) as left:
            self.log.warning("Sandbox %s could not be cleared away: %s", record.name, left)
        timeout = record.sandbox_spec().start_timeout
        if isinstance(error, asyncio.TimeoutError) and not isinstance(error, SandboxTimeout):
            return SandboxTimeout(
                f"Sandbox {record.name!r} did not start within {timeout:g} s. Give a longer "
                f"start_timeout. {why}"
            )
        if isinstance(error, (sdk.ImagePullFailedError, sdk.ImageNotFoundError)):
            return SandboxUnavailable(
                f"Sandbox {record.name!r} was not created: its image {record.spec.get('image')!r} "
                f"could not be had: {error}. Is the name right, and can the registry be reached?"
            )
        if isinstance(error, sdk.MicrosandboxError):
            return SandboxUnavailable(_no_start(record.name, str(error), why))
        return error

    # --- finding and removing

    async def get(self, name: str) -> MicrosandboxHandle:
        return MicrosandboxHandle(self._records.load(self.backend, name), self)

    async def list(self) -> list[str]:
        return [record.name for record in self._records.list(self.backend)]

    async def remove(self, name: str) -> None:
        try:
            record = self._records.load(self.backend, name)
        except SandboxNotFound:
            return
        deadline = time.monotonic() + record.sandbox_spec().start_timeout
        while _being_created(record) and time.monotonic() < deadline:
            # Its creator would not notice that it was removed, so wait until it is done.
            await asyncio.sleep(_POLL)
            try:
                record = self._records.load(self.backend, name)
            except SandboxNotFound:
                return
        try:
            # A removal that was begun is carried through, also if the caller is cancelled.
            await asyncio.shield(self._destroy(record))
        except (sdk.MicrosandboxError, asyncio.TimeoutError) as error:
            raise SandboxError(
                f"Sandbox {name!r} could not be removed: {error}. Try again later."
            ) from error

    async def _destroy(self, record: Record) -> None:
        await machine.destroy(record.data["vm"])
        self._records.delete(self.backend, record.name)

    async def sweep(self) -> None:
        """Remove what nobody wants: sandboxes whose creation was cut short, and those whose lease
        ran out. Called by ``create``; never raises for a single one."""
        for record in self._records.list(self.backend):
            try:
                if await self._unwanted(record):
                    await self._destroy(record)
            except (OSError, SandboxError, sdk.MicrosandboxError, asyncio.TimeoutError) as error:
                self.log.warning("Sandbox %s could not be cleared away: %s", record.name, error)

    async def _unwanted(self, record: Record) -> bool:
        if not record.data.get("ready"):
            return not _being_created(record)
        vm = record.data["vm"]
        if record.data.get("ended") or await machine.status(vm) in ("running", "paused"):
            return False
        return "lease" in await asyncio.to_thread(machine.why_ended, vm)

    # --- snapshots

    async def keep(self, handle: MicrosandboxHandle, name: str) -> SnapshotInfo:
        """Make a snapshot of a running sandbox with its memory (``SandboxHandle.snapshot``)."""
        check_name(name, "A snapshot name")
        kept = self._kept()
        source = self._records.load(self.backend, handle.name)
        record = Record(self.backend, name, secrets.token_hex(6), source.spec)
        record.kernel = dict(source.kernel)
        record.data = {
            "sandbox": handle.name,
            "snapshot": f"sk-{name}-{record.id}",
            "creator": _this_process(),
        }
        try:
            kept.reserve(record)
        except SandboxExists:
            raise SandboxExists(
                f"A snapshot named {name!r} exists already in the backend {self.backend!r}."
            ) from None
        try:
            making = sdk.Snapshot.create(
                record.data["snapshot"], from_sandbox=source.data["vm"], group=_GROUP, full=True
            )
            made = await asyncio.wait_for(making, _COPY_TIMEOUT)
        except BaseException as error:
            kept.delete(self.backend, name)
            if isinstance(error, sdk.SandboxNotRunningError):
                raise SandboxGone(
                    f"Sandbox {handle.name!r} does not run, so its memory cannot be kept."
                ) from error
            if isinstance(error, sdk.MicrosandboxError):
                raise SandboxError(
                    f"No snapshot of sandbox {handle.name!r} could be made: {error}"
                ) from error
            raise
        record.data["reference"] = made.reference
        record.data["ready"] = True
        kept.save(record)
        return snapshot_info(record)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> MicrosandboxHandle:
        """As the surface says: the sandbox goes on where the snapshot was taken. What the spec
        asks for in memory, CPUs, disk and image must be what the snapshot has, or be left out."""
        record = self._load_snapshot(snapshot)
        taken = SandboxSpec.from_mapping(record.spec)
        for field in ("image", "memory_mib", "cpus", "disk_mib"):
            if getattr(spec, field) not in (None, getattr(taken, field)):
                raise SpecRefused(
                    f"Sandbox {spec.name!r} was not created: the snapshot {snapshot!r} has "
                    f"{field}={getattr(taken, field)!r}, and goes on with it. Leave {field} out."
                )
        self.capabilities.check(spec, self.backend)
        spec = replace(
            taken,
            name=spec.name,
            env={**taken.env, **spec.env},
            labels=spec.labels,
            lease_seconds=spec.lease_seconds,
            start_timeout=spec.start_timeout,
        )

        async def make(vm: str) -> None:
            await sdk.Sandbox.restore(
                record.data["reference"],
                name=vm,
                idle_timeout=max(1.0, spec.lease_seconds),
                network_policy=sdk.NetworkPolicy.none(),  # the snapshot's own is not restored
            )

        return await self.copy(spec, record, make)

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        return [
            snapshot_info(record)
            for record in self._kept().list(self.backend)
            if record.data.get("ready")
        ]

    async def remove_snapshot(self, name: str) -> None:
        try:
            record = self._kept().load(self.backend, name)
        except SandboxNotFound:
            return
        try:
            reference = record.data.get("reference") or record.data["snapshot"]
            await asyncio.wait_for(sdk.Snapshot.remove(reference, force=True), _COPY_TIMEOUT)
        except sdk.MicrosandboxError as error:
            if "not found" not in str(error):
                raise SandboxError(f"Snapshot {name!r} could not be removed: {error}") from error
        self._kept().delete(self.backend, name)

    def _load_snapshot(self, name: str) -> Record:
        try:
            record = self._kept().load(self.backend, name)
        except SandboxNotFound:
            record = None
        if record is None or not record.data.get("ready"):
            raise SandboxNotFound(f"No snapshot named {name!r} in the backend {self.backend!r}.")
        return record

    @staticmethod
    def _kept() -> Records:
        """Records of snapshots, with the tokens of the agents in them."""
        return Records(private_dir(data_dir() / "snapshots"))

    # --- diagnosis

    async def diagnose(self) -> Sequence[Diagnosis]:
        version = importlib.metadata.version("microsandbox")
        try:
            runtime = await asyncio.to_thread(sdk.resolve_runtime)
        except sdk.MicrosandboxError as error:
            fix = "pip install --force-reinstall 'sandbox-kernel[microsandbox]'"
            return [Diagnosis(False, f"microsandbox {version} is not complete: {error}", fix)]
        found = [Diagnosis(True, f"microsandbox {version} ({runtime.msb_path})")]
        return [*found, await boot_check(self.backend, version, _boot, timeout=boot_timeout())]


_GROUP = "sandbox-kernel"


async def _boot() -> None:
    """Boot the smallest VM that there is, run its program, and leave nothing."""
    vm = f"sk-doctor-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="sandbox-kernel-") as folder:
        layout = await asyncio.to_thread(tiny_layout, Path(folder))
        image = await images.load(layout)

    async def boot() -> None:
        booted = await sdk.Sandbox.create(
            vm,
            image=sdk.Image.oci(image),
            memory=256,
            cpus=1,
            network=sdk.Network.none(),
            pull_policy=sdk.PullPolicy.NEVER,
            detached=True,
            ephemeral=True,  # it goes by itself, even if this process is killed now
            max_duration=2 * boot_timeout(),
        )
        result = await booted.exec("/bin/true")
        if result.exit_code:
            raise SandboxError(f"its program ended with exit code {result.exit_code}")

    try:
        await machine.insist(boot, vm)
    except sdk.MicrosandboxError as error:
        why = await asyncio.to_thread(machine.why_not_started, vm)
        raise SandboxUnavailable(f"{error}. {why}".strip()) from error
    finally:
        await asyncio.shield(machine.destroy(vm))


def _no_start(name: str, error: str, why: str) -> str:
    problem = kvm_problem()
    if problem is not None:
        return f"Sandbox {name!r} could not be started: {problem.what}. {problem.fix}"
    return (
        f"Sandbox {name!r} could not be started: {error[:800]} {why} "
        f"`sandbox-kernel doctor` tells whether microVMs can run here."
    )


def _check_cpus(spec: SandboxSpec) -> None:
    if spec.cpus is not None and spec.cpus != int(spec.cpus):
        raise SpecRefused(
            f"Sandbox {spec.name!r} was not created: the backend 'microsandbox' cannot enforce "
            f"cpus={spec.cpus!r}. A microVM has whole CPUs; give a whole number."
        )


def _limits(spec: SandboxSpec) -> dict[str, str]:
    """What a VM is held to by being one."""
    limits = {
        "memory_mib": f"{spec.memory_mib or DEFAULT_MEMORY_MIB} MiB (memory of the microVM)",
        "cpus": f"{int(spec.cpus or 1)} (virtual CPUs)",
    }
    if spec.disk_mib:
        limits["disk_mib"] = f"{spec.disk_mib} MiB (disk of the microVM)"
    return limits


def _this_process() -> list[int] | None:
    found = ProcessId.of(os.getpid())
    return [found.pid, found.start] if found else None


def _being_created(record: Record) -> bool:
    creator: Any = record.data.get("creator")
    return not record.data.get("ready") and bool(creator) and ProcessId(*creator).alive
