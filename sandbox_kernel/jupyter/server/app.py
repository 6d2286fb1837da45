"""The extension: settings, and what happens when the server starts and stops."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from jupyter_server.extension.application import ExtensionApp
from jupyter_server.services.kernels.kernelmanager import MappingKernelManager
from traitlets import Bool, Enum, Float, Integer

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter import hosting, lifecycle
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.adoption import Adopter, Outcome
from sandbox_kernel.jupyter.server.claims import Claim
from sandbox_kernel.jupyter.server.culling import PausingCuller
from sandbox_kernel.jupyter.server.handlers import AdoptionHandler
from sandbox_kernel.jupyter.server.kept import KeptKernel
from sandbox_kernel.jupyter.server.replay import Outlet
from sandbox_kernel.jupyter.server.saving import Saver
from sandbox_kernel.jupyter.server.websocket import replaying_class
from sandbox_kernel.kernels import SandboxedKernel


class SandboxServer(ExtensionApp):
    """Jupyter Server makes one, when it starts. Of the kernels it sees only those in sandboxes."""

    name = "sandbox_kernel"

    adopt = Bool(True, help="Go on with the kernels of an earlier server for the same folder.").tag(
        config=True
    )
    adopt_timeout = Float(
        60.0, help="Seconds that the server waits at its start for the sandbox of each kernel."
    ).tag(config=True)
    on_shutdown = Enum(
        ["leave", "pause", "delete"],
        "leave",
        help="What happens to the sandboxes of running kernels when the server is shut down: "
        "leave them to the next server, or to the end of their lease (lease_seconds); pause "
        "them, where the backend can; or delete them.",
    ).tag(config=True)
    on_cull = Enum(
        ["pause", "delete"],
        "pause",
        help="What culling does to an idle kernel: pause its sandbox until a client connects, "
        "where the backend can, or shut it down.",
    ).tag(config=True)
    record_mib = Integer(
        16,
        min=0,
        max=256,
        help="How much of a kernel's output is kept in its sandbox, in MiB, for the case that "
        "the server goes away; 0: none.",
    ).tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.outcomes: list[Outcome] = []
        self._claim: Claim | None = None
        self._saver: Saver | None = None
        self._kept: dict[str, KeptKernel] = {}
        self._outlets: dict[str, Outlet] = {}

    @property
    def manager(self) -> Any:
        assert self.serverapp is not None
        return self.serverapp.kernel_manager

    def initialize_handlers(self) -> None:
        self.handlers.append(
            (r"/sandbox-kernel/api/adoption", AdoptionHandler, {"outcomes": self.outcomes})
        )

    def initialize(self) -> None:  # type: ignore[override]
        super().initialize()
        app = self.serverapp
        assert app is not None
        if not isinstance(self.manager, MappingKernelManager):
            self.log.info("Kernels run elsewhere (a gateway), so sandbox_kernel has nothing to do.")
            return
        self._claim = Claim()
        settings = app.web_app.settings
        base = settings["kernel_websocket_connection_class"]
        replaying = replaying_class(base, self._outlets.get)
        if replaying is None:
            self.log.warning(
                "Output that is made while there is no server is not replayed: %s is not a "
                "ZMQChannelsWebsocketConnection.",
                base.__name__,
            )
        else:
            settings["kernel_websocket_connection_class"] = replaying
        self._follow_sessions(app.session_manager)
        if self.on_cull == "pause":
            PausingCuller(self.manager, self.log)
        lifecycle.observers.append(self)
        self._saver = Saver(
            app.event_logger, app.root_dir, self._with_paths, self._workspace_changed, self.log
        )
        if self.adopt:
            self._adopt_now_or_soon(app.io_loop)

    def _adopt_now_or_soon(self, io_loop: Any) -> None:
        """Before the first request is served, so that a browser finds its kernel at once; but a
        server that is started inside a running loop cannot wait."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            io_loop.run_sync(self._adopt)
        else:
            io_loop.add_callback(self._adopt)

    async def _adopt(self) -> None:
        assert self._claim is not None
        adopter = Adopter(
            self.serverapp,
            self._claim.server,
            timeout=self.adopt_timeout,
            record_limit=self._limit,
            keep=self._keep,
        )
        try:
            outcomes = await adopter.adopt_all()
        except (SandboxError, OSError) as error:
            self.log.error("No kernel of an earlier server could be adopted: %s", error)
            return
        self.outcomes += outcomes
        for outcome in outcomes:
            if outcome.adopted:
                self.log.info("Adopted kernel %s in sandbox %s", outcome.kernel_id, outcome.sandbox)
            else:
                self.log.warning(
                    "Kernel %s in sandbox %s (%s) was not adopted: %s",
                    *(outcome.kernel_id, outcome.sandbox, outcome.backend, outcome.reason),
                )

    async def stop_extension(self) -> None:
        """Called by the server before it shuts all kernels down."""
        if self in lifecycle.observers:
            lifecycle.observers.remove(self)
        if self._saver is not None:
            await self._saver.finish()
        if self.on_shutdown != "delete":
            await asyncio.gather(*(self._let_go(kernel_id) for kernel_id in list(self._kept)))
        else:
            for kept in self._kept.values():
                kept.forget()
        for outlet in self._outlets.values():
            outlet.close()
        if self._claim is not None:
            self._claim.release()

    async def _let_go(self, kernel_id: str) -> None:
        manager = self.manager._kernels.get(kernel_id)
        provisioner = getattr(manager, "provisioner", None)
        if manager is None or not isinstance(provisioner, SandboxProvisioner):
            return
        manager.stop_restarter()
        pause = self.on_shutdown == "pause" and not provisioner.paused
        if pause and not provisioner.can_pause:
            self.log.warning("Kernel %s is left running: its backend cannot pause it.", kernel_id)
        try:
            if pause and provisioner.can_pause:
                await provisioner.pause()
            if not provisioner.paused:
                await provisioner.save_or_tell()  # its lease may end before the next server comes
            elif provisioner.saved_workspace is not None and not provisioner.at_rest:
                self.log.warning(
                    "The files of kernel %s are not saved; its sandbox, which is paused, has them.",
                    kernel_id,
                )
            await provisioner.detach()
        except SandboxError as error:
            self.log.warning("Kernel %s is left as it is: %s", kernel_id, error)
        self.manager.stop_watching_activity(kernel_id)
        self.manager._kernels.pop(kernel_id, None)
        self.log.info("Kernel %s goes on without the server", kernel_id)

    # --- kernels of this server, told by the provisioner

    def _ours(self, provisioner: SandboxProvisioner) -> bool:
        return getattr(provisioner.parent, "parent", None) is self.manager

    async def launching(self, provisioner: SandboxProvisioner, kernel: SandboxedKernel) -> None:
        if not self._ours(provisioner) or not self.record_mib:
            return
        if provisioner.connection_info.get("curve_publickey"):
            self.log.warning(
                "Output of kernel %s that is made while there is no server will be lost: its "
                "transport is encrypted, so its sandbox cannot record it.",
                provisioner.kernel_id,
            )
            return
        await kernel.record(self._limit)

    async def launched(self, provisioner: SandboxProvisioner) -> None:
        if not self._ours(provisioner):
            return
        manager = provisioner.parent
        assert manager is not None
        assert self._claim is not None
        assert self.serverapp is not None
        known = self._kept.get(manager.kernel_id)
        self._keep(
            KeptKernel(
                kernel_id=manager.kernel_id,
                kernel_name=manager.kernel_name,
                server=self._claim.server,
                root_dir=self.serverapp.root_dir,
                provisioner=await provisioner.get_provisioner_info(),
                cwd=str(manager._launch_args["cwd"]) if manager._launch_args.get("cwd") else None,
                sessions=known.sessions if known else [],
            )
        )
        if self.on_shutdown != "delete" and provisioner.kernel is not None:
            hosting.disown(provisioner.kernel)

    async def ended(self, provisioner: SandboxProvisioner) -> None:
        if not self._ours(provisioner):
            return
        kernel_id = str(provisioner.kernel_id)
        kept, outlet = self._kept.pop(kernel_id, None), self._outlets.pop(kernel_id, None)
        if outlet is not None:
            outlet.close()
        if kept is not None:
            kept.forget()

    @property
    def _limit(self) -> int:
        return self.record_mib * 2**20

    def _keep(self, kept: KeptKernel) -> Outlet:
        kept.save()
        self._kept[kept.kernel_id] = kept
        if kept.kernel_id not in self._outlets:
            self._outlets[kept.kernel_id] = Outlet(
                kept.kernel_id, lambda: self._kernel(kept.kernel_id), self._limit
            )
        return self._outlets[kept.kernel_id]

    def _kernel(self, kernel_id: str) -> SandboxedKernel | None:
        provisioner = getattr(self.manager._kernels.get(kernel_id), "provisioner", None)
        return provisioner.kernel if isinstance(provisioner, SandboxProvisioner) else None

    # --- workspaces

    def _with_paths(self) -> dict[str, tuple[SandboxProvisioner, list[str]]]:
        found = {}
        for kernel_id, kept in self._kept.items():
            provisioner = getattr(self.manager._kernels.get(kernel_id), "provisioner", None)
            if isinstance(provisioner, SandboxProvisioner):
                found[kernel_id] = provisioner, [str(s["path"]).strip("/") for s in kept.sessions]
        return found

    def _workspace_changed(self, kernel_id: str) -> None:
        kept = self._kept[kernel_id]
        provisioner, _ = self._with_paths()[kernel_id]
        workspace = provisioner.saved_workspace
        kept.provisioner["saved_workspace"] = asdict(workspace) if workspace else None
        kept.save()

    # --- sessions

    def _follow_sessions(self, sessions: Any) -> None:
        """Sessions are kept in memory by the server; what belongs to our kernels is on disk as
        soon as it is there."""
        for name in ("save_session", "update_session"):
            method = getattr(sessions, name)

            async def and_keep(*args: Any, _method: Any = method, **kwargs: Any) -> Any:
                result = await _method(*args, **kwargs)
                await self._keep_sessions(sessions)
                return result

            setattr(sessions, name, and_keep)

    async def _keep_sessions(self, sessions: Any) -> None:
        rows: dict[str, list[dict[str, Any]]] = {}
        for model in await sessions.list_sessions():
            row = {key: model[key] for key in ("path", "name", "type")}
            rows.setdefault(model["kernel"]["id"], []).append({"session_id": model["id"], **row})
        for kernel_id, kept in self._kept.items():
            found = rows.get(kernel_id, [])
            if found != kept.sessions:
                kept.sessions = found
                try:
                    kept.save()
                except OSError as error:
                    self.log.warning("The session of kernel %s is not kept: %s", kernel_id, error)
