"""microsandbox as a sandbox backend: making, finding, copying and removing microVMs.

A VM belongs to no process of ours: the SDK's own program runs it. Which VMs are sandboxes of ours,
and under which name, is decided by the records; a VM's own name is its sandbox's with a random
end, so that what is left of an earlier one can never be taken for it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import microsandbox as sdk

from sandbox_kernel.errors import (
    SandboxError,
    SandboxTimeout,
    SandboxUnavailable,
    SpecRefused,
)
from sandbox_kernel.paths import private_dir
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import creation
from sandbox_kernel.sandboxes.base import Capabilities, Diagnosis, SandboxClient, SnapshotInfo
from sandbox_kernel.sandboxes.bootcheck import boot_check, boot_timeout, kvm_problem
from sandbox_kernel.sandboxes.microsandbox import images, machine
from sandbox_kernel.sandboxes.microsandbox.handle import MicrosandboxHandle
from sandbox_kernel.sandboxes.microsandbox.snapshots import Snapshots
from sandbox_kernel.sandboxes.tinyimage import tiny_layout
from sandbox_kernel.spec import SandboxSpec

DEFAULT_MEMORY_MIB = 1024
_JOURNAL_MIB = 64
"""What an ext4 file system needs for itself, at least; the SDK cannot make one without it."""
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
        self._snapshots = Snapshots(self.backend)

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
        record.data = {"vm": f"sk-{spec.name}-{record.id}", "limits": _limits(spec)}
        creation.begin(record)
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
        creation.finish(record)
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
        record = await creation.settled(self._records, self.backend, name)
        if record is None:
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
        if record.where == "elsewhere":
            return False
        if creation.unfinished(record):
            return creation.cut_short(record)
        vm = record.data["vm"]
        if record.data.get("ended") or await machine.status(vm) in ("running", "paused"):
            return False
        return "lease" in await asyncio.to_thread(machine.why_ended, vm)

    # --- snapshots

    async def keep(self, handle: MicrosandboxHandle, name: str) -> SnapshotInfo:
        """Make a snapshot of a running sandbox with its memory (``SandboxHandle.snapshot``)."""
        return await self._snapshots.make(self._records.load(self.backend, handle.name), name)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> MicrosandboxHandle:
        """As the surface says: the sandbox goes on where the snapshot was taken. What the spec
        asks for in memory, CPUs, disk and image must be what the snapshot has, or be left out."""
        record = self._snapshots.load(snapshot)
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
        return self._snapshots.list()

    async def remove_snapshot(self, name: str) -> None:
        await self._snapshots.remove(name)

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
