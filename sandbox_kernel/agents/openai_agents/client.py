"""SandboxKernelClient: makes, resumes and deletes sessions whose sandboxes any backend makes.

A session has one sandbox, named after it, from its start until ``delete``. ``resume`` makes no
second one: a sandbox that exists is used, and only if the backend knows that there is none is
another one made, by the same name. Any other failure is raised.
"""

from __future__ import annotations

import uuid

from agents.sandbox._mount_security import redact_mount_error_data
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.dependencies import Dependencies
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.sandbox_client import BaseSandboxClient
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot

from sandbox_kernel.agents.openai_agents import options as settings
from sandbox_kernel.agents.openai_agents.options import (
    SandboxKernelClientOptions,
    SandboxKernelSessionState,
)
from sandbox_kernel.agents.openai_agents.session import SandboxKernelSession
from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.tunnel.background import run


class SandboxKernelClient(BaseSandboxClient[SandboxKernelClientOptions | None]):
    """For ``SandboxRunConfig(client=...)``. Its own ``options`` are for runs that give none, and
    for what a resumed session's state does not keep. May be used from any event loop."""

    backend_id = settings.BACKEND_ID
    supports_default_options = True

    def __init__(
        self,
        *,
        options: SandboxKernelClientOptions | None = None,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        self._options = options
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies
        self._backends: dict[str, SandboxClient] = {}

    @redact_mount_error_data
    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: SandboxKernelClientOptions | None = None,
    ) -> SandboxSession:
        """A session. Its sandbox is made when it starts, or is first used; what the backend
        cannot enforce is refused here."""
        wanted = options or self._options or SandboxKernelClientOptions()
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        kept, withheld = settings.kept(wanted)
        session_id = uuid.uuid4()
        state = SandboxKernelSessionState(
            session_id=session_id,
            manifest=manifest,
            snapshot=resolve_snapshot(snapshot, str(session_id)),
            exposed_ports=wanted.exposed_ports,
            backend=wanted.backend,
            settings=kept,
            withheld=withheld,
            pause_on_exit=wanted.pause_on_exit,
        )
        backend = self._backend(wanted.backend)
        if wanted.pause_on_exit and not backend.capabilities.pause:
            raise SpecRefused(
                f"The session was not made: the backend {wanted.backend!r} cannot pause a sandbox, "
                f"so pause_on_exit must be left out."
            )
        backend.check(settings.spec_for(state, wanted, backend.capabilities))
        return self._session(state, wanted)

    @redact_mount_error_data
    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """The session of a state, also one of another process that has died."""
        if not isinstance(state, SandboxKernelSessionState):
            raise TypeError("SandboxKernelClient.resume expects a SandboxKernelSessionState")
        state.assert_path_grants_rebound()
        return self._session(state, self._options)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Remove the session's sandbox with its files, also a paused one. Idempotent."""
        inner = session._inner
        if not isinstance(inner, SandboxKernelSession):
            raise TypeError("SandboxKernelClient.delete expects a SandboxKernelSession")
        await inner.remove()
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, SandboxKernelSessionState)

    async def close(self) -> None:
        """Free the connections to hosted services. Sandboxes live on."""
        while self._backends:
            await run(self._backends.popitem()[1].close())

    def _backend(self, name: str) -> SandboxClient:
        if name not in self._backends:
            self._backends[name] = load_backend(name)
        return self._backends[name]

    def _session(
        self, state: SandboxKernelSessionState, options: SandboxKernelClientOptions | None
    ) -> SandboxSession:
        inner = SandboxKernelSession(
            state=state, backend=self._backend(state.backend), options=options
        )
        return self._wrap_session(inner, instrumentation=self._instrumentation)
