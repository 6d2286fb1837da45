"""The agent: the daemon in the sandbox that owns the kernel and the session.

Connectors hand it their stdin and stdout through its Unix socket; it speaks the wire over the
newest of them. The first host to say HELLO sets the token; whoever comes later must know it, and
may replace it if this agent is a copy (see ``rekey``). The agent outlives every link, and ends
when it is told to or when its lease is over: nobody has been attached for ``lease`` seconds.
"""

import ctypes
import hmac
import json
import os
import signal
import socket
import sys
from collections import deque
from functools import partial
from typing import Any, Callable, Deque, Dict, List, Optional, Set

from .connector import SOCKET
from .control import CallError, ControlServer, Later
from .fdlink import FdLink
from .kernel import CHANNELS, Kernel, LaunchError
from .listeners import ListenerPump, Listeners
from .loop import Loop
from .peer import Peer
from .pump import Pump
from .recorder import MAX_LIMIT, Recorder
from .rekey import MAX_REQUEST, is_request, reseed
from .warmprocess import WarmProcess, kernel_command
from .wire import VERSION, WireError
from .wire.codec import CODECS, make_codec
from .wire.frames import Buffer, FrameDecoder
from .wire.handshake import (
    Hello,
    Welcome,
    current_version,
    decode_hello,
    encode_refuse,
    encode_welcome,
)
from .wire.mux import Stream
from .workspace.process import Helper

_CONNECT_INTERVAL, _MAX_CONNECT_INTERVAL = 0.004, 0.5
_ALIVE_INTERVAL = 5.0
_HELLO_TIMEOUT = 30.0
_MAX_GREETERS = 16
_ACCEPT_PAUSE = 1.0
_PAUSE, _QUIET = 0.008, 0.1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


class Agent:
    def __init__(self, folder: str, lease: float) -> None:
        self.loop = Loop()
        self._folder = folder
        self._lease = lease
        self._token: Optional[str] = None
        self._name = ""
        self._session_id = ""
        self._superseded: Deque[str] = deque(maxlen=64)
        self._peer: Optional[Peer] = None
        self._pumps: Dict[Pump, str] = {}  # of the kernel's channels
        self._bulk: Set[Pump] = set()  # of workspace streams
        self._waiting: List[_KernelStream] = []
        self._listeners = Listeners(self.loop.time)
        self._controls: Set[ControlServer] = set()
        self._greeters: List[_Greeter] = []
        self._attached_at = self.loop.time()
        self._connect_timer: object = None
        self._launched_at = 0.0
        self.kernel = Kernel(self.loop, folder, self._kernel_exited)
        self._recorder = Recorder(
            self.loop, lambda: self.kernel.connect("iopub"), lambda: self.kernel.running
        )
        self._helper = Helper()
        self._calls: Dict[str, Callable[..., Any]] = {
            "info": self._call_info,
            "launch": self._call_launch,
            "signal": self._call_signal,
            "status": self.kernel.status,
            "usage": self.kernel.usage,
            "logs": self.kernel.log.tail,
            "lease": self._call_lease,
            "record": self._call_record,
            "kill": self._call_kill,
            "shutdown": self._call_shutdown,
        }

    def run(self) -> None:
        """Serve until shut down or abandoned."""
        listener = self._listen()
        wakeup = self._watch_signals()
        self.loop.call_later(_ALIVE_INTERVAL, self._every_few_seconds)
        try:
            self.loop.run()
        finally:
            signal.set_wakeup_fd(-1)
            self.kernel.kill()
            self.kernel.warm.close()
            self._helper.close()
            os.unlink(os.path.join(self._folder, SOCKET))
            listener.close()
            wakeup.close()

    def _listen(self) -> socket.socket:
        os.makedirs(self._folder, 0o700, exist_ok=True)
        path = os.path.join(self._folder, SOCKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path + ".new")
        os.chmod(path + ".new", 0o600)
        listener.listen(16)
        listener.setblocking(False)
        # A connector that finds the socket must find it listening.
        os.rename(path + ".new", path)
        self.loop.add_reader(listener.fileno(), self._accept, listener)
        return listener

    def _watch_signals(self) -> socket.socket:
        read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.loop.stop())
        # A link that breaks is an OSError here, no death. Kernels are started with the defaults.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        # Handlers, because a kernel would inherit that these are ignored.
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)

        def woken() -> None:
            read.recv(4096)
            self._reap()

        self.loop.add_reader(read.fileno(), woken)
        self._wakeup_write = write
        return read

    def _reap(self) -> None:
        """Some process has ended, or was stopped."""
        self.kernel.reap()
        self._helper.go_on()
        # One that nobody knows may be the kernel that is being launched: it must tell how it ended.
        if not self.kernel.launching:
            _reap_orphans({self.kernel.pid, self.kernel.warm.pid})

    def _every_few_seconds(self) -> None:
        if self._peer is not None and self._peer.link is not None:
            self._attached_at = self.loop.time()
            self._peer.check_alive()
        elif self.loop.time() - self._attached_at > self._lease:
            print("nobody was attached for %g s: the lease is over" % self._lease, flush=True)
            self.loop.stop()
        self.loop.call_later(min(_ALIVE_INTERVAL, self._lease / 4), self._every_few_seconds)

    # --- links

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # No descriptor is left for it. Asking at once again and again would not help.
            print("a connector must wait:", error, flush=True)
            self.loop.remove_reader(listener.fileno())
            self.loop.call_later(
                _ACCEPT_PAUSE, self.loop.add_reader, listener.fileno(), self._accept, listener
            )
            return
        if len(self._greeters) >= _MAX_GREETERS:
            self._greeters[0].close()
        self._greeters.append(_Greeter(self, connection))

    def greeter_done(self, greeter: "_Greeter") -> None:
        if greeter in self._greeters:
            self._greeters.remove(greeter)

    def welcome(self, hello: Hello, link: FdLink, greeter: "_Greeter") -> None:
        """A connector's host has said HELLO."""
        refusal = self._refusal(hello)
        if refusal:
            link.write(greeter.outgoing.encode([encode_refuse(refusal)]))
            link.close()
            return
        if hello.session != self._session_id or self._peer is None:
            self._new_session(hello.session)
        peer = self._peer
        assert peer is not None
        welcome = Welcome(VERSION, self._session_id, peer.session.received)
        link.write(greeter.outgoing.encode([encode_welcome(welcome)]))
        self._attached_at = self.loop.time()
        try:
            peer.attach(
                link,
                peer_received=hello.received,
                decoder=greeter.decoder,
                incoming=greeter.incoming,
                outgoing=greeter.outgoing,
                checked=hello.checked,
            )
        except WireError as error:
            link.close()
            self._session_broken(str(error))

    def _refusal(self, hello: Hello) -> str:
        if not current_version(hello):
            return "version"
        if self._token is None:
            self._token = hello.token
        if not hmac.compare_digest(self._token.encode(), hello.token.encode()):
            return "token"
        if hello.session in self._superseded:
            return "superseded"
        if hello.resume and hello.session != self._session_id:
            return "unknown-session"
        return ""

    def rekey(self, request: Any) -> str:
        """This agent is a copy: it leaves the session of the original to the original, and takes
        a token, a name and random numbers of its own. The answer is "ok", or why not."""
        if not is_request(request):
            return "malformed"
        known = self._token
        if known is None or not hmac.compare_digest(known.encode(), request["token"].encode()):
            return "token"
        reseed(bytes.fromhex(request["entropy"]))
        self._token = request["new_token"]
        self._name = request["name"]
        if self._peer is not None:
            self._session_broken("this is the sandbox %r now" % self._name)
        self._session_id = ""
        self._superseded.clear()
        self._attached_at = self.loop.time()
        for greeter in list(self._greeters):
            greeter.close()
        return "ok"

    def _new_session(self, session_id: str) -> None:
        self._end_session()
        if self._session_id:
            self._superseded.append(self._session_id)
        self._session_id = session_id
        self._peer = peer = Peer(self.loop, host=False)
        peer.on_opened = self._opened
        peer.on_broken = self._session_broken

    def _session_broken(self, why: str) -> None:
        print("the session is over:", why, flush=True)
        self._end_session()
        self._peer = None
        self._session_id = ""

    def _end_session(self) -> None:
        if self._peer is None:
            return
        self._peer.detach()
        for pump in [*self._pumps, *self._bulk]:
            pump.close("the session is over")
        self._waiting.clear()
        self._listeners.forget()
        self._controls.clear()
        self._peer.mux.close()

    # --- streams

    def _opened(self, stream: Stream, target: str) -> None:
        peer = self._peer
        assert peer is not None
        kind, _, rest = target.partition(":")
        if kind == "control":
            self._controls.add(ControlServer(peer, stream, self._calls, self._controls.discard))
        elif kind == "kernel" and rest in CHANNELS:
            waiting = _KernelStream(self, stream, rest)
            self._waiting.append(waiting)
            if waiting.listens:
                self._listeners.opened(stream)
            self._connect_waiting()
        elif kind == "recorded" and rest.isdigit() and len(rest) < 16:
            self._recorder.send(peer, stream, int(rest))
        elif kind == "workspace":
            self._open_workspace(peer, stream)
        else:
            stream.reset("there is no %r here" % target)

    def _open_workspace(self, peer: Peer, stream: Stream) -> None:
        try:
            ours, theirs = socket.socketpair()
            pump = Pump(self.loop, peer, stream, ours, self._bulk.discard, polite=self._polite)
            self._bulk.add(pump)
        except OSError as error:
            return stream.reset(str(error))
        try:
            self._helper.hand_over(theirs)
        except OSError as error:
            pump.close(str(error))

    def _polite(self) -> float:
        """How long files wait for the kernel's messages before they go on: while cells run, a
        transfer takes a small part of the machine, and else all of it."""
        # Heartbeats go on by themselves.
        moved = (pump.moved_at for pump, channel in self._pumps.items() if channel != "hb")
        busy_at = max(moved, default=0.0)
        return _PAUSE if self.loop.time() - busy_at < _QUIET else 0.0

    def _connect_waiting(self) -> None:
        """Connect the streams that wait for the kernel's sockets, again and again while it
        starts; a kernel that is not there yet is waited for without limit, by its host."""
        peer = self._peer
        if peer is None:
            return
        for waiting in list(self._waiting):
            if waiting.channel == "shell" and self._listeners.awaited:
                continue
            try:
                sock = self.kernel.connect(waiting.channel)
            except OSError as error:
                self.stop_waiting(waiting)
                waiting.stream.reset(str(error))
                peer.flush_soon()
                continue
            if sock is not None:
                self._waiting.remove(waiting)
                made = partial(ListenerPump, self._listeners) if waiting.listens else Pump
                pump = made(self.loop, peer, waiting.stream, sock, self._pumps.pop)
                self._pumps[pump] = waiting.channel
                waiting.hand_over(pump)
        if self._waiting and self.kernel.running and self._connect_timer is None:
            # The longer it takes, the more rarely: a kernel that is stopped may be so for long.
            waited = self.loop.time() - max(self._waiting[0].since, self._launched_at)
            interval = min(max(_CONNECT_INTERVAL, waited / 50), _MAX_CONNECT_INTERVAL)
            self._connect_timer = self.loop.call_later(interval, self._connect_again)

    def _connect_again(self) -> None:
        self._connect_timer = None
        self._connect_waiting()

    def stop_waiting(self, waiting: "_KernelStream") -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._listeners.settled(waiting.stream)

    # --- the kernel

    def _kernel_exited(self) -> None:
        for control in self._controls:
            control.send({"event": "kernel_exited", **self.kernel.status()})

    def _call_info(self) -> Dict[str, Any]:
        return {
            "version": VERSION,
            "name": self._name,
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "lease": self._lease,
            "kernel": self.kernel.status(),
        }

    def _call_launch(
        self,
        argv: List[str],
        env: Dict[str, str],
        cwd: str,
        connection: Dict[str, Any],
        transport: str,
        warm: bool = True,
        spare: bool = True,
    ) -> Later:
        later = Later()

        def done(failure: Optional[LaunchError]) -> None:
            if failure is not None:
                return later.fail(CallError(failure.kind, str(failure)))
            later.finish(self.kernel.status())
            self._launched_at = self.loop.time()
            self._listeners.launched()
            self._recorder.launched()
            self._connect_waiting()
            if warm and spare:
                self.kernel.warm.prepare(kernel_command(argv, self._folder))
            else:
                self.kernel.warm.close()

        if not warm:
            self.kernel.warm.close()
        self.kernel.launch(argv, env, cwd, connection, transport, done)
        return later

    def _call_signal(self, signum: int) -> Dict[str, Any]:
        return {"sent": self.kernel.signal(signum)}

    def _call_kill(self) -> Dict[str, Any]:
        self.kernel.kill()
        return self.kernel.status()

    def _call_lease(self, seconds: float) -> Dict[str, Any]:
        if not 0 < seconds < 1e9:
            raise CallError("value", "a lease of %r seconds" % seconds)
        self._lease = float(seconds)
        return {"lease": self._lease}

    def _call_record(self, limit: int) -> Dict[str, Any]:
        if not isinstance(limit, int) or not 0 <= limit <= MAX_LIMIT:
            raise CallError("value", "a recording of %r bytes" % limit)
        return self._recorder.start(limit)

    def _call_shutdown(self) -> Dict[str, Any]:
        self.kernel.kill()
        self.loop.call_later(0.05, self.loop.stop)
        return {}


class _KernelStream:
    """A stream to a channel of a kernel that does not listen yet; keeps what the client says."""

    def __init__(self, agent: Agent, stream: Stream, channel: str) -> None:
        self.stream = stream
        self.channel = channel
        self.listens = channel == "iopub"
        self._agent = agent
        self._early: List[Buffer] = []  # bounded by the stream's credit window
        self._finished = False
        self.since = agent.loop.time()
        stream.owner = self

    def hand_over(self, pump: Pump) -> None:
        for payload in self._early:
            pump.on_data(payload)
        if self._finished:
            pump.on_finished()

    def on_data(self, payload: Buffer) -> None:
        self._early.append(payload)

    def on_finished(self) -> None:
        self._agent.stop_waiting(self)
        self.stream.finish()

    def on_reset(self, reason: str) -> None:
        self._agent.stop_waiting(self)

    def on_room(self) -> None:
        """Nothing is written to the stream before it is handed over."""


class _Greeter:
    """A connector that has connected: waits for its descriptors, then for its host's HELLO."""

    def __init__(self, agent: Agent, connection: socket.socket) -> None:
        self.decoder = FrameDecoder()
        self._agent = agent
        self._loop = agent.loop
        self._connection = connection
        self._link: Optional[FdLink] = None
        self._done = False
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._descriptors)
        self._timer = self._loop.call_later(_HELLO_TIMEOUT, self.close)

    def _descriptors(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._connection, MAX_REQUEST + 64, 2)
        except BlockingIOError:
            return
        except OSError:
            return self.close()
        try:
            said = json.loads(message)
            if not fds and "rekey" in said:
                return self._rekey(said["rekey"])
            codec = said["codec"]
            if len(fds) != 2 or codec not in CODECS:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            for fd in fds:
                os.close(fd)
            return self.close()
        self.incoming, self.outgoing = make_codec(codec), make_codec(codec)
        self._loop.remove_reader(self._connection.fileno())
        # From here on the connection only tells that the connector lives.
        self._loop.add_reader(self._connection.fileno(), self._connector_gone)
        self._link = link = FdLink(self._loop, fds[0], fds[1])
        link.on_data = self._hello
        link.on_lost = lambda why: self.close()
        link.on_closed = self._close_connection
        link.start()

    def _rekey(self, request: Any) -> None:
        self._finish()  # first, so that the agent does not close it with the other greeters
        answer = self._agent.rekey(request)
        if answer != "ok":
            print("re-keying was refused:", answer, flush=True)
        try:
            self._connection.send(answer.encode() + b"\n")
        except OSError as error:
            print("nobody heard that the agent was re-keyed:", error, flush=True)
        self._close_connection()

    def _hello(self, data: bytes) -> None:
        link = self._link
        assert link is not None
        try:
            frames = self.decoder.feed(self.incoming.decode(data))
            if not frames:
                return
            if any(frame != frames[0] for frame in frames):
                raise WireError("a host that does not wait for WELCOME", fatal=True)
            hello = decode_hello(frames[0])
        except WireError as error:
            print("a link was refused:", error, flush=True)
            return self.close()
        self._finish()
        self._agent.welcome(hello, link, self)

    def _connector_gone(self) -> None:
        if self._link is not None and not self._link.closed:
            lost = self._link.on_lost
            self._link.close()
            lost("the connector has ended")

    def _finish(self) -> None:
        self._done = True
        self._timer.cancel()
        self._agent.greeter_done(self)

    def close(self) -> None:
        if not self._done:
            self._finish()
            if self._link is not None:
                self._link.close()
            else:
                self._close_connection()

    def _close_connection(self) -> None:
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()


def _reap_orphans(known: "Set[Optional[int]]") -> None:
    """Kernels' orphans become our children, and must not stay zombies."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return
        os.waitpid(found.si_pid, 0)


def main(folder: str, lease: float, warm: Optional[WarmProcess]) -> None:
    """Run the agent. ``warm`` is ready to become the kernel, or getting ready."""
    libc = ctypes.CDLL(None)
    # Code in the sandbox runs under the same user: it must not read or write this process.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    agent = Agent(folder, lease)
    if warm is not None:
        agent.kernel.warm.adopt(warm)
    agent.run()
