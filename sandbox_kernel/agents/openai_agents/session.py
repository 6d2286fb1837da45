"""SandboxKernelSession: one session's sandbox, its commands, files, snapshots and ports.

The sandbox is hostile: the SDK's own check of a path runs in it, and protects the workspace from
mistakes, not the host from the sandbox. What protects the host is that no path is opened on it.
"""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
from pathlib import Path
from typing import IO, TypeVar, cast

from agents.sandbox.errors import (
    ExposedPortUnavailableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceStartError,
    WorkspaceStopError,
)
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.pty_types import PtyExecUpdate
from agents.sandbox.session.runtime_helpers import (
    RESOLVE_WORKSPACE_PATH_HELPER,
    RuntimeHelperScript,
)
from agents.sandbox.session.workspace_payloads import coerce_write_payload
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.workspace_paths import sandbox_path_str

from sandbox_kernel.agents import workspace_tar
from sandbox_kernel.agents.openai_agents.options import (
    SandboxKernelClientOptions,
    SandboxKernelSessionState,
    spec_for,
)
from sandbox_kernel.agents.openai_agents.sandbox import SessionSandbox
from sandbox_kernel.agents.openai_agents.terminals import SIZE, Terminals
from sandbox_kernel.agents.openai_agents.transfers import (
    IN_MEMORY,
    copy,
    judged,
    spooled,
    translated,
)
from sandbox_kernel.agents.port_forward import LOOPBACK, PortForward
from sandbox_kernel.agents.raw_exec import RawResult, run_into, run_raw
from sandbox_kernel.agents.users import as_user
from sandbox_kernel.errors import QuotaExceeded, SandboxError
from sandbox_kernel.sandboxes.base import MAX_OUTPUT, ExecStream, SandboxClient
from sandbox_kernel.tunnel.background import run

T = TypeVar("T")

MAX_FILE = 2 * 2**30
"""Bytes of a file that ``read`` takes."""
_TRANSFER = 600.0
_EXISTS = 17
_READ = 'cat -- "$1"'
_READ_SOME = 'head -c "$2" -- "$1"'
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_WRITE_NEW = """
mkdir -p -- "$(dirname -- "$1")" || exit 1
if [ -e "$1" ] || [ -L "$1" ]; then exit 17; fi
set -C; cat > "$1"
"""


class SandboxKernelSession(BaseSandboxSession):
    """Made by SandboxKernelClient. Only ``start`` and the first use of it make a sandbox."""

    state: SandboxKernelSessionState

    def __init__(
        self,
        *,
        state: SandboxKernelSessionState,
        backend: SandboxClient,
        options: SandboxKernelClientOptions | None = None,
    ) -> None:
        self.state = state
        self._sandbox = SessionSandbox(
            backend, state.sandbox, lambda: spec_for(state, options, backend.capabilities)
        )
        self._terminals = Terminals()
        self._forwards: dict[int, PortForward] = {}
        self._failed = False

    # --- its life

    async def _ensure_backend_started(self) -> None:
        self._failed = False
        await run(self._sandbox.attach())
        if self._sandbox.is_new:
            self.state.workspace_root_ready = False
        self._set_start_state_preserved(not self._sandbox.is_new)

    async def _prepare_backend_workspace(self) -> None:
        root = self.state.manifest.root
        made = await self._raw(["mkdir", "-p", "--", root], cwd="/")
        if made.exit_code:
            raise WorkspaceStartError(path=Path(root), context={"stderr": made.problem})

    async def _after_start_failed(self) -> None:
        self._failed = True

    def _wrap_start_error(self, error: Exception) -> Exception:
        if isinstance(error, SandboxError):
            return WorkspaceStartError(
                path=Path(self.state.manifest.root), context={"reason": str(error)}, cause=error
            )
        return error

    def _wrap_stop_error(self, error: Exception) -> Exception:
        if isinstance(error, SandboxError):
            return WorkspaceStopError(
                path=Path(self.state.manifest.root), context={"reason": str(error)}, cause=error
            )
        return error

    async def _shutdown_backend(self) -> None:
        """The sandbox at rest: paused if that was asked for, stopped where it can be started
        again, else removed."""
        await self._close_forwards()
        await run(self._sandbox.rest(pause=self.state.pause_on_exit))

    async def remove(self) -> None:
        """For the client's ``delete``: remove the sandbox, whatever state it is in."""
        await self._terminals.end_all()
        await self._close_forwards()
        await run(self._sandbox.remove())

    async def running(self) -> bool:
        return not self._failed and await run(self._sandbox.running())

    # --- commands

    def _prepare_exec_command(
        self, *command: str | Path, shell: bool | list[str], user: str | User | None
    ) -> list[str]:
        argv = super()._prepare_exec_command(*command, shell=shell, user=None)
        return as_user(argv, user.name if isinstance(user, User) else user)

    async def _exec_internal(
        self, *command: str | Path, timeout: float | None = None
    ) -> ExecResult:
        argv = [str(part) for part in command]
        result = await self._raw(argv, timeout=timeout, own_session=True)
        stderr = result.stderr
        if result.truncated:
            stderr += f"\n[output beyond {MAX_OUTPUT} bytes was left out]\n".encode()
        return ExecResult(stdout=result.stdout, stderr=stderr, exit_code=result.exit_code)

    async def _environment(self) -> dict[str, str]:
        """What every command gets on top of the sandbox's own variables."""
        return await self.state.manifest.environment.resolve()

    def _folder(self) -> str:
        return self.state.manifest.root if self.state.workspace_root_ready else "/"

    async def _raw(
        self,
        argv: list[str],
        *,
        stdin: IO[bytes] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        own_session: bool = False,
    ) -> RawResult:
        env = await self._environment()
        cwd = cwd or self._folder()

        async def inside() -> RawResult:
            handle = await self._sandbox.attach()
            return await run_raw(
                *(handle, argv),
                env=env,
                cwd=cwd,
                stdin=stdin,
                timeout=timeout,
                own_session=own_session,
            )

        return await translated(argv, timeout, inside())

    # --- commands that run on

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        argv = self._prepare_exec_command(*command, shell=shell, user=user)
        env, cwd = await self._environment(), self._folder()

        async def inside() -> ExecStream:
            handle = await self._sandbox.attach()
            stream = await handle.open_stream(argv, env=env, cwd=cwd, tty=SIZE if tty else None)
            if not tty:
                await stream.close_stdin()
            return stream

        stream = await translated(argv, timeout, inside())
        return await self._terminals.start(
            stream, tty=tty, yield_time_s=yield_time_s, max_output_tokens=max_output_tokens
        )

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        return await self._terminals.write(
            session_id, chars, yield_time_s=yield_time_s, max_output_tokens=max_output_tokens
        )

    async def pty_terminate_all(self) -> None:
        await self._terminals.end_all()

    # --- files

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    def _current_runtime_helper_cache_key(self) -> object | None:
        return self._sandbox.made

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        where = await self._check_read_with_exec(path, user=user)
        argv = self._file_command(_READ, where, user=user)
        found = await self._taken(argv, MAX_FILE, path)
        return cast(io.IOBase, found)

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        where = await self._check_read_with_exec(path)
        argv = self._file_command(_READ_SOME, where, str(max_bytes))
        with await self._taken(argv, max_bytes, path) as found:
            return found.read()

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        where = await self._validate_path_access(path, for_write=True)
        await self._put(_WRITE, where, data, path, user)

    async def _write_new_file(
        self, path: Path, data: io.IOBase, *, user: str | User | None = None
    ) -> None:
        where = await self._validate_path_access(path, for_write=True)
        await self._put(_WRITE_NEW, where, data, path, user)

    async def _put(
        self, script: str, where: Path, data: io.IOBase, path: Path, user: str | User | None
    ) -> None:
        stream = coerce_write_payload(path=path, data=data).stream
        argv = self._file_command(script, where, user=user)
        try:
            content = await asyncio.to_thread(spooled, stream, MAX_FILE)
        except QuotaExceeded as error:
            raise WorkspaceArchiveWriteError(path=path, context={"reason": str(error)}) from error
        with content:
            result = await self._raw(argv, stdin=content, timeout=_TRANSFER)
        if result.exit_code == _EXISTS and script is _WRITE_NEW:
            raise FileExistsError(str(path))
        if result.exit_code:
            raise WorkspaceArchiveWriteError(path=path, context={"stderr": result.problem})

    def _file_command(
        self, script: str, where: Path, *more: str, user: str | User | None = None
    ) -> list[str]:
        argv = ("/bin/sh", "-c", script, "file", sandbox_path_str(where), *more)
        return self._prepare_exec_command(*argv, shell=False, user=user)

    async def _taken(self, argv: list[str], limit: int, path: Path) -> IO[bytes]:
        """What a command in the sandbox writes, as a file that the caller closes."""
        env = await self._environment()
        target = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115  (the caller's)

        async def inside() -> RawResult:
            handle = await self._sandbox.attach()
            return await run_into(handle, argv, target, limit=limit, env=env, timeout=_TRANSFER)

        try:
            result = await translated(argv, _TRANSFER, inside())
            if result.exit_code:
                raise WorkspaceArchiveReadError(path=path, context={"stderr": result.problem})
        except QuotaExceeded as error:
            target.close()
            raise WorkspaceArchiveReadError(
                path=path, context={"reason": str(error)}, cause=error
            ) from error
        except BaseException:
            target.close()
            raise
        target.seek(0)
        return cast(IO[bytes], target)

    # --- snapshots

    async def persist_workspace(self) -> io.IOBase:
        root = self.state.manifest.root
        skipped = sorted(path.as_posix() for path in self._persist_workspace_skip_relpaths())
        argv = await self._python(workspace_tar.PACK, root, json.dumps(skipped))
        with await self._taken(argv, workspace_tar.MAX_BYTES, Path(root)) as packed:
            found = await judged(
                *(WorkspaceArchiveReadError, root),
                lambda target: workspace_tar.portable(packed, target, root),
            )
        return cast(io.IOBase, found)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        root = self.state.manifest.root
        with await self._checked(data) as archive:
            plain = await judged(
                *(WorkspaceArchiveWriteError, root),
                lambda target: workspace_tar.plain(archive, target),
            )
        with plain:
            argv = await self._python(workspace_tar.UNPACK, root)
            result = await self._raw(argv, stdin=plain, cwd="/", timeout=_TRANSFER)
        if result.exit_code:
            raise WorkspaceArchiveWriteError(path=Path(root), context={"stderr": result.problem})

    async def _restore_snapshot_into_workspace_on_resume(self) -> None:
        """Nothing is cleared for an archive that is then refused."""
        stored = await self.state.snapshot.restore(dependencies=self.dependencies)
        try:
            archive = await self._checked(stored)
        finally:
            stored.close()
        with archive:
            await self._clear_workspace_root_on_resume()
            await self.hydrate_workspace(cast(io.IOBase, archive))

    async def _checked(self, data: io.IOBase) -> IO[bytes]:
        def copy_and_check(target: IO[bytes]) -> None:
            copy(cast(IO[bytes], data), target, workspace_tar.MAX_BYTES)
            target.seek(0)
            workspace_tar.check(target)

        return await judged(WorkspaceArchiveWriteError, self.state.manifest.root, copy_and_check)

    async def _python(self, program: str, *arguments: str) -> list[str]:
        handle = await run(self._sandbox.attach())
        return [handle.python or "python3", "-I", "-c", program, *arguments]

    # --- ports

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        if port not in self._forwards:
            try:
                handle = await run(self._sandbox.attach())
                self._forwards[port] = await run(PortForward(handle, port).open())
            except (OSError, SandboxError) as error:
                raise ExposedPortUnavailableError(
                    port=port,
                    exposed_ports=self.state.exposed_ports,
                    reason="backend_unavailable",
                    context={"backend": self.state.backend, "detail": str(error)},
                    cause=error,
                ) from error
        return ExposedPortEndpoint(host=LOOPBACK, port=self._forwards[port].port, tls=False)

    async def _close_forwards(self) -> None:
        while self._forwards:
            await run(self._forwards.popitem()[1].close())
