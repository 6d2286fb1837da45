"""BoxliteClient: the boxes of this user, from any number of processes at once.

BoxLite lets one process use a BOXLITE_HOME, so a broker owns it; see sandboxes/broker. With
BOXLITE_REST_URL set the boxes are a remote server's, and the SDK is used in this process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sandbox_kernel.errors import SandboxError, SandboxUnavailable
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.base import Diagnosis, SandboxHandle
from sandbox_kernel.sandboxes.bootcheck import kvm_problem
from sandbox_kernel.sandboxes.boxlite.backend import BACKEND, CAPABILITIES, BoxHandle, home, remote
from sandbox_kernel.sandboxes.boxlite.image import find_image
from sandbox_kernel.sandboxes.broker.client import BrokeredClient, BrokeredHandle
from sandbox_kernel.sandboxes.broker.server import carry_out
from sandbox_kernel.sandboxes.broker.startup import Place
from sandbox_kernel.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_kernel.sandboxes.boxlite.sdk_client import DirectClient

_FACTORY = "sandbox_kernel.sandboxes.boxlite.sdk_client:DirectClient"
_INSTALL = "pip install 'sandbox-kernel[boxlite]'"


class _Handle(BoxHandle, BrokeredHandle):
    """A box of the broker's."""


class BoxliteClient(BrokeredClient):
    """Boxes of the local broker's, or of the server that BOXLITE_REST_URL names."""

    backend = BACKEND
    capabilities = CAPABILITIES
    _direct: DirectClient | None = None

    def place(self) -> Place:
        return Place(BACKEND, _FACTORY, owned=str(home()))

    def handle(self, record: Record) -> SandboxHandle:
        return self._remote().handle(record) if remote() else _Handle(self.place(), record)

    async def ask(self, kind: str, **values: Any) -> Any:
        if remote():
            return await carry_out(self._remote(), {"kind": kind, **values})
        return await super().ask(kind, **values)

    def _remote(self) -> DirectClient:
        if self._direct is None:
            from sandbox_kernel.sandboxes.boxlite.sdk_client import DirectClient

            self._direct = DirectClient()
        return self._direct

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        self.check(spec)
        find_image(spec)  # an invalid request is refused without a broker
        if importlib.util.find_spec("boxlite") is None:
            raise SandboxUnavailable(f"The backend 'boxlite' needs its SDK: {_INSTALL}.")
        return await super().create(spec)

    async def diagnose(self) -> Sequence[Diagnosis]:
        if importlib.util.find_spec("boxlite") is None:
            return [Diagnosis(False, "boxlite, the SDK, is not installed", _INSTALL)]
        if not remote() and (problem := kvm_problem()) is not None:
            return [problem]
        try:
            return await super().diagnose()
        except (OSError, SandboxError) as error:
            return [Diagnosis(False, "BoxLite cannot be used here", str(error))]

    async def close(self) -> None:
        if self._direct is not None:
            await self._direct.close()
