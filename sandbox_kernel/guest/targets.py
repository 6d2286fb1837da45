"""Targets: what the host's streams lead to. docs/wire.md lists them.

A stream to a channel of a kernel that does not listen yet is kept, with what the client has sent,
until the kernel does.
"""

import socket
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Set

from ..wire.frames import Buffer
from ..wire.mux import Stream
from ..wire.peer import Peer
from ..wire.pump import ByteStream, Flushes, Pump
from .control_server import ControlServer
from .endpoints import CHANNELS
from .kernel_process import Kernel
from .kernel_pump import Conversation, KernelPump
from .listeners import Listeners
from .loop import Loop
from .pace import Pace
from .recorder import Recorder
from .spares import QUIET
from .workspace.helper_process import Helper

_CONNECT_INTERVAL, _MAX_CONNECT_INTERVAL = 0.004, 0.5
_IDLE_CPU = 0.05
"""CPU seconds that a kernel without work uses at most between two looks."""
_KEEP_LIMIT = 1.0
"""Seconds that a connection which the kernel has closed is kept while that kernel still runs."""
_RUNNING = 0.1
"""Seconds after their last message for which cells count as running."""


class Targets:
    """Serves the streams of one session at a time. ``calls`` are the control calls by name."""

    def __init__(self, loop: Loop, kernel: Kernel, recorder: Recorder, helper: Helper) -> None:
        self.calls: Dict[str, Callable[..., Any]] = {}
        self._loop = loop
        self._kernel = kernel
        self._recorder = recorder
        self._helper = helper
        self._controls: Set[ControlServer] = set()
        self._pumps: Dict[Pump, str] = {}  # of the kernel's channels
        self._bulk: Set[Pump] = set()  # of workspace streams
        self._pace = Pace()
        self._waiting: List[_KernelStream] = []
        self._listeners = Listeners(loop.time)
        self._connect_timer: object = None
        self._launched_at = 0.0
        self._used = 0.0  # CPU seconds, by the kernel

    def open(self, peer: Peer, stream: Stream, target: str) -> None:
        """The host has opened a stream."""
        kind, _, rest = target.partition(":")
        if kind == "control":
            self._controls.add(ControlServer(peer, stream, self.calls, self._controls.discard))
        elif kind == "kernel" and rest in CHANNELS:
            self.open_channel(peer, stream, rest)
        elif kind == "recorded" and rest.isdigit() and len(rest) < 16:
            self._recorder.send(peer, stream, int(rest))
        elif kind == "workspace":
            self._open_workspace(peer, stream)
        else:
            stream.reset("there is no target %r here" % target)

    def open_channel(self, peer: Flushes, stream: ByteStream, channel: str) -> None:
        """A client wants a channel of the kernel, through the wire or directly."""
        self._wait(peer, stream, Conversation(channel))
        if channel == "iopub":
            self._listeners.opened(stream)
        self._connect_waiting()

    def close(self) -> None:
        """The session is over."""
        for pump in [*self._pumps, *self._bulk]:
            pump.close("the session is over")
        self._waiting.clear()
        self._listeners.forget()
        self._controls.clear()

    def kernel_launched(self) -> None:
        self._launched_at = self._loop.time()
        self._listeners.launched()
        self._recorder.launched()
        self._connect_waiting()

    def kernel_exited(self) -> None:
        for control in self._controls:
            control.send({"event": "kernel_exited", **self._kernel.status()})

    def stop_waiting(self, waiting: "_KernelStream") -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._listeners.settled(waiting.stream)

    def _wait(
        self, peer: Flushes, stream: ByteStream, conversation: Conversation
    ) -> "_KernelStream":
        waiting = _KernelStream(self, peer, stream, conversation, self._loop.time())
        self._waiting.append(waiting)
        return waiting

    def _keep(self, peer: Flushes, stream: ByteStream, conversation: Conversation) -> None:
        """The kernel has closed a connection, and the next one can go on with it."""
        waiting = self._wait(peer, stream, conversation)
        waiting.after = self._kernel.generation
        if conversation.listens:
            self._listeners.kept(stream)
        self._loop.call_later(_KEEP_LIMIT, self._check_kept, waiting)

    def _check_kept(self, waiting: "_KernelStream") -> None:
        """A kernel that goes on without a client meant to: the client finds that out."""
        closed = waiting.after == self._kernel.generation and self._kernel.running
        if closed and waiting in self._waiting:
            self.stop_waiting(waiting)
            waiting.stream.reset("the kernel has closed the connection")
            waiting.peer.flush_soon()

    def _connect_waiting(self) -> None:
        """Connect the waiting streams to the kernel's sockets. Repeated while the kernel starts;
        how long that may take is the host's decision."""
        for waiting in list(self._waiting):
            if waiting.after == self._kernel.generation:
                continue
            if waiting.channel == "shell" and self._listeners.awaited:
                continue
            try:
                sock = self._kernel.connect(waiting.channel)
            except OSError as error:
                self.stop_waiting(waiting)
                waiting.stream.reset(str(error))
                waiting.peer.flush_soon()
                continue
            if sock is not None:
                self._waiting.remove(waiting)
                peer, stream = waiting.peer, waiting.stream
                own = (self._loop, peer, stream, sock, self._pumps.pop)
                keep = partial(self._keep, peer)
                pump = KernelPump(waiting.conversation, self._listeners, keep, *own)
                self._pumps[pump] = waiting.channel
                waiting.hand_over(pump)
        if self._waiting and self._kernel.running and self._connect_timer is None:
            # The longer it takes, the longer the interval: a stopped kernel may stay so for long.
            waited = self._loop.time() - max(self._waiting[0].since, self._launched_at)
            interval = min(max(_CONNECT_INTERVAL, waited / 50), _MAX_CONNECT_INTERVAL)
            self._connect_timer = self._loop.call_later(interval, self._connect_again)

    def _connect_again(self) -> None:
        self._connect_timer = None
        self._connect_waiting()

    def _open_workspace(self, peer: Peer, stream: Stream) -> None:
        pump: Optional[Pump] = None
        try:
            ours, theirs = socket.socketpair()
            polite = partial(self._polite, peer)
            pump = Pump(self._loop, peer, stream, ours, self._bulk.discard, polite=polite)
            self._bulk.add(pump)
            self._helper.hand_over(theirs)
        except OSError as error:
            if pump is None:
                stream.reset(str(error))
            else:
                pump.close(str(error))

    def calm(self) -> bool:
        """No message has passed for a while, and the kernel did not compute since the last call."""
        used = self._kernel.usage().get("cpu_seconds", 0.0)
        computed, self._used = used - self._used, used
        return self._loop.time() - self._busy_at() > QUIET and computed < _IDLE_CPU

    def _busy_at(self) -> float:
        """When a message last passed. Heartbeats do not count."""
        moved = (pump.moved_at for pump, channel in self._pumps.items() if channel != "hb")
        return max(moved, default=0.0)

    def _polite(self, peer: Peer) -> float:
        """Seconds that files wait before they go on: while cells run, they keep a pace that the
        cells do not feel."""
        now = self._loop.time()
        if now - self._busy_at() >= _RUNNING:
            return 0.0
        took = peer.session.measure(now)
        if took is not None:
            self._pace.measured(took)
        return self._pace.pause


class _KernelStream:
    """A stream to a channel of a kernel that does not listen yet; keeps what the client sends."""

    def __init__(
        self,
        targets: Targets,
        peer: Flushes,
        stream: ByteStream,
        conversation: Conversation,
        since: float,
    ) -> None:
        self.peer = peer
        self.stream = stream
        self.conversation = conversation
        self.channel = conversation.channel
        self.since = since
        self.after = 0
        """The generation of the kernel that has closed the connection, or 0 if none has."""
        self._targets = targets
        self._early: List[Buffer] = []  # bounded by the stream's credit window
        stream.owner = self

    def hand_over(self, pump: Pump) -> None:
        for payload in self._early:
            pump.on_data(payload)

    def on_data(self, payload: Buffer) -> None:
        self._early.append(payload)

    def on_finished(self) -> None:
        self._targets.stop_waiting(self)
        self.stream.finish()

    def on_reset(self, reason: str) -> None:
        self._targets.stop_waiting(self)

    def on_room(self) -> None:
        """Nothing is written to the stream before it is handed over."""
