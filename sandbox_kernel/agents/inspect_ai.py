"""SandboxKernelEnvironment: a sandbox for each sample of an Inspect evaluation.

    Task(dataset, solver=[...], sandbox=("sandbox_kernel", "sandbox.json"))

Inspect finds it by its entry point. The configuration is a file with the settings of the sandbox as
JSON (``{"backend": "local", "memory_mib": 1024}``), a SandboxKernelConfig, or nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, overload

from sandbox_kernel.agents.bridge_files import BridgeFiles, FileTooLarge
from sandbox_kernel.agents.extras import missing
from sandbox_kernel.agents.sandbox_bridge import Outcome, SandboxBridge
from sandbox_kernel.errors import ExecFailed, SandboxGone, SandboxNotFound, SpecError
from sandbox_kernel.spec import DEFAULT_BACKEND

try:
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxConnection,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
    from pydantic import BaseModel, Field
except ImportError as error:
    raise missing("inspect", error) from error

TYPE = "sandbox_kernel"
_MAX_CONFIG = 2**20


class SandboxKernelConfig(BaseModel):
    """How the sandboxes of a task are made. It goes into the logs: secrets are declared by name."""

    backend: str = DEFAULT_BACKEND
    settings: dict[str, Any] = Field(default_factory=dict)
    """Those of SandboxSpec."""

    def __hash__(self) -> int:  # Inspect keeps them in sets
        return hash(self.model_dump_json())

    @classmethod
    def of(cls, config: SandboxEnvironmentConfigType | None) -> SandboxKernelConfig:
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if not isinstance(config, str):
            raise SpecError(f"The sandbox of type {TYPE!r} takes no {type(config).__name__}.")
        return cls.in_file(Path(config))

    @classmethod
    def in_file(cls, path: Path) -> SandboxKernelConfig:
        try:
            with path.open("rb") as file:
                values = json.loads(file.read(_MAX_CONFIG))
        except (OSError, ValueError) as error:
            raise SpecError(f"{path} holds no settings of a sandbox as JSON: {error}.") from error
        if not isinstance(values, dict):
            raise SpecError(f"{path} holds no JSON object.")
        return cls(backend=values.pop("backend", DEFAULT_BACKEND), settings=values)


@sandboxenv(name=TYPE)
class SandboxKernelEnvironment(SandboxEnvironment):
    """One sandbox of one sample; it is removed with the sample."""

    def __init__(self, bridge: SandboxBridge) -> None:
        super().__init__()
        self.bridge = bridge
        self._files = BridgeFiles(bridge)
        self._user: frozenset[str] = frozenset()

    # --- its life

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],
    ) -> dict[str, SandboxEnvironment]:
        found = SandboxKernelConfig.of(config)
        bridge = SandboxBridge(found.backend, **found.settings)
        await bridge.open()
        return {"default": cls(bridge)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            await environment.as_type(cls).bridge.close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:  # noqa: A002  (Inspect's name)
        print(
            "Sandboxes of a run that was killed end with their lease. `sandbox-kernel ps` lists "
            f"them, and `sandbox-kernel rm {id or 'NAME'}` removes one."
        )

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> SandboxKernelConfig:
        return SandboxKernelConfig(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        """A hosted service has limits of its own, and a laptop should not run hundreds."""
        return 8

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        await self._check_user(user)
        command = f"sandbox-kernel shell {self.bridge.name}"
        return SandboxConnection(type=TYPE, command=command, container=self.bridge.name)

    # --- commands

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002  (Inspect's name)
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command. One that takes too long is killed, and not tried again: it may have done
        half of its work."""
        await self._check_user(user)
        done = await self._run(
            cmd,
            stdin=input.encode() if isinstance(input, str) else input or b"",
            cwd=cwd,
            env=env,
            timeout=timeout,
            max_output=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
        )
        if done.timed_out:
            raise TimeoutError(done.timed_out)
        if done.truncated:
            limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
            raise OutputLimitExceededError(limit, done.out + done.err)
        if done.exit_code == 126 and "Permission denied" in done.err:
            raise PermissionError(f"{done.err.strip()} (in sandbox {self.bridge.name!r})")
        return ExecResult(done.exit_code == 0, done.exit_code, done.out, done.err)

    async def _run(self, cmd: list[str], **options: Any) -> Outcome:
        try:
            return await self.bridge.run(cmd, **options)
        except (SandboxGone, SandboxNotFound, ExecFailed) as error:
            raise SandboxUnavailableError(str(error)) from error

    async def _check_user(self, user: str | None) -> None:
        """A sandbox of ours has one user."""
        if user is None:
            return
        if not self._user:
            told = await self._run(["/bin/sh", "-c", "id -u; id -un"])
            self._user = frozenset(told.out.split())
        if user not in self._user:
            raise SandboxUserUnsupportedError(
                f"Sandbox {self.bridge.name!r} runs commands as {'/'.join(sorted(self._user))}, "
                f"not as {user!r}."
            )

    # --- files

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        await self._files.write(file, data)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        try:
            data = await self._files.read(file, most=SandboxEnvironmentLimits.MAX_READ_FILE_SIZE)
        except FileTooLarge as error:
            limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
            raise OutputLimitExceededError(limit, None) from error
        return data.decode() if text else data
