"""Boxes, through BoxLite's SDK in this process.

Runs in the broker (or, with a remote server, in the user's process). A sandbox is a box whose
main command is ``guest/commands/box.py``, and all requests go through the one link to it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence

from boxlite import errors as sdk

from sandbox_kernel import guest_program
from sandbox_kernel.errors import SandboxError, SandboxGone
from sandbox_kernel.guest.commands.box import EXIT_CODES
from sandbox_kernel.paths import data_dir
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.bootcheck import boot_check, boot_timeout
from sandbox_kernel.sandboxes.boxlite.backend import (
    BACKEND,
    CAPABILITIES,
    PYTHON,
    SNAPSHOTS,
    WORKDIR,
    remote,
)
from sandbox_kernel.sandboxes.boxlite.handle import DirectHandle, Notes
from sandbox_kernel.sandboxes.boxlite.image import find_image, layout_options
from sandbox_kernel.sandboxes.boxlite.link import BoxLink
from sandbox_kernel.sandboxes.boxlite.sdk_runtime import Runtime, State, explain
from sandbox_kernel.sandboxes.capabilities import whole
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.sandboxes.recording_client import RecordingClient, SnapshotKeeper
from sandbox_kernel.sandboxes.results import Diagnosis, SnapshotInfo
from sandbox_kernel.sandboxes.tiny_image import WAIT, tiny_layout
from sandbox_kernel.spec import SandboxSpec

_STOP_TIMEOUT = 30.0
_NOTICE = 5.0
"""Seconds for BoxLite to notice that a VM has ended."""
_POLL = 0.05
_BOOT_MARGIN = 10.0
_REASONS = {
    EXIT_CODES["stop"]: "it was stopped",
    EXIT_CODES["lease"]: "its lease was over: nobody had been attached to it",
    EXIT_CODES["main"]: "its main command ended",
}
_ENTRYPOINT = (PYTHON, "-I", "-S", "-c", guest_program.program("guest.commands.box"))
_CONNECTOR = ("-I", "-S", "-c", guest_program.program("guest.commands.box_connector"))


class Snapshots(SnapshotKeeper):
    """Snapshots of stopped boxes: each is a clone of the box, which is never started."""

    memory = False
    sdk_errors = (sdk.BoxliteError,)

    def __init__(self, client: DirectClient) -> None:
        super().__init__(BACKEND, SNAPSHOTS)
        self._client = client

    @property
    def records(self) -> Records:
        return Records()

    async def take_from(self, source: Record, name: str) -> SnapshotInfo:
        async def work(record: Record) -> None:
            record.data["box"] = _box_name(record)
            await self.save(record)
            await self._client.runtime.clone(source.data["box"], record.data["box"])

        return await self.take(name, source, work)

    async def destroy(self, record: Record) -> None:
        await self._client.runtime.remove(_box_name(record))


class DirectClient(RecordingClient[DirectHandle]):
    """The boxes of this user (or of a remote server). One a process: it owns BOXLITE_HOME."""

    backend = BACKEND
    capabilities = CAPABILITIES
    sdk_errors = (sdk.BoxliteError,)

    def __init__(self) -> None:
        super().__init__()
        self.snapshot_keeper: Snapshots = Snapshots(self)
        self._links: dict[str, BoxLink] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    @functools.cached_property
    def runtime(self) -> Runtime:
        return Runtime()

    def handle(self, record: Record) -> DirectHandle:
        return DirectHandle(self, record)

    # --- making

    async def create(self, spec: SandboxSpec) -> DirectHandle:
        self.check(spec)
        chosen = _sizes(spec)
        image = await asyncio.to_thread(find_image, spec)
        runtime = self.runtime
        return await self._make(
            spec, lambda name: runtime.create(name, image, entrypoint=_ENTRYPOINT, **chosen)
        )

    async def restore(self, snapshot: str, spec: SandboxSpec) -> DirectHandle:
        kept = self.snapshot_keeper.load(snapshot)
        self.snapshot_keeper.refuse_changes(kept, spec, "image", "cpus", "memory_mib", "disk_mib")
        whole = SandboxSpec.from_mapping({**kept.spec, **spec.to_dict()})
        return await self._make(whole, lambda name: self.runtime.clone(kept.data["box"], name))

    async def _make(
        self, spec: SandboxSpec, new_box: Callable[[str], Awaitable[str]]
    ) -> DirectHandle:
        await self.sweep()
        record = Record(self.backend, spec.name, secrets.token_hex(6), spec.to_dict())
        record.data["box"] = _box_name(record)

        async def work() -> None:
            record.data["box_id"] = await new_box(record.data["box"])
            await self.save(record)
            await self._start(record)

        await self.make(record, work, spec.start_timeout)
        return self.handle(record)

    async def explained(self, error: BaseException, record: Record) -> BaseException:
        if not isinstance(error, Exception):
            return error
        return explain(error, record.name, record.spec.get("image"), await self.console(record))

    # --- using

    async def link(self, record: Record) -> BoxLink:
        """The way to a box that runs, made if there is none yet. SandboxGone if it has ended."""
        async with self._opening.setdefault(record.id, asyncio.Lock()):
            link = self._links.get(record.id)
            if link is not None and not link.closed.is_set():
                return link
            if gone := await self._gone_by_now(record):
                raise gone
            spec = record.sandbox_spec()
            try:
                carrier = await self.runtime.execute(record.data["box"], PYTHON, _CONNECTOR)
            except sdk.BoxliteError as error:
                if gone := await self._gone_by_now(record):
                    raise gone from None
                raise explain(error, spec.name, spec.image, "") from error
            link = BoxLink(carrier, record.name, lambda: self._why_lost(record))
            try:
                await link.configure(
                    spec.lease_seconds, spec.env, WORKDIR, timeout=spec.start_timeout
                )
            except BaseException:
                await link.close()
                raise
            self._links[record.id] = link
            return link

    async def _why_lost(self, record: Record) -> SandboxError:
        """Asked when a link breaks: has the box ended, or is it only the link?"""
        async for _ in attempts(_NOTICE, most=_POLL):
            if gone := await self._gone_by_now(record):
                return gone
        return SandboxError(
            f"The connection to sandbox {record.name!r} broke; its commands were ended."
        )

    async def _gone_by_now(self, record: Record) -> SandboxGone | None:
        """The error for a box that does not run; None if it does."""
        state = await self.runtime.state(record.data["box"])
        return None if state is not None and state.running else self.gone(record, state)

    def gone(self, record: Record, state: State | None) -> SandboxGone:
        message = f"Sandbox {record.name!r} has ended: {self.reason(record, state)}."
        if state is None:
            return SandboxGone(message)
        explained = state.exit_code in _REASONS or Notes(record.id).read("ended")
        if not explained and (console := self.runtime.console(state.id)):
            message += f" Its console ends: {console}"
        return SandboxGone(
            f"{message} Restart its kernel to start it again with its files, or remove it with "
            f"`sandbox-kernel rm {record.name}`."
        )

    def reason(self, record: Record, state: State | None) -> str:
        """Why a box has ended, in words."""
        if state is None:
            return "it was removed"
        code = state.exit_code or 0
        crashed = "its VM was killed or crashed" + (f" (exit code {code})" if code else "")
        return Notes(record.id).read("ended") or _REASONS.get(code, crashed)

    async def console(self, record: Record) -> str:
        """The box's last output, for an error message; empty if the runtime does not answer."""
        try:
            state = await self.runtime.state(record.data["box"])
        except sdk.BoxliteError:
            return ""  # the caller's own error says why
        return self.runtime.console(state.id) if state is not None else ""

    async def ended(self, record: Record) -> None:
        """Wait until a box has ended that was asked to; make it end if it does not."""
        async for _ in attempts(_STOP_TIMEOUT, most=_POLL):
            state = await self.runtime.state(record.data["box"])
            if state is None:
                break
            if not state.running:
                await self.settle(record, state)
                break
        else:
            await self.runtime.stop(record.data["box"], _STOP_TIMEOUT)
        await self.close_link(record)

    async def settle(self, record: Record, state: State) -> None:
        """Make sure that nothing of an ended box runs, and that BoxLite knows that it has ended."""
        if state.stale:
            await self.runtime.stop(record.data["box"], _STOP_TIMEOUT)
        else:
            await self.runtime.finish(state.id)

    async def close_link(self, record: Record) -> None:
        link = self._links.pop(record.id, None)
        if link is not None:
            await link.close()

    async def restart(self, record: Record) -> None:
        """Start a box that is settled."""
        spec = record.sandbox_spec()
        try:
            await asyncio.wait_for(self._start(record), spec.start_timeout)
        except (sdk.BoxliteError, asyncio.TimeoutError) as error:
            raise explain(error, spec.name, spec.image, await self.console(record)) from error

    async def _start(self, record: Record) -> None:
        await self.runtime.start(record.data["box"])
        await self.link(record)

    # --- removing

    async def destroy(self, record: Record) -> None:
        await self.runtime.remove(record.data["box"])
        await self.close_link(record)
        self._opening.pop(record.id, None)
        Notes(record.id).remove()

    async def is_unwanted(self, record: Record) -> bool:
        """A box whose lease ran out."""
        state = await self.runtime.state(record.data["box"])
        lease_over = EXIT_CODES["lease"]
        return state is not None and not state.running and state.exit_code == lease_over

    async def sweep(self) -> None:
        await super().sweep()
        await self.snapshot_keeper.sweep()

    # --- doctor

    async def diagnose(self) -> Sequence[Diagnosis]:
        if remote():
            return [await self._diagnose_server()]
        try:
            _ = self.runtime
        except SandboxError as error:
            return [Diagnosis(False, "BoxLite cannot be used here", str(error))]
        version = importlib.metadata.version("boxlite")
        return [
            Diagnosis(True, f"boxlite {version} is installed"),
            await boot_check(self.backend, version, self._boot, timeout=boot_timeout()),
        ]

    async def _diagnose_server(self) -> Diagnosis:
        url = os.environ["BOXLITE_REST_URL"]
        try:
            await self.runtime.state("sandbox-kernel-doctor")
        except (SandboxError, sdk.BoxliteError, asyncio.TimeoutError) as error:
            fix = "Check BOXLITE_REST_URL and BOXLITE_API_KEY."
            return Diagnosis(False, f"the BoxLite server {url} does not answer: {error}", fix)
        return Diagnosis(True, f"the BoxLite server {url} answers")

    async def _boot(self) -> None:
        """Boot a tiny VM, run a command in it, and remove it."""
        name = f"sandbox-kernel-doctor-{secrets.token_hex(4)}"
        layout = await asyncio.to_thread(tiny_layout, data_dir() / "tiny-image")
        box_id = ""
        limit = max(_BOOT_MARGIN, boot_timeout() - _BOOT_MARGIN)
        try:
            box_id = await self.runtime.create(
                name, layout_options(layout), entrypoint=WAIT, cpus=1, memory_mib=256
            )
            await asyncio.wait_for(self.runtime.start(name), limit)
            code = await (await self.runtime.execute(name, "/bin/true", [])).wait()
            if code:
                raise SandboxError(f"/bin/true in it ended with exit code {code}")
        except (sdk.BoxliteError, asyncio.TimeoutError) as error:
            why = str(error) or f"it was not up after {limit:g} s."
            raise SandboxError(f"{why} {self.runtime.console(box_id)}") from error
        finally:
            await asyncio.shield(self.runtime.remove(name))

    async def close(self) -> None:
        for link in list(self._links.values()):
            await link.close()
        self._links.clear()


def _sizes(spec: SandboxSpec) -> dict[str, int | None]:
    """For ``Runtime.create``."""
    disk = "BoxLite's disks have whole GiB, image included"
    return {
        "cpus": whole(spec, BACKEND, "cpus", 1, "A VM has whole CPUs"),
        "memory_mib": spec.memory_mib,
        "disk_gib": whole(spec, BACKEND, "disk_mib", 1024, disk),
    }


def _box_name(record: Record) -> str:
    return f"sandbox-kernel-{record.id}"
