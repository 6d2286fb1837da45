"""The sandbox surface: what a backend implements, and what kernels, agents and commands call.

A backend is a SandboxClient (create, get, list, remove) whose SandboxHandles run commands. It is
found by its entry point in the group ``sandbox_kernel.backends``; see ``backends.py``. It
implements the abstract methods of these two classes and of ExecStream (``exec_stream.py``); all
other methods have defaults. A backend that keeps records of its sandboxes on this host starts from
``recording_client.py``.

Everything that a handle returns from inside the sandbox comes from untrusted code: bounded, never
believed. All methods are coroutines and may be called from any running event loop, but the objects
of one client belong to one loop (the tunnel keeps them on its own).
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sandbox_kernel import audit
from sandbox_kernel.errors import ExecFailed, SandboxTimeout, Unsupported
from sandbox_kernel.gateway.tls.roots import SYSTEM_BUNDLES
from sandbox_kernel.guest.commands.single import GUEST
from sandbox_kernel.sandboxes.capabilities import Capabilities
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.egress_environment import IMAGE_BUNDLE, trust_script
from sandbox_kernel.sandboxes.exec_stream import ExecStream, run_to_end
from sandbox_kernel.sandboxes.results import Diagnosis, ExecResult, SandboxInfo, SnapshotInfo, Usage
from sandbox_kernel.spec import SandboxSpec

__all__ = [
    "Capabilities",
    "Command",
    "Diagnosis",
    "ExecResult",
    "ExecStream",
    "SandboxClient",
    "SandboxHandle",
    "SandboxInfo",
    "SnapshotInfo",
    "Usage",
]

MAX_OUTPUT = 16 * 2**20
"""Bytes of each of stdout and stderr that ``exec`` keeps; it reads and drops the rest."""
GUEST_PATH = GUEST.decode()
_AGENT_GRACE = 60.0
_UPLOAD_TIMEOUT = 600.0


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
    takes_connections: bool = False
    """Whether the sockets of commands pass descriptors on, so that the agent can take clients'
    connections. Not where a sandbox can be paused: the host would not see that it is wanted."""
    weaknesses: Sequence[str] = ()
    """Sentences for the log: limits that this host can enforce only coarsely."""
    python: str | None = None
    """The image's own interpreter, for kernels and the guest program (it may lack ipykernel); None
    if the backend shows the sandbox the host's interpreter."""

    # --- what a backend implements

    @abstractmethod
    async def open_command(self, command: Command) -> ExecStream:
        """Start a command and give its streams.

        Raises ExecFailed if the command cannot be started, SandboxGone if the sandbox has ended
        and SandboxPaused if it is paused.
        """

    @abstractmethod
    async def spawn_command(self, command: Command) -> None:
        """Start a command that belongs to the sandbox, not to the caller: it outlives this
        process. Its output goes to the sandbox's log. When a ``main`` command ends, a backend
        that can do so ends the sandbox."""

    @abstractmethod
    async def stop(self) -> None:
        """End the sandbox in order, and keep what the backend can keep. Idempotent."""

    @abstractmethod
    async def kill(self) -> None:
        """End the sandbox at once. Idempotent."""

    @abstractmethod
    async def logs(self, *, tail: int | None = None) -> str:
        """The sandbox's own log (not the output of ``exec``), at most the last ``tail`` lines."""

    @abstractmethod
    async def info(self) -> SandboxInfo:
        """The sandbox's state now. Answers for a dead sandbox, too."""

    # --- what a backend may implement

    async def usage(self) -> Usage | None:
        """What the sandbox uses now; None if the backend cannot tell, or it does not run."""
        return None

    async def clear(self) -> bool:
        """From outside, end every process in the sandbox but the agent and its connectors. False,
        and nothing is ended, if the backend cannot."""
        return False

    async def set_lease(self, seconds: float) -> bool:
        """Replace ``spec.lease_seconds``. False, and nothing changes, if the backend cannot."""
        return False

    async def pause(self) -> None:
        """Freeze the sandbox, with its memory; every stream to it may break. Idempotent."""
        raise self._unsupported("paused")

    async def resume(self) -> None:
        """Bring a paused or stopped sandbox back to running. A paused one goes on where it was; a
        stopped one has its files, but no process. No error if it runs."""
        raise self._unsupported("resumed")

    async def snapshot(self, name: str) -> SnapshotInfo:
        """Keep the present state under a name; SandboxExists if that is taken. A backend refuses
        what it cannot keep correctly in the sandbox's present state (running, stopped)."""
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
        return self.spec.lease_seconds + (_AGENT_GRACE if self.holds_lease else 0.0)

    def guest_argv(self, *arguments: str) -> Sequence[str]:
        """The command line that runs the guest program (``sandbox_kernel/guest``) in the sandbox.

        The default is the zipapp where ``install_guest`` puts it; a backend that can show the
        program to the sandbox without copying overrides both.
        """
        return [self.python or "python3", "-I", GUEST_PATH, *arguments]

    def kernel_argv(self, argv: Sequence[str]) -> Sequence[str]:
        """A kernelspec's command line, with the image's own interpreter if there is one."""
        if self.python and argv and os.path.basename(argv[0]).startswith("python"):
            return [self.python, *argv[1:]]
        return argv

    async def install_guest(self, zipapp: bytes) -> None:
        """Put the guest program into the sandbox, through a command's stdin."""
        script = f'mkdir -p "$(dirname {GUEST_PATH})" && cat > {GUEST_PATH}'
        command = Command(["/bin/sh", "-c", script])
        result = await self.run_command(command, stdin=zipapp, timeout=60)
        if not result.ok:
            raise ExecFailed(
                f"The guest program could not be written to {GUEST_PATH} in sandbox "
                f"{self.name!r}: {result.output.strip()[:500]}"
            )

    async def trust(self, certificate: bytes) -> None:
        """Let programs in the sandbox trust an authority, in PEM, in place of an earlier one: those
        that look at ``BUNDLE_VARIABLES``, from when they next read the bundle. The default adds it
        to the image's own certificates."""
        script = trust_script(SYSTEM_BUNDLES, IMAGE_BUNDLE)
        result = await self.exec("/bin/sh", ["-c", script], stdin=certificate, cwd="/", timeout=60)
        if not result.ok:
            raise ExecFailed(
                f"The gateway's certificate could not be written to {IMAGE_BUNDLE} in sandbox "
                f"{self.name!r}: {result.output.strip()[-500:]}"
            )

    async def upload(self, folder: str, target: str) -> None:
        """Copy the files of a host folder into a folder of the sandbox, which is made if needed.
        The default sends a tar archive through a command's stdin; the sandbox needs Python."""
        from sandbox_kernel.sandboxes.folder_archive import packed  # lazy: start-up time

        await self._unpack(target, stdin=await asyncio.to_thread(packed, folder))

    async def _unpack(self, target: str, *, stdin: bytes = b"", path: str = "-") -> None:
        """Unpack an archive from stdin, or from a file in the sandbox, into a folder there."""
        from sandbox_kernel.sandboxes.folder_archive import UNPACK  # lazy: start-up time

        argv = [self.python or "python3", "-I", "-c", UNPACK, target, path]
        command = Command(argv, cwd="/")
        result = await self.run_command(command, stdin=stdin, timeout=_UPLOAD_TIMEOUT)
        if not result.ok:
            raise ExecFailed(
                f"Files could not be copied to {target} in sandbox {self.name!r}: "
                f"{result.output.strip()[-500:]}"
            )

    async def run_command(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """Run a command to its end. On timeout the command is killed and SandboxTimeout raised."""
        stream = await self.open_command(command)
        try:
            async with asyncio.timeout(timeout):
                return await run_to_end(stream, stdin, max_output)
        except TimeoutError as error:
            if isinstance(error, SandboxTimeout):
                raise
            raise self._too_slow(command, timeout) from None
        finally:
            await stream.close()

    def _too_slow(self, command: Command, timeout: float | None) -> SandboxTimeout:
        return SandboxTimeout(
            f"{command.program!r} in sandbox {self.name!r} did not end within {timeout:g} s "
            f"and was killed. Give a longer timeout if it needs one."
        )

    # --- the same without a Command, for users of the package: it is audited

    async def open_stream(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        tty: tuple[int, int] | None = None,
        duplex: bool = False,
    ) -> ExecStream:
        """``open_command`` for these arguments."""
        audit.note_command(self, argv)
        return await self.open_command(Command(argv, env or {}, cwd, tty, duplex))

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        main: bool = False,
    ) -> None:
        """``spawn_command`` for these arguments."""
        audit.note_command(self, argv)
        await self.spawn_command(Command(argv, env or {}, cwd, main=main))

    async def exec(
        self,
        cmd: str,
        args: Sequence[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        **options: Any,
    ) -> ExecResult:
        """``run_command`` for these arguments, with the same options."""
        argv = [cmd, *(args or ())]
        audit.note_command(self, argv)
        return await self.run_command(Command(argv, env or {}, cwd), **options)

    async def shell(self, script: str, *, timeout: float | None = None) -> ExecResult:
        """Run a script with ``/bin/sh -c``."""
        return await self.exec("/bin/sh", ["-c", script], timeout=timeout)


class SandboxClient(ABC):
    """A backend. Constructing one is cheap and touches nothing."""

    backend: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    # --- what a backend implements

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
        """Kill if running, and delete with all its files. Removing twice is no error."""

    @abstractmethod
    async def diagnose(self) -> Sequence[Diagnosis]:
        """Can this backend be used here? For ``doctor``. Never raises; tries for real."""

    # --- what a backend may implement

    def check(self, spec: SandboxSpec) -> None:
        """SpecRefused for what this backend cannot enforce. Touches nothing."""
        self.capabilities.check(spec, self.backend)

    def usual_limit(self, name: str) -> float | None:
        """What a sandbox gets of a limit that its spec leaves out (memory_mib, cpus, processes,
        disk_mib); None if that is not known."""
        return None

    def makes_spares(self, spec: SandboxSpec) -> bool:
        """Whether a spare sandbox for a kernel to come may be made without being asked for: it
        costs no money, and little memory and time."""
        return False

    async def likeness(self, spec: SandboxSpec) -> str:
        """A digest of what shapes a new sandbox beside its spec: a spare that was made from the
        same spec under another likeness is stale."""
        return ""

    async def restore(self, snapshot: str, spec: SandboxSpec) -> SandboxHandle:
        """A new sandbox, with the spec's name, from a snapshot. Otherwise as ``create``."""
        raise self._no_snapshots()

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        """This user's snapshots, oldest first."""
        return []

    async def remove_snapshot(self, name: str) -> None:
        """Delete a snapshot. Removing twice is no error."""
        raise self._no_snapshots()

    def _no_snapshots(self) -> Unsupported:
        return Unsupported(f"The backend {self.backend!r} has no snapshots.")

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Free what the client itself holds (connections). Sandboxes live on."""

    # --- one command in a sandbox of its own

    async def run_python(
        self, code: str, *, timeout: float | None = None, **spec: Any
    ) -> ExecResult:
        """Run Python code in a sandbox that is removed afterwards."""
        return await self._run_once(["python3", "-c", code], timeout, spec)

    async def run_shell(
        self, script: str, *, timeout: float | None = None, **spec: Any
    ) -> ExecResult:
        """Run a shell script in a sandbox that is removed afterwards."""
        return await self._run_once(["/bin/sh", "-c", script], timeout, spec)

    async def _run_once(
        self, argv: Sequence[str], timeout: float | None, spec: dict[str, Any]
    ) -> ExecResult:
        handle = await self.create(SandboxSpec.from_mapping(spec, where="the call"))
        try:
            return await handle.exec(argv[0], argv[1:], timeout=timeout)
        finally:
            await asyncio.shield(self.remove(handle.name))
