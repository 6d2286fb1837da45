"""The base of backends for hosted services.

All machines of an account see its sandboxes. One that another machine made has a record that is
never stored, with ``elsewhere`` in its data; ``SANDBOX_KERNEL_LABEL`` says whose belong together.
A backend subclasses HostedClient and implements ``look_up`` in addition to what a RecordingClient
needs; its handles subclass HostedHandle.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sandbox_kernel.errors import ExecFailed, SandboxError, SandboxNotFound
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.base import GUEST_PATH
from sandbox_kernel.sandboxes.bounded_stream import BufferedStream
from sandbox_kernel.sandboxes.recording_client import RecordedHandle, RecordingClient
from sandbox_kernel.spec import SandboxSpec, check_name

_log = logging.getLogger(__name__)

WhyBroken = Callable[[BaseException | None], Awaitable[SandboxError]]
"""Gives the error for a stream that ended early, by whatever error of the SDK."""
_AGENT_GRACE = 30 * 86400.0
_MOST_PAUSE = 300.0
_START_TIMEOUT = 60.0
_CLOSE_TIMEOUT = 20.0


def label() -> str:
    """The label of sandboxes that belong together. Each backend checks it for its service."""
    return os.environ.get("SANDBOX_KERNEL_LABEL", "default")


class HostedHandle(RecordedHandle):
    """A sandbox at a service, which this machine or another one has made."""

    python = "python3"

    @property
    def agent_lease(self) -> float:
        """The service pauses the sandbox at the end of its lease; the agent must not end first."""
        return self.spec.lease_seconds + _AGENT_GRACE

    @abstractmethod
    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file anywhere in the sandbox, in one request; folders on the way are made."""

    async def install_guest(self, zipapp: bytes) -> None:
        await self.write_file(GUEST_PATH, zipapp)

    def _stored(self) -> Record | None:
        return self._record if self._record.data.get("elsewhere") else super()._stored()

    def _note(self, **facts: Any) -> None:
        if self._record.data.get("elsewhere"):
            self._record.data.update(facts)
        else:
            super()._note(**facts)


class HostedStream(BufferedStream):
    """A running command, once ``started`` has returned.

    In addition to what BufferedStream says, a subclass's ``_task`` sets ``_started`` when the
    command runs (then ``_runs`` is true), or when it will not; ``_refused`` may say why.
    """

    _task: asyncio.Task[None]
    _runs = False
    _refused = ""

    def __init__(self, sandbox: str, why_broken: WhyBroken) -> None:
        super().__init__()
        self._sandbox = sandbox
        self._why_broken = why_broken
        self._started = asyncio.Event()

    @abstractmethod
    async def _tell(self, order: str, *numbers: int) -> None:
        """Have ``signal``, ``resize`` or ``kill`` done to the command."""

    @abstractmethod
    async def _hang_up(self) -> None:
        """Free what ``close`` has no use for any more."""

    async def started(self, problem: str) -> None:
        """Wait until the command runs. If it does not, close the stream and raise: ExecFailed,
        which begins with ``problem``, if the command cannot be run."""
        try:
            await asyncio.wait_for(self._started.wait(), _START_TIMEOUT)
        except TimeoutError as error:
            self._failure = self._failure or await self._reason(error)
        except BaseException:
            await asyncio.shield(self.close())
            raise
        if not self._runs:
            await asyncio.shield(self.close())
            raise self._failure or ExecFailed(f"{problem}: {self._refused}")

    async def _reason(self, error: BaseException | None) -> SandboxError:
        try:
            return await self._why_broken(error)
        except SandboxError as problem:  # the reason cannot be found out
            return problem

    async def send_signal(self, signum: int) -> None:
        if self._runs and not self._over.is_set():
            await self._tell("signal", int(signum))

    async def resize(self, rows: int, columns: int) -> None:
        if self._runs and not self._over.is_set():
            await self._tell("resize", int(rows), int(columns))

    async def close(self) -> None:
        """Ends the command, also if the connection to it is gone: a service may let it run on."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._code is None or not self._task.done():
                await asyncio.wait_for(self._tell("kill"), _CLOSE_TIMEOUT)
        except Exception as error:  # noqa: BLE001  (the sandbox may have ended, too)
            _log.debug("Sandbox %s: ending a command failed: %s", self._sandbox, error)
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._hang_up()


H = TypeVar("H", bound=HostedHandle)


class HostedClient(RecordingClient[H]):
    """The sandboxes of an account that carry our label."""

    hosted = True

    @abstractmethod
    async def look_up(self, name: str) -> Record | None:
        """The record of a sandbox that another machine made, by its name or id: ``elsewhere``."""

    def has_our_label(self, record: Record) -> bool:
        """For services whose sandboxes carry the label in their names."""
        return True

    def recorded(self, name: str) -> Record | None:
        """This machine's record of a sandbox, by its name or by the service's id."""
        check_name(name)
        try:
            found = [self.records.load(self.backend, name)]
        except SandboxNotFound:
            found = [record for record in self.records.list(self.backend) if record.id == name]
        return next(filter(self.has_our_label, found), None)

    async def get(self, name: str) -> H:
        """By its name, or by the service's id. Also one that another machine has made."""
        record = self.recorded(name) or await self.look_up(name)
        if record is None:
            raise SandboxNotFound(
                f"No sandbox named {name!r} in the backend {self.backend!r}. "
                f"`sandbox-kernel ps` lists what there is."
            )
        if not record.id:
            raise SandboxNotFound(
                f"Sandbox {name!r} is being made, or was left half-made; remove it with "
                f"`sandbox-kernel rm {name}`."
            )
        return self.handle(record)

    async def remove(self, name: str) -> None:
        record = self.recorded(name)
        if record is not None:
            await super().remove(record.name)
        elif (foreign := await self.look_up(name)) is not None:
            await asyncio.shield(self.destroy(foreign))
            self.removed(foreign)

    def record_elsewhere(self, name: str, id_: str, created: float, **data: Any) -> Record:
        """For ``look_up``."""
        spec = SandboxSpec(name=name, image=data.pop("image", None))
        data["elsewhere"] = True
        return Record(self.backend, name, id_, spec.to_dict(), created=created, data=data)


class LeaseRenewal:
    """Calls ``renew``, which may raise a SandboxError, in time while streams to a sandbox are
    open."""

    def __init__(self, name: str, seconds: float, renew: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._seconds = seconds
        self._renew = renew
        self._streams = 0
        self._renewing: asyncio.Task[None] | None = None
        self._renewed = time.monotonic()

    def attach(self) -> Callable[[], None]:
        """Renew until the function that this returns is called for every stream."""
        self._streams += 1
        if self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._keep_renewing())

        def detach() -> None:
            self._streams -= 1
            if not self._streams and self._renewing is not None:
                self._renewing.cancel()
                self._renewing = None

        return detach

    def restarted(self) -> None:
        """The sandbox has a whole lease."""
        self._renewed = time.monotonic()

    @property
    def ran_out(self) -> bool:
        """Whether a lease in use was not renewed in time: this machine slept, or was offline."""
        return self._streams > 0 and time.monotonic() - self._renewed > self._seconds

    async def _keep_renewing(self) -> None:
        while True:
            try:
                await self._renew()
                self.restarted()
                pause = self._seconds / 3
            except SandboxError as error:
                _log.debug("sandbox %s: cannot renew its lease: %s", self._name, error)
                pause = min(self._seconds / 10, 10.0)
            await asyncio.sleep(min(pause, _MOST_PAUSE))
