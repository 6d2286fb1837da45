"""Adoption: kernels of a server that is gone come back, under the same ids, with their sessions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from jupyter_client.multikernelmanager import DuplicateKernelError
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server._tz import utcnow
from jupyter_server.prometheus.metrics import KERNEL_CURRENTLY_RUNNING_TOTAL

from sandbox_kernel import places
from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxNotFound
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.claims import known_servers, taking_over
from sandbox_kernel.jupyter.server.kept import KeptKernel, all_kept
from sandbox_kernel.jupyter.server.replay import Outlet, last_state, protocol_version
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.left import user_of
from sandbox_kernel.tunnel.background import run

MAX_RECORDING = 256 * 2**20
"""Bytes that an earlier server, with other settings, may have let a sandbox keep."""


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel of an earlier server."""

    kernel_id: str
    sandbox: str
    backend: str
    reason: str = ""
    """Why it was not adopted; empty if it was."""

    @property
    def adopted(self) -> bool:
        return not self.reason

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "adopted": self.adopted}


class Adopter:
    """``keep`` is told of each kernel that was adopted, and gives its outlet."""

    def __init__(
        self,
        serverapp: Any,
        server: str,
        *,
        timeout: float,
        record_limit: int,
        keep: Callable[[KeptKernel], Outlet],
    ) -> None:
        self._app = serverapp
        self._server = server
        self._timeout = timeout
        self._record_limit = record_limit
        self._keep = keep

    async def adopt_all(self) -> list[Outcome]:
        """Take over the kernels of all dead servers that served the same folder."""
        outcomes: list[Outcome] = []
        away = [kept for kept in all_kept() if places.where(kept.place) == "elsewhere"]
        outcomes += [_refused(k, f"it belongs to {places.in_words(k.place)}") for k in away]
        servers = {kept.server for kept in all_kept()} | known_servers()
        servers -= {kept.server for kept in away}
        for server in sorted(servers - {self._server}):
            with taking_over(server) as dead:
                # What was read before the lock may be another's by now.
                theirs = [kept for kept in all_kept() if kept.server == server]
                if dead:
                    outcomes += await asyncio.gather(*(self._outcome(kept) for kept in theirs))
                else:
                    outcomes += [_refused(kept, "another server has it") for kept in theirs]
        return outcomes

    async def _outcome(self, kept: KeptKernel) -> Outcome:
        try:
            record = Records().load(kept.backend, kept.sandbox)
        except SandboxError as error:
            kept.forget()
            return _refused(kept, str(error))
        if record.id == kept.provisioner.get("sandbox_id") and (user := user_of(record)):
            return _refused(kept, f"process {user} has taken it over, and uses it")
        if kept.root_dir != self._app.root_dir:
            return _refused(
                kept,
                f"it belongs to a server for {kept.root_dir}; start one there, or end it with "
                f"`sandbox-kernel rm {kept.sandbox}`",
            )
        try:
            await asyncio.wait_for(self._adopt(kept), self._timeout)
        except (SandboxGone, SandboxNotFound) as error:
            kept.forget()
            return _refused(kept, str(error))
        except asyncio.TimeoutError:
            return _refused(kept, f"its sandbox did not answer within {self._timeout:g} s")
        except (SandboxError, DuplicateKernelError, LookupError, OSError, ValueError) as error:
            return _refused(kept, f"{type(error).__name__}: {error}")
        return Outcome(kept.kernel_id, kept.sandbox, kept.backend)

    async def _adopt(self, kept: KeptKernel) -> None:
        multi = self._app.kernel_manager
        manager, _, kernel_id = multi.pre_start_kernel(
            kept.kernel_name, {"kernel_id": kept.kernel_id}
        )
        manager.kernel_id = kernel_id
        factory = KernelProvisionerFactory.instance(parent=multi)
        provisioner = factory.create_provisioner_instance(
            kernel_id, manager.kernel_spec, parent=manager
        )
        if not isinstance(provisioner, SandboxProvisioner):
            raise SandboxError(
                f"the kernelspec {kept.kernel_name!r} is not one of a sandbox any more"
            )
        await provisioner.load_provisioner_info(kept.provisioner)
        kernel = provisioner.kernel
        assert kernel is not None
        try:
            await run(kernel.record(self._record_limit))
            recording = await run(kernel.recorded(MAX_RECORDING))
            await self._enter(manager, provisioner, kept)
        except BaseException:
            manager.stop_restarter()
            multi._kernels.pop(kernel_id, None)
            await provisioner.detach()
            raise
        manager.execution_state = last_state(recording, multi.track_message_type)
        self._know_protocol(manager, protocol_version(recording))
        self._keep(replace(kept, server=self._server, place=places.here())).due = True
        await self._reopen_sessions(kept)

    async def _enter(self, manager: Any, provisioner: SandboxProvisioner, kept: KeptKernel) -> None:
        """Put the kernel where ``start_kernel`` would have put it."""
        multi, kernel_id = self._app.kernel_manager, kept.kernel_id
        manager.provisioner = provisioner
        manager._launch_args = {"env": self._environment(kept), "cwd": kept.cwd}
        manager._attempted_start = True
        manager.load_connection_info(kept.provisioner["connection_info"])
        manager.write_connection_file()
        await manager._async_post_start_kernel()
        manager.ready.set_result(None)
        manager.reason = ""
        manager.last_activity = utcnow()
        multi._kernels[kernel_id] = manager
        multi._kernel_connections[kernel_id] = 0
        await multi._finish_kernel_start(kernel_id)
        KERNEL_CURRENTLY_RUNNING_TOTAL.labels(type=manager.kernel_name).inc()
        if not multi._initialized_culler:
            multi.initialize_culler()

    def _environment(self, kept: KeptKernel) -> dict[str, str]:
        """For restarts of the kernel. The environment itself is not kept on disk: it is this
        server's."""
        if kept.sessions:
            first = kept.sessions[0]
            env: dict[str, str] = self._app.session_manager.get_kernel_env(
                first["path"], first["name"]
            )
            return env
        return dict(os.environ)

    @staticmethod
    def _know_protocol(manager: Any, version: str) -> None:
        """A busy kernel does not answer the request that a connection would make for this."""
        known: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        known.set_result({"protocol_version": version} if version else {})
        manager._kernel_info_future = known

    async def _reopen_sessions(self, kept: KeptKernel) -> None:
        for session in kept.sessions:
            await self._app.session_manager.save_session(
                session["session_id"],
                path=session["path"],
                name=session["name"],
                type=session["type"],
                kernel_id=kept.kernel_id,
            )


def _refused(kept: KeptKernel, reason: str) -> Outcome:
    return Outcome(kept.kernel_id, kept.sandbox, kept.backend, reason)
