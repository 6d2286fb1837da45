"""microsandbox as a sandbox backend: making, finding, copying and removing microVMs.

A VM belongs to no process of ours: the SDK's own program runs it. Which VMs are sandboxes of ours,
and under which name, is decided by the records; a VM's own name is its sandbox's with a random
end, so that what is left of an earlier one can never be taken for it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import microsandbox as sdk

from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxTimeout, SandboxUnavailable
from sandbox_kernel.paths import private_dir
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.bootcheck import boot_check, boot_timeout, kvm_problem
from sandbox_kernel.sandboxes.capabilities import GATEWAY_PARTS, Capabilities, whole
from sandbox_kernel.sandboxes.microsandbox import images, machine
from sandbox_kernel.sandboxes.microsandbox.handle import MicrosandboxHandle
from sandbox_kernel.sandboxes.recording_client import RecordingClient, SnapshotKeeper
from sandbox_kernel.sandboxes.results import Diagnosis, SnapshotInfo
from sandbox_kernel.sandboxes.tiny_image import tiny_layout
from sandbox_kernel.spec import SandboxSpec

Boot = Callable[[str], Awaitable[None]]
"""Starts the VM of the given name."""
DEFAULT_MEMORY_MIB = 1024
_SNAPSHOT_GROUP, _SNAPSHOT_TIMEOUT = "sandbox-kernel", 600.0
_JOURNAL_MIB = 64
"""What an ext4 file system needs for itself, at least; the SDK cannot make one without it."""
_IN_GUEST = (
    "A microVM is root of its own kernel, so this could not be held; memory_mib and cpus are."
)


class Snapshots(SnapshotKeeper):
    """This user's snapshots. The SDK's name of one follows from its record."""

    timeout = _SNAPSHOT_TIMEOUT
    sdk_errors = (sdk.MicrosandboxError, TimeoutError)

    async def take_from(self, source: Record, name: str) -> SnapshotInfo:
        """Keep a running sandbox, with its memory."""

        async def work(record: Record) -> None:
            made = await sdk.Snapshot.create(
                _sdk_name(record), from_sandbox=source.data["vm"], group=_SNAPSHOT_GROUP, full=True
            )
            record.data["reference"] = made.reference

        return await self.take(name, source, work)

    async def explained(self, error: BaseException, record: Record) -> BaseException:
        sandbox = record.data["sandbox"]
        if isinstance(error, sdk.SandboxNotRunningError):
            return SandboxGone(f"Sandbox {sandbox!r} does not run, so its memory cannot be kept.")
        if isinstance(error, TimeoutError):
            return SandboxTimeout(
                f"No snapshot of sandbox {sandbox!r} was made within {_SNAPSHOT_TIMEOUT:g} s. Is "
                f"the disk slow or full?"
            )
        return await super().explained(error, record)

    async def destroy(self, record: Record) -> None:
        reference = record.data.get("reference") or _sdk_name(record)
        try:
            async with asyncio.timeout(_SNAPSHOT_TIMEOUT):
                await sdk.Snapshot.remove(reference, force=True)
        except sdk.MicrosandboxError as error:
            if "not found" not in str(error):
                raise


def _sdk_name(record: Record) -> str:
    """The SDK's name for a sandbox or a snapshot."""
    return f"sk-{record.name}-{record.id}"


class MicrosandboxClient(RecordingClient[MicrosandboxHandle]):
    """microVMs on this machine, for this user. Needs KVM; no daemon and no account."""

    backend = "microsandbox"
    capabilities: ClassVar[Capabilities] = Capabilities(
        *("image", "memory_mib", "cpus", "disk_mib", "egress", "secrets", "gateway"),
        *("byte_exact_streams", "reattach", "pause", "restart", "snapshot", "memory", "fork"),
        notes={
            "processes": _IN_GUEST,
            "open_files": _IN_GUEST,
            "volume": "No folder of the host is shown to a microVM; copy files in and out.",
            "readable": "No folder of the host is shown to a microVM; copy files in.",
            "python": "The sandbox runs the image's own Python; choose an image.",
        },
        # Their network is off: microsandbox's own rules could not be shown to hold.
        egress_parts=GATEWAY_PARTS,
    )

    sdk_errors = (sdk.MicrosandboxError, TimeoutError)

    def __init__(self) -> None:
        super().__init__()
        self.snapshot_keeper: Snapshots = Snapshots(self.backend)

    def handle(self, record: Record) -> MicrosandboxHandle:
        return MicrosandboxHandle(record, self)

    # --- making

    async def create(self, spec: SandboxSpec) -> MicrosandboxHandle:
        self.check(spec)
        cpus = whole(spec, self.backend, "cpus", 1, "A microVM has whole CPUs")
        await self.sweep()
        image, is_here = await images.reference(spec)
        root_disk = spec.disk_mib + _JOURNAL_MIB if spec.disk_mib else None

        async def boot(vm: str) -> None:
            await sdk.Sandbox.create(
                vm,
                image=sdk.Image.oci(image, root_disk=root_disk),
                memory=spec.memory_mib or DEFAULT_MEMORY_MIB,
                cpus=cpus or 1,
                env=dict(spec.env),
                network=sdk.Network.none(),
                idle_timeout=max(1.0, spec.lease_seconds),
                pull_policy=sdk.PullPolicy.NEVER if is_here else sdk.PullPolicy.IF_MISSING,
                detached=True,
            )

        return await self._make(Record(self.backend, spec.name, "", spec.to_dict()), boot)

    async def copy(
        self, spec: SandboxSpec, source: Record | None, boot: Boot
    ) -> MicrosandboxHandle:
        """A sandbox that goes on from the state of another, whose agent knows ``source``'s token
        until it is re-keyed. For forks and snapshots."""
        record = Record(self.backend, spec.name, "", spec.to_dict())
        record.kernel = {"token": source.kernel["token"]} if source and source.kernel else {}
        return await self._make(record, boot, booted=False)

    async def _make(self, record: Record, boot: Boot, *, booted: bool = True) -> MicrosandboxHandle:
        spec = record.sandbox_spec()
        record.id = secrets.token_hex(6)
        vm = _sdk_name(record)
        record.data = {"vm": vm, "limits": _limits(spec)}
        handle = self.handle(record)

        async def work() -> None:
            await machine.insist(lambda: boot(vm), vm)
            # The SDK keeps a log of all output there, readable for everybody.
            private_dir(machine.folder(vm))
            if not machine.network_is_off((await sdk.Sandbox.get(vm)).config()):
                raise SandboxError(f"The network of the microVM {vm!r} is not off, as it must be.")
            if booted:
                await handle.set_up()

        await self.make(record, work, spec.start_timeout)
        return handle

    async def explained(self, error: BaseException, record: Record) -> BaseException:
        why = await asyncio.to_thread(machine.why_not_started, record.data["vm"])
        if isinstance(error, TimeoutError) and not isinstance(error, SandboxTimeout):
            return SandboxTimeout(f"{await super().explained(error, record)} {why}")
        if isinstance(error, (sdk.ImagePullFailedError, sdk.ImageNotFoundError)):
            return SandboxUnavailable(
                f"Sandbox {record.name!r} was not created: its image {record.spec.get('image')!r} "
                f"could not be pulled: {error}. Is the name right, and can the registry be reached?"
            )
        if isinstance(error, sdk.MicrosandboxError):
            problem, what = kvm_problem(), f"Sandbox {record.name!r} could not be started"
            if problem is not None:
                return SandboxUnavailable(f"{what}: {problem.what}. {problem.fix}")
            return SandboxUnavailable(
                f"{what}: {str(error)[:800]} {why} `sandbox-kernel doctor` tells whether microVMs "
                f"can run here."
            )
        return error

    # --- removing

    async def destroy(self, record: Record) -> None:
        await machine.destroy(record.data["vm"])

    async def is_unwanted(self, record: Record) -> bool:
        """A VM whose lease ran out."""
        vm = record.data["vm"]
        if record.data.get("ended") or await machine.status(vm) in ("running", "paused"):
            return False
        return "lease" in await asyncio.to_thread(machine.why_ended, vm)

    # --- snapshots

    async def restore(self, snapshot: str, spec: SandboxSpec) -> MicrosandboxHandle:
        """As the surface says: the sandbox goes on where the snapshot was taken. What the spec
        asks for in memory, CPUs, disk and image must be what the snapshot has, or be left out."""
        record = self.snapshot_keeper.load(snapshot)
        self.snapshot_keeper.refuse_changes(record, spec, "image", "memory_mib", "cpus", "disk_mib")
        self.check(spec)
        taken = record.sandbox_spec()
        spec = replace(
            taken,
            name=spec.name,
            env={**taken.env, **spec.env},
            labels=spec.labels,
            lease_seconds=spec.lease_seconds,
            start_timeout=spec.start_timeout,
        )

        async def boot(vm: str) -> None:
            await sdk.Sandbox.restore(
                record.data["reference"],
                name=vm,
                idle_timeout=max(1.0, spec.lease_seconds),
                network_policy=sdk.NetworkPolicy.none(),  # the snapshot's own is not restored
            )

        return await self.copy(spec, record, boot)

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
            ephemeral=True,  # deleted when it ends, even if this process is killed now
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


def _limits(spec: SandboxSpec) -> dict[str, str]:
    """Limits inherent to the VM."""
    limits = {
        "memory_mib": f"{spec.memory_mib or DEFAULT_MEMORY_MIB} MiB (memory of the microVM)",
        "cpus": f"{int(spec.cpus or 1)} (virtual CPUs)",
    }
    if spec.disk_mib:
        limits["disk_mib"] = f"{spec.disk_mib} MiB (disk of the microVM)"
    return limits
