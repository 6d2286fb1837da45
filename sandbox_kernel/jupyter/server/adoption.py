"""Adoption: a server takes over the kernels of a dead one, under the same ids, with sessions."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from jupyter_client.multikernelmanager import DuplicateKernelError
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server.base.handlers import APIHandler
from jupyter_server.prometheus.metrics import KERNEL_CURRENTLY_RUNNING_TOTAL
from tornado import web

from sandbox_kernel import host_identity
from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxNotFound
from sandbox_kernel.jupyter.jupyter_internals import (
    ServerInternals,
    set_protocol_version,
    use_kernelspec,
)
from sandbox_kernel.jupyter.kernelspec import PROVISIONER
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.egress import EgressEvents
from sandbox_kernel.jupyter.server.missed_output import last_state, protocol_version
from sandbox_kernel.jupyter.server.saved_kernels import (
    SavedKernel,
    known_servers,
    saved_kernels,
    taking_over,
)
from sandbox_kernel.jupyter.server.server_kernels import ServerKernels
from sandbox_kernel.live_notebooks import LiveNotebook
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.unattended import user_of
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


class AdoptionHandler(APIHandler):
    """``GET /sandbox-kernel/api/adoption`` lists the kernels that the server tried to adopt."""

    def initialize(self, outcomes: list[Outcome]) -> None:
        self._outcomes = outcomes

    @web.authenticated
    def get(self) -> None:
        self.finish(json.dumps([{**asdict(o), "adopted": not o.reason} for o in self._outcomes]))


@dataclass(frozen=True)
class Adopter:
    """Adopts kernels for one server, whose lock has the name ``server``."""

    kernels: ServerKernels
    internals: ServerInternals
    server: str
    timeout: float
    egress: EgressEvents

    async def adopt_all(self) -> list[Outcome]:
        """Take over the kernels of all dead servers that served the same folder."""
        saved = list(saved_kernels())
        away = [k for k in saved if host_identity.where(k.place) == "elsewhere"]
        outcomes = [_refused(k, f"it belongs to {host_identity.in_words(k.place)}") for k in away]
        servers = {k.server for k in saved} | known_servers()
        for server in sorted(servers - {k.server for k in away} - {self.server}):
            with taking_over(server) as dead:
                # What was read before the lock may be another's by now.
                theirs = [k for k in saved_kernels() if k.server == server]
                if dead:
                    outcomes += await asyncio.gather(*map(self._outcome, theirs))
                else:
                    outcomes += [_refused(k, "another server has it") for k in theirs]
        return outcomes

    async def _outcome(self, saved: SavedKernel) -> Outcome:
        try:
            record = Records().load(saved.backend, saved.sandbox)
        except SandboxError as error:
            saved.forget()
            return _refused(saved, str(error))
        if record.id == saved.provisioner.get("sandbox_id") and (user := user_of(record)):
            return _refused(saved, f"process {user} has taken it over, and uses it")
        if saved.root_dir != self.kernels.app.root_dir:
            return _refused(
                saved,
                f"it belongs to a server for {saved.root_dir}; start one there, or end it with "
                f"`sandbox-kernel rm {saved.sandbox}`",
            )
        try:
            async with asyncio.timeout(self.timeout):
                await self._adopt(saved)
        except (SandboxGone, SandboxNotFound) as error:
            saved.forget()
            return _refused(saved, str(error))
        except TimeoutError:
            return _refused(saved, f"its sandbox did not answer within {self.timeout:g} s")
        except (SandboxError, DuplicateKernelError, LookupError, OSError, ValueError) as error:
            return _refused(saved, f"{type(error).__name__}: {error}")
        return Outcome(saved.kernel_id, saved.sandbox, saved.backend)

    async def adopt_notebook(self, live: LiveNotebook) -> None:
        """Take over the kernel of a notebook that ``sandbox_kernel.Notebook`` has left. It keeps
        its settings, whatever the kernelspec of its name says here."""
        async with asyncio.timeout(self.timeout):
            await self._adopt(self.saved_of(live), live.kernelspec)

    def saved_of(self, live: LiveNotebook) -> SavedKernel:
        """What the next server would find of such a kernel if it were this server's."""
        known = self.kernels.manager.kernel_spec_manager.find_kernel_specs()
        return SavedKernel(
            kernel_id=live.kernel_id,
            kernel_name=live.kernel_name if live.kernel_name in known else PROVISIONER,
            server=self.server,
            root_dir=self.kernels.app.root_dir,
            provisioner=live.provisioner,
            cwd=live.cwd,
        )

    async def _adopt(self, saved: SavedKernel, kernelspec: Mapping[str, Any] | None = None) -> None:
        multi = self.kernels.manager
        name, wanted = saved.kernel_name, {"kernel_id": saved.kernel_id}
        manager, _, kernel_id = multi.pre_start_kernel(name, wanted)
        manager.kernel_id = kernel_id
        if kernelspec is not None:
            use_kernelspec(manager, kernelspec)
        factory = KernelProvisionerFactory.instance(parent=multi)
        provisioner = factory.create_provisioner_instance(kernel_id, manager.kernel_spec, manager)
        if not isinstance(provisioner, SandboxProvisioner):
            raise SandboxError(f"the kernelspec {name!r} is not one of a sandbox any more")
        await provisioner.load_provisioner_info(saved.provisioner)
        kernel = provisioner.kernel
        assert kernel is not None
        try:
            await run(kernel.record(self.kernels.record_limit))
            recording = await run(kernel.recorded(MAX_RECORDING))
            await self.enter(manager, provisioner, saved)
        except BaseException:
            manager.stop_restarter()
            multi.remove_kernel(kernel_id)
            await provisioner.detach()
            raise
        manager.execution_state = last_state(recording, multi.track_message_type)
        set_protocol_version(manager, protocol_version(recording))
        ours = replace(saved, server=self.server, place=host_identity.here())
        (await self.kernels.add(ours)).due = True
        self.egress.watch(kernel_id, provisioner)
        for session in saved.sessions:
            row = {key: session[key] for key in ("session_id", "path", "name", "type")}
            await self.kernels.app.session_manager.save_session(**row, kernel_id=kernel_id)

    async def enter(
        self, manager: Any, provisioner: SandboxProvisioner, saved: SavedKernel
    ) -> None:
        """Let the server have a kernel that runs already, under its id."""
        manager.provisioner = provisioner
        manager.load_connection_info(saved.provisioner["connection_info"])
        manager.write_connection_file()
        manager.reason = ""
        manager.last_activity = datetime.now(timezone.utc)
        arguments = {"env": self._environment(saved), "cwd": saved.cwd}
        await self.internals.enter_kernel(saved.kernel_id, manager, arguments)
        KERNEL_CURRENTLY_RUNNING_TOTAL.labels(type=manager.kernel_name).inc()

    def _environment(self, saved: SavedKernel) -> dict[str, str]:
        """For restarts of the kernel: this server's environment, as the other is not on disk."""
        if not saved.sessions:
            return dict(os.environ)
        first = saved.sessions[0]
        return dict(self.kernels.app.session_manager.get_kernel_env(first["path"], first["name"]))


def _refused(saved: SavedKernel, reason: str) -> Outcome:
    return Outcome(saved.kernel_id, saved.sandbox, saved.backend, reason)
