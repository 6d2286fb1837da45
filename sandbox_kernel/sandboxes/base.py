"""The sandbox surface: what agents, the kernel provisioner and the command program against.

A backend is a SandboxClient (create, get, list, remove) whose SandboxHandles run commands. It is
found by its entry point in the group ``sandbox_kernel.backends``; see ``backends.py``. Everything
that a handle returns from inside the sandbox is the word of untrusted code: bounded, never
believed.

All methods are coroutines and may be called from any running event loop, but the objects of one
client belong to one loop (the tunnel keeps them on its own).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from sandbox_kernel.errors import ExecFailed, SandboxTimeout, SpecRefused, Unsupported
from sandbox_kernel.guest.command import GUEST
from sandbox_kernel.spec import SandboxSpec

MAX_OUTPUT = 16 * 2**20
"""Bytes of each of stdout and stderr that ``exec`` keeps; the rest is read and dropped."""
_GRACE = 60.0


@dataclass(frozen=True)
class ExecResult:
    """Outcome of a command that ran to its end. A signal N gives the exit code -N."""

    stdout: str
    stderr: str = ""
    exit_code: int = 0
    truncated: bool = False

    @property
    def output(self) -> str:
        """stdout followed by stderr."""
        return self.stdout + self.stderr

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do and enforce. ``check`` turns what is missing into SpecRefused."""

    image: bool = False
    memory_mib: bool = False
    cpus: bool = False
    processes: bool = False
    open_files: bool = False
    disk_mib: bool = False
    workspace: bool = False
    readable: bool = False
    python: bool = False
    secrets: bool = False
    egress: bool = False
    """Rules that allow single hosts, by name; nothing else gets out."""
    egress_parts: frozenset[str] = frozenset()
    """Which of ``sandbox_kernel.egress.PARTS`` are enforced besides."""
    options: bool = False
    delete_after_seconds: bool = False
    hosted: bool = False
    """It runs elsewhere and costs money: it is never made anew without being asked for."""
    byte_exact_streams: bool = False
    reattach: bool = False
    pause: bool = False
    """``pause`` freezes the sandbox with its memory; ``resume`` lets it go on."""
    restart: bool = False
    """``resume`` starts a stopped sandbox again, with its files."""
    snapshot: bool = False
    """``snapshot`` keeps the files; with ``memory``, the running processes, too."""
    memory: bool = False
    fork: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)
    """Field name (``egress.ports`` for a rule's) -> why it is refused and what to do instead."""

    def check(self, spec: SandboxSpec, backend: str) -> None:
        """Refuse a spec that asks for more than this backend enforces (invariant: no silent
        downgrade). Called by ``create`` before anything exists."""
        for name in (
            "image",
            "memory_mib",
            "cpus",
            "processes",
            "open_files",
            "disk_mib",
            "workspace",
            "readable",
            "python",
            "secrets",
            "options",
            "delete_after_seconds",
        ):
            if getattr(spec, name) not in (None, (), {}) and not getattr(self, name):
                raise self._refused(spec, backend, f"{name}={getattr(spec, name)!r}", name)
        if spec.egress and not self.egress:
            raise self._refused(spec, backend, f"egress={spec.egress.to_json()!r}", "egress")
        if spec.egress and (beyond := spec.egress.unenforceable(self.egress_parts)):
            field_name = beyond.partition("=")[0].partition(".")[2]
            raise self._refused(spec, backend, beyond, f"egress.{field_name}")

    def _refused(self, spec: SandboxSpec, backend: str, what: str, note: str) -> SpecRefused:
        why = self.notes.get(note, "Leave it out, or choose a backend that has it.")
        return SpecRefused(
            f"Sandbox {spec.name!r} was not created: the backend {backend!r} cannot enforce "
            f"{what}. {why}"
        )


@dataclass(frozen=True)
class SandboxInfo:
    """A snapshot of a sandbox's state, for ``ps``, for error messages and for tests."""

    name: str
    id: str
    backend: str
    status: str
    """``running``, ``paused``, ``stopped``, ``gone``, or ``unknown`` if the provider's word for it
    is none that we know."""
    created: float
    limits: Mapping[str, str] = field(default_factory=dict)
    """Spec field -> the value in force and by what, e.g. ``"512 MiB (cgroup v2)"``."""
    oom_kills: int = 0
    """How often something in the sandbox was killed for want of memory."""
    last_kill: str = ""
    """Why the sandbox itself last killed something (memory, disk), in words."""
    killed: Mapping[int, str] = field(default_factory=dict)
    """What the sandbox itself killed of late: pid inside of it -> why, in words."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """What the backend adds, e.g. host pids."""


@dataclass(frozen=True)
class Usage:
    """What a sandbox uses now, as its backend measures it from outside."""

    memory: int
    """Bytes."""
    processes: int
    cpu_seconds: float
    """Of the processes that run, since each began."""


@dataclass(frozen=True)
class SnapshotInfo:
    """A state of a sandbox that was kept; ``SandboxClient.restore`` makes sandboxes from it."""

    name: str
    backend: str
    sandbox: str
    """Name of the sandbox that it was taken from."""
    created: float
    memory: bool
    """Whether it holds the running processes, or the files only."""


class ExecStream(ABC):
    """A running command with its standard streams.

    Closing the stream ends the command (and, with some providers, its children too), so what must
    outlive it is started with ``SandboxHandle.spawn``.
    """

    socket: socket.socket | None = None
    """A connected, byte-exact duplex socket that *is* the command's stdin and stdout, if the
    backend can give one (``open_stream(..., duplex=True)``). Whoever takes it must not use
    ``read`` and ``write``; ``close`` still closes it."""
    write_ahead: int | None = None
    """Bytes that may wait for ``write``, if it is slow: what is urgent waits behind them."""

    @abstractmethod
    async def read(self) -> bytes:
        """The next piece of stdout; ``b""`` at its end."""

    @abstractmethod
    async def read_stderr(self) -> bytes:
        """The next piece of stderr; ``b""`` at its end."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to stdin, waiting while the command does not take it."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """End of input for the command."""

    @abstractmethod
    async def wait(self) -> int:
        """Exit code; -N if signal N ended the command."""

    @abstractmethod
    async def send_signal(self, signum: int) -> None:
        """Send a signal to the command's process group. No error if it has ended."""

    @abstractmethod
    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal of a stream opened with ``tty``."""

    @abstractmethod
    async def close(self) -> None:
        """End the command if it runs still, and free everything. Idempotent."""

    async def __aenter__(self) -> ExecStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SandboxHandle(ABC):
    """One live sandbox. Get it from ``SandboxClient.create`` or ``SandboxClient.get``."""

    name: str
    id: str
    backend: ClassVar[str]
    spec: SandboxSpec
    agent_folder: str = "/tmp/.sandbox-kernel"  # noqa: S108  (a path inside the sandbox)
    """A folder in the sandbox, private to its user, for the agent's and the kernel's sockets."""
    workdir: str = "/workspace"
    """Where kernels start."""
    holds_lease: ClassVar[bool] = False
    """Whether the backend itself ends the sandbox when its lease is over."""
    weaknesses: Sequence[str] = ()
    """Sentences about what this host can hold the sandbox to only coarsely, for the log."""
    python: str | None = None
    """The image's own interpreter, by which kernels and the guest program run (and which may lack
    ipykernel); None if the backend shows the sandbox the host's interpreter."""

    @abstractmethod
    async def open_stream(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        tty: tuple[int, int] | None = None,
        duplex: bool = False,
    ) -> ExecStream:
        """Start a command and give its streams. ``argv`` is never parsed by a shell.

        ``tty`` (rows, columns) gives it a terminal. ``duplex`` asks for ``ExecStream.socket``,
        which a backend may not have. Raises ExecFailed if the command cannot be started,
        SandboxGone if the sandbox has ended and SandboxPaused if it is paused.
        """

    @abstractmethod
    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        main: bool = False,
    ) -> None:
        """Start a command that belongs to the sandbox, not to the caller: it outlives this
        process. Its output goes to the sandbox's log. When a ``main`` command ends, the sandbox
        has nothing to live for, and a backend that can ends it."""

    @abstractmethod
    async def stop(self) -> None:
        """End the sandbox in an orderly way, keeping what a backend can keep. Idempotent."""

    @abstractmethod
    async def kill(self) -> None:
        """End the sandbox at once. Idempotent."""

    async def clear(self) -> bool:
        """End every process in the sandbox but the agent and its connectors, from outside, so that
        neither has to be asked. False, and nothing is ended, if the backend cannot."""
        return False

    async def set_lease(self, seconds: float) -> bool:
        """Give the sandbox another lease than ``spec.lease_seconds``, from now on. False, and
        nothing has changed, if the backend cannot."""
        return False

    @abstractmethod
    async def logs(self, *, tail: int | None = None) -> str:
        """The sandbox's own log (not the output of ``exec``), at most the last ``tail`` lines."""

    @abstractmethod
    async def info(self) -> SandboxInfo:
        """What is known about the sandbox now. Answers for a dead sandbox, too."""

    async def usage(self) -> Usage | None:
        """What it uses now; None if the backend cannot tell, or it does not run."""
        return None

    async def pause(self) -> None:
        """Freeze the sandbox, with its memory; every stream to it may break. Idempotent."""
        raise self._unsupported("paused")

    async def resume(self) -> None:
        """Bring a paused or stopped sandbox back to running. One that was paused goes on where it
        was; one that was stopped has its files, but no process. No error if it runs."""
        raise self._unsupported("resumed")

    async def snapshot(self, name: str) -> SnapshotInfo:
        """Keep the present state under a name; SandboxExists if that is taken. What the backend
        cannot keep rightly in the sandbox's present state (running, stopped) is refused."""
        raise self._unsupported("kept as a snapshot")

    async def fork(self, name: str = "") -> SandboxHandle:
        """A second sandbox that goes on from this one's memory, while this one goes on, too."""
        raise self._unsupported("forked")

    def _unsupported(self, what: str) -> Unsupported:
        return Unsupported(
            f"Sandbox {self.name!r} cannot be {what}: the backend {self.backend!r} has no way to "
            f"do it. `sandbox-kernel doctor` lists what each backend can."
        )

    @property
    def agent_lease(self) -> float:
        """Seconds after which the agent ends when nobody is attached. A backend that itself ends
        or pauses a sandbox at the end of its lease gives more: the agent must not be first."""
        return self.spec.lease_seconds + (_GRACE if self.holds_lease else 0.0)

    def guest_argv(self, *arguments: str) -> Sequence[str]:
        """The command line that runs the guest program (``sandbox_kernel/guest``) in here.

        The default is the zipapp where ``install_guest`` puts it; a backend that can show the
        program to the sandbox without copying overrides both.
        """
        return [self.python or "python3", "-I", GUEST_PATH, *arguments]

    def kernel_argv(self, argv: Sequence[str]) -> Sequence[str]:
        """A kernelspec's command line as it must be run in here: with the image's own interpreter
        in place of the host's, if there is one."""
        if self.python and argv and os.path.basename(argv[0]).startswith("python"):
            return [self.python, *argv[1:]]
        return argv

    async def upload(self, folder: str, target: str) -> None:
        """Put the files of a host folder into a folder of the sandbox, which is made if need be.
        The default sends a tar archive through an exec's stdin; the sandbox needs Python."""
        archive = await asyncio.to_thread(packed, folder)
        arguments = ["-I", "-c", UNPACK, target, "-"]
        result = await self.exec(self.python or "python3", arguments, stdin=archive, timeout=600)
        if not result.ok:
            raise ExecFailed(
                f"{folder} could not be put to {target} in sandbox {self.name!r}: "
                f"{result.output.strip()[-500:]}"
            )

    async def install_guest(self, zipapp: bytes) -> None:
        """Put the guest program into the sandbox, through an exec's stdin."""
        script = f'mkdir -p "$(dirname {GUEST_PATH})" && cat > {GUEST_PATH}'
        result = await self.exec("/bin/sh", ["-c", script], stdin=zipapp, timeout=60)
        if not result.ok:
            raise ExecFailed(
                f"The guest program could not be written to {GUEST_PATH} in sandbox "
                f"{self.name!r}: {result.output.strip()[:500]}"
            )

    async def exec(
        self,
        cmd: str,
        args: Sequence[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """Run a command to its end. On timeout the command is killed and SandboxTimeout raised."""
        stream = await self.open_stream([cmd, *(args or ())], env=env, cwd=cwd)
        try:
            return await asyncio.wait_for(_run(stream, stdin, max_output), timeout)
        except asyncio.TimeoutError:
            raise SandboxTimeout(
                f"{cmd!r} in sandbox {self.name!r} did not end within {timeout:g} s and was "
                f"killed. Give a longer timeout if it needs one."
            ) from None
        finally:
            await stream.close()

    async def shell(self, script: str, *, timeout: float | None = None) -> ExecResult:
        """Run a script with ``/bin/sh -c``."""
        return await self.exec("/bin/sh", ["-c", script], timeout=timeout)


GUEST_PATH = GUEST.decode()


class SandboxClient(ABC):
    """A backend. Constructing one is cheap and touches nothing."""

    backend: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def check(self, spec: SandboxSpec) -> None:
        """SpecRefused for what this backend cannot enforce. Touches nothing."""
        self.capabilities.check(spec, self.backend)

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Make and start a sandbox. SandboxExists if the name is taken; SpecRefused before
        anything is made; on any other failure nothing is left behind."""

    @abstractmethod
    async def get(self, name: str) -> SandboxHandle:
        """A handle on a sandbox that exists, made by this or another process. SandboxNotFound."""

    @abstractmethod
    async def list(self) -> list[str]:
        """Names of this user's sandboxes, running or not."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Kill if running, and delete with all that it holds. Removing twice is no error."""

    async def restore(self, snapshot: str, spec: SandboxSpec) -> SandboxHandle:
        """A new sandbox with the spec's name from a snapshot of that name. Otherwise as
        ``create``."""
        raise self._no_snapshots()

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        """This user's snapshots, oldest first."""
        return []

    async def remove_snapshot(self, name: str) -> None:
        """Delete a snapshot. Removing twice is no error."""
        raise self._no_snapshots()

    def _no_snapshots(self) -> Unsupported:
        return Unsupported(f"The backend {self.backend!r} has no snapshots.")

    @abstractmethod
    async def diagnose(self) -> Sequence[Diagnosis]:
        """Can this backend be used here? For ``doctor``. Never raises; tries for real."""

    async def run_python(
        self, code: str, *, timeout: float | None = None, **spec: Any
    ) -> ExecResult:
        """Run Python code in a sandbox of its own, which is gone afterwards."""
        return await self._run_once(["python3", "-c", code], timeout, spec)

    async def run_shell(
        self, script: str, *, timeout: float | None = None, **spec: Any
    ) -> ExecResult:
        """Run a shell script in a sandbox of its own, which is gone afterwards."""
        return await self._run_once(["/bin/sh", "-c", script], timeout, spec)

    async def _run_once(
        self, argv: Sequence[str], timeout: float | None, spec: dict[str, Any]
    ) -> ExecResult:
        handle = await self.create(SandboxSpec.from_mapping(spec, where="the call"))
        try:
            return await handle.exec(argv[0], argv[1:], timeout=timeout)
        finally:
            await asyncio.shield(self.remove(handle.name))

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Free what the client itself holds (connections). Sandboxes live on."""


@dataclass(frozen=True)
class Diagnosis:
    """One line of ``sandbox-kernel doctor``."""

    ok: bool | None
    """True: works. False: does not, so the backend cannot be used. None: works, with a remark."""
    what: str
    fix: str = ""


UNPACK = """
import os, sys, tarfile
os.makedirs(sys.argv[1], exist_ok=True)
source = sys.stdin.buffer if sys.argv[2] == "-" else open(sys.argv[2], "rb")
with tarfile.open(fileobj=source, mode="r|gz") as archive:
    archive.extractall(sys.argv[1])
"""
"""The program, for the sandbox's Python, that unpacks what ``packed`` gave into the folder that is
its first argument: from the file that is its second, or from stdin (``-``)."""


def packed(folder: str) -> bytes:
    """The files of a host folder as a tar archive, compressed."""
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w:gz", compresslevel=6) as archive:
        archive.add(folder, arcname=".", filter=_owned_by_nobody_in_particular)
    return archived.getvalue()


def _owned_by_nobody_in_particular(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The host's users are not the sandbox's."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


async def _run(stream: ExecStream, stdin: bytes, max_output: int) -> ExecResult:
    async def feed() -> None:
        # The command may end without reading its input; that is its right.
        with contextlib.suppress(OSError):
            if stdin:
                await stream.write(stdin)
            await stream.close_stdin()

    out, err, _ = await asyncio.gather(
        _collect(stream.read, max_output), _collect(stream.read_stderr, max_output), feed()
    )
    result = ExecResult(
        stdout=out[0].decode(errors="replace"),
        stderr=err[0].decode(errors="replace"),
        truncated=out[1] or err[1],
    )
    return replace(result, exit_code=await stream.wait())


async def _collect(read: Any, limit: int) -> tuple[bytes, bool]:
    kept = bytearray()
    truncated = False
    while chunk := await read():
        room = limit - len(kept)
        truncated = truncated or len(chunk) > room
        kept += chunk[:room]
    return bytes(kept), truncated
