"""Boxes, through BoxLite's SDK in this process.

Runs in the broker (or, with a remote server, in the user's process). A sandbox is a box whose
main command is our supervisor; everything is done through the one link to it. A record names the
box before it is made, so that a creation that was cut short is found and removed later.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import secrets
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from boxlite import errors as sdk

from sandbox_kernel.errors import (
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    Unsupported,
)
from sandbox_kernel.paths import data_dir
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import creation
from sandbox_kernel.sandboxes.base import Diagnosis, SandboxClient, SnapshotInfo
from sandbox_kernel.sandboxes.bootcheck import boot_check, boot_timeout
from sandbox_kernel.sandboxes.boxlite import relay, supervisor
from sandbox_kernel.sandboxes.boxlite.facts import (
    BACKEND,
    CAPABILITIES,
    PYTHON,
    SNAPSHOTS,
    WORKDIR,
    remote,
    version,
)
from sandbox_kernel.sandboxes.boxlite.handle import DirectHandle
from sandbox_kernel.sandboxes.boxlite.image import Image, find_image
from sandbox_kernel.sandboxes.boxlite.link import BoxLink
from sandbox_kernel.sandboxes.boxlite.notes import Notes
from sandbox_kernel.sandboxes.boxlite.runtime import Runtime, State, explain
from sandbox_kernel.sandboxes.boxlite.sizes import merged
from sandbox_kernel.sandboxes.boxlite.sizes import sizes as vm_sizes
from sandbox_kernel.sandboxes.tinyimage import WAIT, tiny_layout
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.text import printable

_log = logging.getLogger(__name__)

_STOP_TIMEOUT = 30.0
_NOTICE = 5.0
"""Seconds for BoxLite to notice that a VM has ended."""
_POLL = 0.05
_BOOT_MARGIN = 10.0
_REASONS = {
    supervisor.EXIT_STOPPED: "it was stopped",
    supervisor.EXIT_LEASE: "its lease was over: nobody had been attached to it",
    supervisor.EXIT_MAIN: "its main command ended",
}


def _program(module: ModuleType) -> list[str]:
    """Arguments for Python that run a module of ours in a box that does not have it."""
    packed = base64.b64encode(zlib.compress(Path(str(module.__file__)).read_bytes(), 9)).decode()
    code = f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"
    return ["-I", "-S", "-c", code]


_ENTRYPOINT = (PYTHON, *_program(supervisor))
_RELAY = _program(relay)


class DirectClient(SandboxClient):
    """The boxes of this user (or of a remote server). One a process: it owns BOXLITE_HOME."""

    backend = BACKEND
    capabilities = CAPABILITIES

    def __init__(self) -> None:
        self._records = Records()
        self._runtime: Runtime | None = None
        self._links: dict[str, BoxLink] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    @property
    def runtime(self) -> Runtime:
        if self._runtime is None:
            self._runtime = Runtime()
        return self._runtime

    # --- making

    async def create(self, spec: SandboxSpec) -> DirectHandle:
        self.capabilities.check(spec, self.backend)
        chosen = vm_sizes(spec)
        image = await asyncio.to_thread(find_image, spec)
        runtime = self.runtime
        await self.sweep()

        async def make(name: str) -> str:
            return await runtime.create(name, image, entrypoint=_ENTRYPOINT, **chosen)

        return await self._make(spec, make)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> DirectHandle:
        kept = self._snapshot(snapshot)
        whole = merged(kept.sandbox_spec(), spec, snapshot)
        await self.sweep()

        async def make(name: str) -> str:
            return await self.runtime.clone(kept.data["box"], name)

        return await self._make(whole, make)

    async def _make(self, spec: SandboxSpec, make: Any) -> DirectHandle:
        record = Record(self.backend, spec.name, secrets.token_hex(6), spec.to_dict())
        record.data["box"] = f"sandbox-kernel-{record.id}"
        creation.begin(record)
        self._records.reserve(record)
        try:
            await asyncio.wait_for(self._start_new(record, make), spec.start_timeout)
        except BaseException as error:
            console = await asyncio.shield(self._clear_away(record))
            if isinstance(error, Exception):
                raise explain(error, spec.name, spec.image, console) from error
            raise
        return DirectHandle(self, record)

    async def _start_new(self, record: Record, make: Any) -> None:
        record.data["box_id"] = await make(record.data["box"])
        self._records.save(record)
        await self._start(record)
        creation.finish(record)
        self._records.save(record)

    async def _clear_away(self, record: Record) -> str:
        """Remove a box that did not come to be; the end of its console."""
        console = await self.console(record)
        try:
            await self._destroy(record)
        except SandboxError as error:
            _log.warning("%s", error)  # its record stays, so the next sweep tries again
        return console

    # --- using

    async def link(self, record: Record) -> BoxLink:
        """The way to a box that runs, made if there is none yet. SandboxGone if it has ended."""
        async with self._opening.setdefault(record.id, asyncio.Lock()):
            link = self._links.get(record.id)
            if link is not None and not link.closed.is_set():
                return link
            state = await self.runtime.state(record.data["box"])
            if state is None or not state.running:
                raise self.gone(record, state)
            spec = record.sandbox_spec()
            try:
                carrier = await self.runtime.execute(record.data["box"], PYTHON, _RELAY)
            except sdk.BoxliteError as error:
                state = await self.runtime.state(record.data["box"])
                if state is None or not state.running:
                    raise self.gone(record, state) from None
                raise explain(error, spec.name, spec.image, "") from error
            link = BoxLink(carrier, record.name, lambda: self._why_lost(record))
            try:
                await link.opened(spec.start_timeout)
            except BaseException:
                await link.close()
                raise
            link.configure(spec.lease_seconds, spec.env, WORKDIR)
            self._links[record.id] = link
            return link

    async def _why_lost(self, record: Record) -> SandboxError:
        """Asked when a link breaks: has the box ended, or is it only the link?"""
        deadline = time.monotonic() + _NOTICE
        while True:
            state = await self.runtime.state(record.data["box"])
            if state is None or not state.running:
                return self.gone(record, state)
            if time.monotonic() > deadline:
                return SandboxError(
                    f"The way to sandbox {record.name!r} broke; its commands were ended."
                )
            await asyncio.sleep(_POLL)

    def gone(self, record: Record, state: State | None) -> SandboxGone:
        message = f"Sandbox {record.name!r} has ended: {self.reason(record, state)}."
        if state is None:
            return SandboxGone(message)
        if self._unexplained(record, state) and (console := self.runtime.console(state.id)):
            message += f" Its console ends: {console}"
        return SandboxGone(
            f"{message} Restart its kernel to start it again with its files, or remove it with "
            f"`sandbox-kernel rm {record.name}`."
        )

    @staticmethod
    def _unexplained(record: Record, state: State) -> bool:
        return state.exit_code not in _REASONS and not Notes(record.id).read("ended")

    def reason(self, record: Record, state: State | None) -> str:
        """Why a box has ended, in words."""
        if state is None:
            return "it was removed"
        noted = Notes(record.id).read("ended")
        if noted:
            return noted
        code = state.exit_code
        if code in _REASONS:
            return _REASONS[code]
        return "its VM was killed or crashed" + (f" (exit code {code})" if code else "")

    async def console(self, record: Record) -> str:
        state = await self.runtime.state(record.data["box"])
        return self.runtime.console(state.id) if state is not None else ""

    async def ended(self, record: Record) -> None:
        """Wait until a box that was told to end has ended; make it end if it does not."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        while True:
            state = await self.runtime.state(record.data["box"])
            if state is None:
                break
            if not state.running:
                await self._settle(record, state)
                break
            if time.monotonic() > deadline:
                await self.runtime.stop(record.data["box"], _STOP_TIMEOUT)
                break
            await asyncio.sleep(_POLL)
        await self._close_link(record)

    async def _settle(self, record: Record, state: State) -> None:
        """Make sure that nothing of an ended box runs, and that BoxLite knows that it has ended."""
        if state.stale:
            await self.runtime.stop(record.data["box"], _STOP_TIMEOUT)
        else:
            await self.runtime.finish(state.id)

    async def _close_link(self, record: Record) -> None:
        link = self._links.pop(record.id, None)
        if link is not None:
            await link.close()

    async def restart(self, record: Record) -> None:
        """Start a box that has stopped. No error if it runs."""
        state = await self.runtime.state(record.data["box"])
        if state is None:
            raise self.gone(record, state)
        if state.running:
            return
        await self._close_link(record)
        await self._settle(record, state)
        Notes(record.id).clear("ended")
        spec = record.sandbox_spec()
        try:
            await asyncio.wait_for(self._start(record), spec.start_timeout)
        except (sdk.BoxliteError, asyncio.TimeoutError) as error:
            raise explain(error, spec.name, spec.image, await self.console(record)) from error

    async def _start(self, record: Record) -> None:
        await self.runtime.start(record.data["box"])
        await self.link(record)

    # --- finding and removing

    async def get(self, name: str) -> DirectHandle:
        return DirectHandle(self, self._records.load(self.backend, name))

    async def list(self) -> list[str]:
        return [record.name for record in self._records.list(self.backend)]

    async def remove(self, name: str) -> None:
        record = await creation.settled(self._records, self.backend, name)
        if record is None:
            return
        # A removal that was begun is carried through, also if the caller is cancelled.
        await asyncio.shield(self._destroy(record))

    async def _destroy(self, record: Record) -> None:
        await self.runtime.remove(record.data["box"])
        await self._close_link(record)
        self._opening.pop(record.id, None)
        Notes(record.id).remove()
        self._records.delete(record.backend, record.name)

    async def sweep(self) -> None:
        """Remove what nobody wants: boxes and snapshots whose creation was cut short, and boxes
        whose lease ran out. Called by ``create``; never raises for a single one."""
        for record in (*self._records.list(self.backend), *self._records.list(SNAPSHOTS)):
            try:
                if record.where == "elsewhere":
                    continue
                if creation.cut_short(record) or await self._lease_over(record):
                    await self._destroy(record)
            except (OSError, SandboxError, sdk.BoxliteError) as error:
                _log.warning("Sandbox %s could not be cleared away: %s", record.name, error)

    async def _lease_over(self, record: Record) -> bool:
        if record.backend == SNAPSHOTS:
            return False
        state = await self.runtime.state(record.data["box"])
        if state is None or state.running:
            return False
        return state.exit_code == supervisor.EXIT_LEASE

    # --- snapshots

    async def snapshot(self, record: Record, name: str) -> SnapshotInfo:
        state = await self.runtime.state(record.data["box"])
        if state is None:
            raise self.gone(record, state)
        if state.running:
            raise Unsupported(
                f"Sandbox {record.name!r} runs, and BoxLite's snapshot of a running box is not of "
                f"one point in time: later writes show in it. Stop the sandbox first."
            )
        await self._settle(record, state)
        await self.sweep()
        kept = Record(SNAPSHOTS, name, secrets.token_hex(6), record.spec)
        kept.data["box"] = f"sandbox-kernel-{kept.id}"
        kept.data["sandbox"] = record.name
        creation.begin(kept)
        self._records.reserve(kept)
        try:
            await self.runtime.clone(record.data["box"], kept.data["box"])
            creation.finish(kept)
            self._records.save(kept)
        except BaseException as error:
            await asyncio.shield(self._clear_away(kept))
            if isinstance(error, sdk.BoxliteError):
                raise SandboxError(
                    f"No snapshot of sandbox {record.name!r} could be made: {printable(str(error))}"
                ) from error
            raise
        return _snapshot_info(kept)

    def _snapshot(self, name: str) -> Record:
        kept = self._records.load(SNAPSHOTS, name)
        if creation.unfinished(kept):
            raise SandboxNotFound(
                f"The snapshot {name!r} is not whole: it is being made, or its making was cut "
                f"short. Wait for it, or make it anew."
            )
        return kept

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        return [
            _snapshot_info(kept)
            for kept in self._records.list(SNAPSHOTS)
            if not creation.unfinished(kept)
        ]

    async def remove_snapshot(self, name: str) -> None:
        with contextlib.suppress(SandboxNotFound):
            await asyncio.shield(self._destroy(self._records.load(SNAPSHOTS, name)))

    # --- doctor

    async def diagnose(self) -> Sequence[Diagnosis]:
        if remote():
            return [await self._diagnose_server()]
        try:
            _ = self.runtime
        except SandboxError as error:
            return [Diagnosis(False, "BoxLite cannot be used here", str(error))]
        return [
            Diagnosis(True, f"boxlite {version()} is installed"),
            await boot_check(self.backend, version(), self._boot, timeout=boot_timeout()),
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
                name, Image(layout=layout), entrypoint=WAIT, cpus=1, memory_mib=256
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


def _snapshot_info(kept: Record) -> SnapshotInfo:
    return SnapshotInfo(kept.name, BACKEND, str(kept.data["sandbox"]), kept.created, memory=False)
