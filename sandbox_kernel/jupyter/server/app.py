"""The extension: settings, and what happens when the server starts and stops."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from jupyter_client.session import DELIM
from jupyter_server.extension.application import ExtensionApp
from jupyter_server.services.kernels.kernelmanager import MappingKernelManager
from jupyter_server.utils import ApiPath, ensure_async, to_os_path
from traitlets import Bool, Enum, Float, Integer

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter import hosting, lifecycle
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.adoption import Adopter, Outcome
from sandbox_kernel.jupyter.server.claims import Claim
from sandbox_kernel.jupyter.server.culling import PausingCuller
from sandbox_kernel.jupyter.server.farewell import Bounds, Farewell, Stopped
from sandbox_kernel.jupyter.server.handlers import AdoptionHandler
from sandbox_kernel.jupyter.server.hints import hint
from sandbox_kernel.jupyter.server.kept import KeptKernel
from sandbox_kernel.jupyter.server.replay import Outlet
from sandbox_kernel.jupyter.server.saving import Saver
from sandbox_kernel.jupyter.server.starting import (
    allow_only_sandboxes,
    break_start_errors,
    in_lines,
)
from sandbox_kernel.jupyter.server.websocket import replaying_class
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.backends import backend_names
from sandbox_kernel.sandboxes.left import all_left, in_words
from sandbox_kernel.sandboxes.unsaved import Unsaved

DEATH_EVENTS = "https://sandbox-kernel.example/events/kernel_death/v1"


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
        ["auto", "leave", "pause", "delete"],
        "auto",
        help="What happens to the sandboxes of running kernels when the server is shut down. "
        "leave: they wait for the next server, or for the end of their lease (lease_seconds); "
        "pause: the same, paused, where the backend can; delete: they end, their files saved; "
        "auto: delete if somebody asked the server to end (Ctrl-C, `jupyter server stop`, the quit "
        "button), leave if the service was stopped (SIGTERM).",
    ).tag(config=True)
    max_left = Integer(
        10,
        min=0,
        help="How many kernels may wait for the next server; beyond that, those that have been "
        "idle for longest end. One that has run no cell does not wait.",
    ).tag(config=True)
    max_left_mib = Integer(
        0,
        min=0,
        help="How much memory the kernels that wait for the next server may use in all, in MiB; "
        "0: a quarter of the machine's.",
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

    only = Bool(
        False,
        help="Start no kernel outside of a sandbox, whatever a notebook or a request names. "
        "Terminals are not kernels: see ServerApp.terminals_enabled.",
    ).tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.outcomes: list[Outcome] = []
        self._claim: Claim | None = None
        self._saver: Saver | None = None
        self._kept: dict[str, KeptKernel] = {}
        self._outlets: dict[str, Outlet] = {}
        self._given_up: set[str] = set()
        """Kernels that could not be restarted, which has been said."""
        self._watched: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        """Managers of the kernels that the server listens to, and whether somebody has asked such a
        kernel for more than its name."""
        self._stopped: Stopped | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def manager(self) -> Any:
        assert self.serverapp is not None
        return self.serverapp.kernel_manager

    def initialize_handlers(self) -> None:
        self.handlers.append(
            (r"/sandbox-kernel/api/adoption", AdoptionHandler, {"outcomes": self.outcomes})
        )

    def initialize(self) -> None:  # type: ignore[override]
        app = self.serverapp
        assert app is not None
        assert app.event_logger is not None
        here = isinstance(self.manager, MappingKernelManager)
        if self.only:
            self._allow_only_sandboxes(here)
        super().initialize()
        if not here:
            self.log.info("Kernels run elsewhere (a gateway), so sandbox_kernel has nothing to do.")
            return
        break_start_errors(self.manager)
        self._claim = Claim()
        self._stopped = Stopped(app)
        self._follow_activity()
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
        app.event_logger.register_event_schema(Path(__file__).with_name("kernel_death.yaml"))
        lifecycle.observers.append(self)
        self._saver = Saver(
            app.event_logger,
            app.root_dir,
            self._with_paths,
            self._workspace_changed,
            self._say,
            self.log,
        )
        if self.adopt:
            self._adopt_now_or_soon(app.io_loop)
        else:
            self._tell_left()

    def _allow_only_sandboxes(self, here: bool) -> None:
        if not here:
            self.log.critical(
                "The server does not start: SandboxServer.only allows no kernel outside of a "
                "sandbox, and its kernels would run elsewhere (%s), where that cannot be seen to.",
                type(self.manager).__name__,
            )
            raise SystemExit(1)
        allow_only_sandboxes(self.manager)

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
            outcomes = []
        self.outcomes += outcomes
        self._tell_left()
        for outcome in outcomes:
            if outcome.adopted:
                self.log.info("Adopted kernel %s in sandbox %s", outcome.kernel_id, outcome.sandbox)
            else:
                self.log.warning(
                    "Kernel %s in sandbox %s (%s) was not adopted: %s",
                    *(outcome.kernel_id, outcome.sandbox, outcome.backend, outcome.reason),
                )

    def _tell_left(self) -> None:
        waiting = len(all_left(backend_names()))
        if waiting:
            self.log.warning("%s", in_words(waiting))

    async def stop_extension(self) -> None:
        """Called by the server before it shuts all kernels down; a second time if it is told to
        end while it does that."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        policy = self.on_shutdown
        if policy == "auto":
            by_signal = self._stopped is not None and self._stopped.by_signal
            policy = "leave" if by_signal else "delete"
        if self._saver is not None:
            await self._saver.finish()
        farewell = Farewell(self.manager, self.log, self._used)
        ids = list(self._kept)
        left: list[str] = []
        if policy != "delete":
            left, ids = await farewell.choose(ids, Bounds.of(self.max_left, self.max_left_mib))
        await farewell.end(ids)  # while ``ended`` is still told
        if self in lifecycle.observers:
            lifecycle.observers.remove(self)
        await asyncio.gather(*(self._let_go(kernel_id) for kernel_id in left))
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
        name = provisioner.sandbox_name
        hours = provisioner.kernel.handle.spec.lease_seconds / 3600 if provisioner.kernel else 0
        pause = self.on_shutdown == "pause" and not provisioner.paused
        if pause and not provisioner.can_pause:
            self.log.warning(
                "Kernel %s, in sandbox %s, is left running: its backend cannot pause it.",
                *(kernel_id, name),
            )
        try:
            if pause and provisioner.can_pause:
                await provisioner.pause()
            if not provisioner.paused:
                await provisioner.save_or_tell()  # its lease may end before the next server comes
            elif provisioner.saved_workspace is not None and not provisioner.at_rest:
                self.log.warning(
                    "The files of kernel %s are not saved; its sandbox, %s, which is paused, has "
                    "them.",
                    *(kernel_id, name),
                )
            await provisioner.detach()
        except SandboxError as error:
            self.log.warning(
                "Kernel %s, in sandbox %s, is left as it is: %s", kernel_id, name, error
            )
        self.manager.stop_watching_activity(kernel_id)
        self.manager._kernels.pop(kernel_id, None)
        assert self.serverapp is not None
        self.log.info(
            "Kernel %s goes on without the server, in sandbox %s: for %g h at most, or until a "
            "server for %s takes it over. `sandbox-kernel rm %s` ends it.",
            *(kernel_id, name, round(hours, 2), self.serverapp.root_dir, name),
        )

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
        manager.reason = ""
        self._given_up.discard(manager.kernel_id)
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
        if self.on_shutdown in ("leave", "pause") and provisioner.kernel is not None:
            hosting.disown(provisioner.kernel)
        while provisioner.notices and manager.kernel_id in self._outlets:
            self._say(manager.kernel_id, provisioner.notices.pop(0))

    def died(self, provisioner: SandboxProvisioner) -> None:
        if self._ours(provisioner) and self.serverapp is not None:
            # What it says changes with the restart that follows.
            told = provisioner.death, provisioner.obituary
            self.serverapp.io_loop.add_callback(self._died, provisioner, *told)

    def _died(self, provisioner: SandboxProvisioner, cause: str, obituary: str) -> None:
        assert self.serverapp is not None
        assert self.serverapp.event_logger is not None
        kernel_id, workspace = str(provisioner.kernel_id), provisioner.saved_workspace
        if provisioner.parent is not None:
            provisioner.parent.reason = cause  # GET /api/kernels tells it, until it runs again
        outlet = self._outlets.get(kernel_id)
        if outlet is not None and not outlet.voice.heard:
            outlet.voice.say(obituary)
        self.serverapp.event_logger.emit(
            schema_id=DEATH_EVENTS,
            data={
                "kernel_id": kernel_id,
                "sandbox": provisioner.sandbox_name or "",
                "notebook": workspace.notebook if workspace else "",
                "cause": cause,
                "message": obituary,
            },
        )

    async def kept(self, provisioner: SandboxProvisioner, unsaved: Unsaved) -> None:
        if self._ours(provisioner) and self._saver is not None:
            self._saver.tell_unsaved(str(provisioner.kernel_id), unsaved)

    def not_restarted(self, provisioner: SandboxProvisioner, error: SandboxError) -> None:
        kernel_id = str(provisioner.kernel_id)
        outlet = self._outlets.get(kernel_id)
        if self._ours(provisioner) and outlet is not None and kernel_id not in self._given_up:
            self._given_up.add(kernel_id)
            outlet.voice.say(in_lines(f"The kernel could not be restarted. {error}"))

    def _forgotten(self, manager: Any) -> None:
        """The server could not restart a kernel and forgets it: nobody else would end what is left
        of it."""
        assert self.serverapp is not None

        async def clear_away() -> None:
            await ensure_async(manager.cleanup_resources())

        self.serverapp.io_loop.add_callback(clear_away)

    async def ended(self, provisioner: SandboxProvisioner) -> None:
        if not self._ours(provisioner):
            return
        kernel_id = str(provisioner.kernel_id)
        kept, outlet = self._kept.pop(kernel_id, None), self._outlets.pop(kernel_id, None)
        self._given_up.discard(kernel_id)
        if outlet is not None:
            outlet.close()
        if kept is not None:
            kept.forget()

    @property
    def _limit(self) -> int:
        return self.record_mib * 2**20

    def _keep(self, kept: KeptKernel) -> Outlet:
        try:
            kept.save()
        except OSError as error:  # a full disk is no reason to refuse a kernel that runs
            self.log.warning(
                "Kernel %s goes on, but the next server will not find it: %s", kept.kernel_id, error
            )
        self._kept[kept.kernel_id] = kept
        if kept.kernel_id not in self._outlets:
            self._outlets[kept.kernel_id] = Outlet(
                kept.kernel_id,
                lambda: self._kernel(kept.kernel_id),
                self._limit,
                partial(self._hint, kept.kernel_id),
            )
        return self._outlets[kept.kernel_id]

    def _kernel(self, kernel_id: str) -> SandboxedKernel | None:
        provisioner = getattr(self.manager._kernels.get(kernel_id), "provisioner", None)
        return provisioner.kernel if isinstance(provisioner, SandboxProvisioner) else None

    def _follow_activity(self) -> None:
        """Hear what the server hears of a kernel until somebody has used it; the server's own
        ``last_activity`` is also changed by what a kernel says at its start. And be told when the
        server gives a kernel up."""
        watch = self.manager.start_watching_activity

        def and_remember(kernel_id: str) -> None:
            watch(kernel_id)
            manager = self.manager._kernels[kernel_id]
            if not isinstance(manager.provisioner, SandboxProvisioner):
                return
            if manager not in self._watched:  # else it was restarted, on other ports
                manager.add_restart_callback(partial(self._forgotten, manager), "dead")
            self._watched.setdefault(manager, False)
            stream = manager._activity_stream
            hear = stream._recv_callback

            def and_note(frames: list[bytes]) -> None:
                hear(frames)
                self._watched[manager] = self._watched[manager] or self._asked_for(frames)

            stream.on_recv(and_note)

        self.manager.start_watching_activity = and_remember

    def _asked_for(self, frames: list[bytes]) -> bool:
        """Whether a kernel says this because somebody has used it. It may be hostile: it can make
        itself worth keeping, and nothing else."""
        try:
            parent = json.loads(frames[frames.index(DELIM) + 3])
            kind = parent.get("msg_type")
        except (ValueError, IndexError, AttributeError, RecursionError):
            return False
        return isinstance(kind, str) and bool(self.manager.track_message_type(kind))

    def _used(self, kernel_id: str) -> bool:
        """Whether a kernel has run a cell, as far as is known. An adopted one has."""
        if any(kernel_id == outcome.kernel_id for outcome in self.outcomes if outcome.adopted):
            return True
        manager = self.manager._kernels.get(kernel_id)
        return manager is None or self._watched.get(manager, True)

    # --- workspaces

    def _with_paths(self) -> dict[str, tuple[SandboxProvisioner, list[str]]]:
        found = {}
        for kernel_id, kept in self._kept.items():
            provisioner = getattr(self.manager._kernels.get(kernel_id), "provisioner", None)
            if isinstance(provisioner, SandboxProvisioner):
                found[kernel_id] = provisioner, [str(s["path"]).strip("/") for s in kept.sessions]
        return found

    def _hint(self, kernel_id: str, error: Mapping[str, Any]) -> str:
        """What to say in a notebook after an error of a cell."""
        provisioner, paths = self._with_paths().get(kernel_id, (None, []))
        if provisioner is None or provisioner.kernel is None or not paths:
            return ""
        assert self.serverapp is not None
        folder = os.path.dirname(to_os_path(ApiPath(paths[0]), self.serverapp.root_dir))
        workspace = provisioner.saved_workspace
        upload = workspace.upload if workspace is not None else "none"
        return in_lines(hint(error, folder, provisioner.kernel.handle.workdir, upload))

    def _say(self, kernel_id: str, text: str) -> None:
        """In the kernel's notebooks."""
        if kernel_id in self._outlets:
            self._outlets[kernel_id].voice.say(in_lines(text))

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
