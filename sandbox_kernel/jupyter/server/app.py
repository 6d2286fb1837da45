"""The extension: its settings, and what it does when the server starts and stops."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from jupyter_server.extension.application import ExtensionApp
from jupyter_server.services.kernels.kernelmanager import MappingKernelManager
from traitlets import Bool, Enum, Float, Integer, Union

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter import observers
from sandbox_kernel.jupyter.jupyter_internals import (
    ACTIVITY,
    ADOPTION,
    CULLING,
    LIVE_NOTEBOOKS,
    ONLY_SANDBOXES,
    SESSIONS,
    START_ERRORS,
    ServerInternals,
)
from sandbox_kernel.jupyter.server.adoption import Adopter, AdoptionHandler, Outcome
from sandbox_kernel.jupyter.server.culling import PausingCuller
from sandbox_kernel.jupyter.server.egress import EgressHandler
from sandbox_kernel.jupyter.server.kernel_events import KernelEvents
from sandbox_kernel.jupyter.server.kernel_start import (
    create_only_sandboxes,
    start_with_readable_errors,
)
from sandbox_kernel.jupyter.server.live_kernels import LiveKernels
from sandbox_kernel.jupyter.server.save_hooks import Saver
from sandbox_kernel.jupyter.server.saved_kernels import ServerLock
from sandbox_kernel.jupyter.server.server_kernels import ServerKernels
from sandbox_kernel.jupyter.server.shutdown import ServerShutdown, StopSignal
from sandbox_kernel.jupyter.server.used_kernels import UsedKernels
from sandbox_kernel.jupyter.server.warm_kernels import WarmKernels
from sandbox_kernel.jupyter.server.websocket import replaying_class
from sandbox_kernel.kernels.spare_plan import LEAST_MEMORY
from sandbox_kernel.sandboxes.backends import backend_names
from sandbox_kernel.sandboxes.unattended import all_left, in_words


@dataclass
class _Running:
    """What there is while the extension is at work."""

    lock: ServerLock
    stop_signal: StopSignal
    internals: ServerInternals
    used: UsedKernels
    kernels: ServerKernels
    saver: Saver
    warm: WarmKernels
    events: KernelEvents


class SandboxServer(ExtensionApp):
    """Jupyter Server makes one when it starts. It leaves kernels outside of sandboxes alone."""

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

    warm = Union(
        [Bool(), Integer(min=0)],
        default_value=True,
        help="How many spare sandboxes (True: one) wait for the next kernels of each kernelspec "
        "that was used within the last hour; from the server's start on, of those used last. Only "
        "of backends on this machine, and only while it has memory to spare. False: none.",
    ).tag(config=True)
    warm_least_memory = Float(
        LEAST_MEMORY,
        min=0.0,
        max=1.0,
        help="The share of the machine's memory that must be available for a spare to be made; "
        "spares are removed when half of it is left.",
    ).tag(config=True)

    only = Bool(
        False,
        help="Start no kernel outside of a sandbox, whatever a notebook or a request names. "
        "Terminals are not kernels: see ServerApp.terminals_enabled.",
    ).tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.outcomes: list[Outcome] = []
        """What became of the kernels of earlier servers."""
        self._served: list[ServerKernels] = []
        """The kernels of this server, once it has any of its own."""
        self._running: _Running | None = None
        self._live: LiveKernels | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def _app(self) -> Any:
        assert self.serverapp is not None
        return self.serverapp

    def initialize_handlers(self) -> None:
        self.handlers += [
            (r"/sandbox-kernel/api/adoption", AdoptionHandler, {"outcomes": self.outcomes}),
            (r"/sandbox-kernel/api/egress", EgressHandler, {"kernels": self._served}),
        ]

    def initialize(self) -> None:  # type: ignore[override]
        manager = self._app.kernel_manager
        here = isinstance(manager, MappingKernelManager)
        internals = ServerInternals(self._app, self.log) if here else None
        if self.only and not (internals and internals.wrap(ONLY_SANDBOXES, create_only_sandboxes)):
            self.log.critical(
                "The server does not start: SandboxServer.only allows no kernel outside of a "
                "sandbox, but it cannot control the kernels of a %s. Use jupyter_server's own "
                "kernel manager, in a version that docs/server.md names, or do not set "
                "SandboxServer.only.",
                type(manager).__name__,
            )
            raise SystemExit(1)
        super().initialize()
        if internals is None:
            self.log.info("Kernels run elsewhere (a gateway), so sandbox_kernel has nothing to do.")
            return
        self._running = running = self._start(internals)
        self._served.append(running.kernels)
        can_adopt = internals.has(ADOPTION)
        if can_adopt:
            self._live = live = LiveKernels(self._adopter(running), running.used, self.log)
            internals.wrap(LIVE_NOTEBOOKS, live.start, live.shared.restart)
        internals.wrap(START_ERRORS, start_with_readable_errors)
        internals.wrap(ACTIVITY, running.used.watch)
        internals.wrap(SESSIONS, self._save_sessions, self._save_sessions)
        if self.on_cull == "pause":
            culler = PausingCuller(manager, self.log)
            internals.wrap(CULLING, culler.cull, culler.shut_down)
        self._replay_missed_output(running.kernels)
        observers.observers.append(running.events)
        if self.adopt and can_adopt:
            self._adopt_now_or_soon()
        else:
            self._report_left_sandboxes()
        self._app.io_loop.add_callback(running.warm.expect_as_before)  # when the server is up

    def _start(self, internals: ServerInternals) -> _Running:
        app, lock = self._app, ServerLock()
        kernels = ServerKernels(app, self.record_mib * 2**20, self.log)
        saver = Saver(kernels)
        outlive = self.on_shutdown in ("leave", "pause")
        warm = WarmKernels(kernels, int(self.warm), self.warm_least_memory)
        events = KernelEvents(kernels, saver, warm, server=lock.server, outlive=outlive)
        used = UsedKernels(kernels, internals)
        return _Running(lock, StopSignal(app), internals, used, kernels, saver, warm, events)

    def _replay_missed_output(self, kernels: ServerKernels) -> None:
        settings = self._app.web_app.settings
        base = settings["kernel_websocket_connection_class"]
        replaying = replaying_class(base, kernels.outputs.get)
        if replaying is None:
            self.log.warning(
                "Output that kernels make while there is no server is not replayed: %s is not a "
                "ZMQChannelsWebsocketConnection.",
                base.__name__,
            )
        else:
            settings["kernel_websocket_connection_class"] = replaying

    async def _save_sessions(self, usual: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the session manager's methods that change sessions."""
        result = await usual(*args, **kwargs)
        if self._running is not None:
            sessions = await self._app.session_manager.list_sessions()
            await self._running.kernels.save_sessions(sessions)
        return result

    # --- kernels of earlier servers

    def _adopt_now_or_soon(self) -> None:
        """Before the first request is served, so that a browser finds its kernel at once; but a
        server that is started inside a running loop cannot wait."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._app.io_loop.run_sync(self._adopt)
        else:
            self._app.io_loop.add_callback(self._adopt)

    async def _adopt(self) -> None:
        running = self._running
        assert running is not None
        try:
            outcomes = await self._adopter(running).adopt_all()
        except (SandboxError, OSError) as error:
            self.log.error("No kernel of an earlier server could be adopted: %s", error)
            outcomes = []
        self.outcomes += outcomes
        self._report_left_sandboxes()
        for one in outcomes:
            if one.reason:
                self.log.warning(
                    "Kernel %s in sandbox %s (%s) was not adopted: %s",
                    *(one.kernel_id, one.sandbox, one.backend, one.reason),
                )
            else:
                running.used.add(one.kernel_id)
                self.log.info("Adopted kernel %s in sandbox %s", one.kernel_id, one.sandbox)

    def _adopter(self, running: _Running) -> Adopter:
        kernels, internals, server = running.kernels, running.internals, running.lock.server
        return Adopter(kernels, internals, server, self.adopt_timeout, running.events.egress)

    def _report_left_sandboxes(self) -> None:
        waiting = len(all_left(backend_names()))
        if waiting:
            self.log.warning("%s", in_words(waiting))

    # --- the end

    async def stop_extension(self) -> None:
        """The server calls this before it shuts all kernels down, and again if it gets another
        request to end meanwhile."""
        if self._running is None:
            return
        if self._stopping is None:
            policy = self.on_shutdown
            if policy == "auto":  # decided now: a later SIGTERM only means that this takes long
                policy = "leave" if self._running.stop_signal.received else "delete"
            if kernels := len(self._running.kernels.saved):
                self.log.info("Kernels in sandboxes: %d. Saving their files ...", kernels)
            self._stopping = asyncio.ensure_future(self._stop(self._running, policy))
        await asyncio.shield(self._stopping)

    async def _stop(self, running: _Running, policy: str) -> None:
        await running.warm.close()
        if self._live is not None:
            await self._live.shared.close()
        await running.saver.finish()
        shutdown = ServerShutdown(running.kernels, running.used)
        ending = list(running.kernels.saved)
        left: list[str] = []
        if policy != "delete":
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            most_mib = self.max_left_mib or memory // 4 // 2**20
            left, ending = await shutdown.choose(ending, self.max_left, most_mib)
        await shutdown.end(ending)  # while the observer still hears of it
        if running.events in observers.observers:
            observers.observers.remove(running.events)
        await shutdown.leave(left, pause=policy == "pause")
        running.kernels.close()
        running.lock.release()
