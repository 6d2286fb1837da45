"""Sandboxes, commands and gateway profiles of the emulated service."""

from __future__ import annotations

import asyncio
import fnmatch
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import ExecFailed, SandboxError
from sandbox_kernel.sandboxes.base import ExecStream

from ..jails import Jail
from ..outside import Decide
from ..service import Refused, when

TICK = 0.1


@dataclass
class Settings:
    """What tests may change while the emulator runs (``POST /_emulator/settings``)."""

    start_seconds: float = 0.02
    pause_seconds: float = 0.02
    resume_seconds: float = 0.02
    chunk: int = 32 * 1024 - 1
    """Bytes of output in one event: odd, so that characters are split."""
    rate: float = 0.0
    """Bytes a second of output; 0: no limit."""
    plain_events: bool = False
    """Output as plain text in the event's data, instead of in a JSON object."""
    max_body: int = 256 * 1024
    """Bytes of a request other than an upload."""
    max_result: int = 64 * 1024
    """Bytes of output that the result of a command keeps."""
    keep_network: bool = False
    """New profiles let everything past the gateway, whatever is asked for."""
    root: bool = True
    """Whether commands run as root of their machine."""
    token_seconds: int = 600
    fail_create: bool = False
    """New sandboxes become ``failed``."""


@dataclass
class Command:
    """A command that was started by POST, and its result as far as it is known."""

    id: str
    status: str = "running"
    code: int | None = None
    out: bytes = b""
    err: bytes = b""
    truncated: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "exec_id": self.id,
            "status": self.status,
            "exit_code": self.code,
            "stdout": self.out.decode(errors="replace"),
            "stderr": self.err.decode(errors="replace"),
            "truncated": self.truncated,
        }


@dataclass
class Sandbox:
    """One sandbox. ``status`` is what the API says."""

    request: Mapping[str, Any]
    jail: Jail | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: str = "starting"
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    streams: int = 0
    commands: dict[str, Command] = field(default_factory=dict)
    files: Path | None = None

    @property
    def name(self) -> str:
        return str(self.request["name"])

    def lifecycle(self, key: str) -> Any:
        return (self.request.get("lifecycle") or {}).get(key)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "image": self.request.get("image") or "islo/base",
            "created_at": when(self.created),
            "lifecycle": self.request.get("lifecycle"),
            "spec": {
                "vcpus": self.request.get("vcpus") or 1,
                "memory_mb": self.request.get("memory_mb") or 1024,
                "disk_gb": self.request.get("disk_gb") or 10,
            },
        }


@dataclass
class Profile:
    """A gateway profile with its rules."""

    request: Mapping[str, Any]
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    rules: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.request["name"],
            "description": self.request.get("description"),
            "default_action": self.request.get("default_action") or "allow",
            "internet_enabled": bool(self.request.get("internet_enabled", True)),
            "is_default": bool(self.request.get("is_default", False)),
            "rule_count": len(self.rules),
            "rules": self.rules,
        }


def decide(
    profile: Mapping[str, Any], host: str, method: str, path: str, *, low_first: bool
) -> str:
    """What a profile does with a request (assumed: patterns as in shells, where ``*.name`` does
    not match the name). Whether low or high priorities come first the SDK does not say."""
    rules = sorted(profile["rules"], key=lambda r: r["priority"], reverse=not low_first)
    for rule in rules:
        methods = rule.get("methods")
        pattern = rule.get("path_pattern")
        if (
            fnmatch.fnmatchcase(host, rule["host_pattern"])
            and (not methods or method in methods)
            and (not pattern or fnmatch.fnmatchcase(path, pattern))
        ):
            return str(rule["action"])
    return str(profile["default_action"])


def _network(profile: Profile | None) -> Decide | None:
    """What a sandbox with this profile reaches. Without one, everything (docs: gateways)."""
    if profile is None or profile.as_json()["internet_enabled"]:
        return lambda *_: True
    plain = profile.as_json()
    if plain["default_action"] == "deny" and all(r["action"] == "deny" for r in plain["rules"]):
        return None

    def reaches(address: str, name: str, method: str, path: str) -> bool:
        orders = (True, False)
        actions = [decide(plain, name or address, method, path, low_first=o) for o in orders]
        return set(actions) == {"allow"}

    return reaches


class Service:
    """All that the emulated service knows."""

    def __init__(self, folder: Path, drop: Callable[[str], None]) -> None:
        self.api_key = f"ak_{secrets.token_urlsafe(24)}"
        self.settings = Settings()
        self.tokens: dict[str, float] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.profiles: dict[str, Profile] = {}
        self.order: list[str] = []
        """What was made and deleted, for tests of the order."""
        self._folder = folder
        self._drop = drop
        self._tasks: set[asyncio.Task[None]] = set()
        self._keep(self._tick())

    def _keep(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- sandboxes

    def find(self, name: str) -> Sandbox:
        for sandbox in self.sandboxes.values():
            if name in (sandbox.name, sandbox.id):
                return sandbox
        raise Refused(404, "SANDBOX_NOT_FOUND", f"sandbox {name!r} not found")

    async def create(self, request: Mapping[str, Any]) -> Sandbox:
        """Names are unique (the SDK's ErrorCode has SANDBOX_ALREADY_EXISTS)."""
        name = request.get("name") or f"sandbox-{secrets.token_hex(4)}"
        if any(sandbox.name == name for sandbox in self.sandboxes.values()):
            raise Refused(409, "SANDBOX_ALREADY_EXISTS", f"sandbox {name!r} exists already")
        if "no-such-image" in (request.get("image") or ""):
            raise Refused(400, "SANDBOX_PROVISIONING_FAILED", "the image cannot be pulled")
        profile = request.get("gateway_profile")
        if profile is not None and profile not in self.profiles:
            raise Refused(404, "RESOURCE_NOT_FOUND", f"no gateway profile {profile!r}")
        sandbox = Sandbox({**request, "name": name})
        self.sandboxes[sandbox.id] = sandbox
        self.order.append(f"+sandbox {name}")
        self._keep(self._boot(sandbox))
        return sandbox

    async def _boot(self, sandbox: Sandbox) -> None:
        await asyncio.sleep(self.settings.start_seconds)
        if self.settings.fail_create:
            sandbox.status = "failed"
            return
        env = {k: v for k, v in (sandbox.request.get("env") or {}).items() if v is not None}
        disk = sandbox.request.get("disk_gb")
        profile = self.profiles.get(sandbox.request.get("gateway_profile") or "")
        jail = await Jail.create(
            f"vm-{secrets.token_hex(6)}",
            env,
            disk and disk * 1024,
            network=_network(profile),
            root=self.settings.root,
        )
        if sandbox.files is not None:
            await jail.fill(sandbox.files)
        if sandbox.status not in ("starting", "resuming"):
            await jail.destroy()
            return
        sandbox.jail = jail
        sandbox.used = time.monotonic()
        sandbox.status = "running"

    async def use(self, name: str) -> tuple[Sandbox, Jail]:
        """The sandbox for a command or a file: it must run; a paused one may be resumed by its
        policy (assumed: before the request is answered)."""
        sandbox = self.find(name)
        if sandbox.status == "paused" and sandbox.lifecycle("auto_resume") == "on_activity":
            await self.resume(sandbox)
        if sandbox.status != "running" or sandbox.jail is None:
            raise Refused(409, "SANDBOX_INVALID_STATE", f"sandbox is {sandbox.status}")
        sandbox.used = time.monotonic()
        return sandbox, sandbox.jail

    async def pause(self, sandbox: Sandbox) -> None:
        """Stops every process and cuts every connection."""
        if sandbox.status != "running" or sandbox.jail is None:
            raise Refused(409, "SANDBOX_INVALID_STATE", f"sandbox is {sandbox.status}")
        sandbox.status = "pausing"
        self._drop(sandbox.id)
        sandbox.jail.freeze()
        await asyncio.sleep(self.settings.pause_seconds)
        if sandbox.status == "pausing":
            sandbox.status = "paused"

    async def resume(self, sandbox: Sandbox) -> None:
        """A paused one goes on; a stopped one boots with its files (assumed: the SDK has no other
        call that could start it)."""
        if sandbox.status not in ("paused", "stopped"):
            raise Refused(409, "SANDBOX_INVALID_STATE", f"sandbox is {sandbox.status}")
        was, sandbox.status = sandbox.status, "resuming"
        await asyncio.sleep(self.settings.resume_seconds)
        if was == "stopped":
            self._keep(self._boot(sandbox))
        elif sandbox.status == "resuming":
            assert sandbox.jail is not None
            sandbox.jail.thaw()
            sandbox.used = time.monotonic()
            sandbox.status = "running"

    async def stop(self, sandbox: Sandbox) -> None:
        """The VM ends, the record and the files stay (SDK: stop_sandbox)."""
        if sandbox.status not in ("running", "paused") or sandbox.jail is None:
            raise Refused(409, "SANDBOX_INVALID_STATE", f"sandbox is {sandbox.status}")
        sandbox.status = "stopping"
        sandbox.files = self._folder / f"files-{sandbox.id}-{secrets.token_hex(4)}"
        jail, sandbox.jail = sandbox.jail, None
        await jail.save(sandbox.files)
        await jail.destroy()
        self._drop(sandbox.id)
        if sandbox.status == "stopping":
            sandbox.status = "stopped"

    async def delete(self, sandbox: Sandbox) -> None:
        sandbox.status = "deleted"
        self.sandboxes.pop(sandbox.id, None)
        self.order.append(f"-sandbox {sandbox.name}")
        jail, sandbox.jail = sandbox.jail, None
        if jail is not None:
            await jail.destroy()
        self._drop(sandbox.id)

    async def start(
        self, jail: Jail, command: Sequence[str], env: Mapping[str, Any], cwd: str | None
    ) -> ExecStream:
        if not command or not all(isinstance(word, str) for word in command):
            raise Refused(400, "INVALID_REQUEST", "command is a list of strings")
        try:
            return await jail.handle.open_stream(
                list(command), env={k: v for k, v in env.items() if v is not None}, cwd=cwd
            )
        except ExecFailed as error:
            raise Refused(400, "COMMAND_NOT_FOUND", str(error)) from None
        except SandboxError as error:
            raise Refused(409, "SANDBOX_INVALID_STATE", str(error)) from None

    def run(self, sandbox: Sandbox, stream: ExecStream) -> Command:
        """A command that was started by POST goes on by itself, without stdin."""
        command = Command(f"exec-{secrets.token_hex(8)}")
        sandbox.commands[command.id] = command
        self._keep(self._run(command, stream))
        return command

    async def _run(self, command: Command, stream: ExecStream) -> None:
        async def collect(read: Any) -> bytes:
            kept = b""
            while piece := await read():
                room = self.settings.max_result - len(kept)
                command.truncated = command.truncated or len(piece) > room
                kept += piece[:room]
            return kept

        try:
            await stream.close_stdin()
            out, err = await asyncio.gather(collect(stream.read), collect(stream.read_stderr))
            command.out, command.err = out, err
            code = await stream.wait()
            command.code = code if code >= 0 else 128 - code
            command.status = "completed"
        except SandboxError as error:
            command.status, command.code, command.err = "failed", -1, str(error).encode()
        finally:
            await stream.close()

    # --- time

    async def _tick(self) -> None:
        """``pause_after_idle`` counts from the last use, and an open exec stream is use (assumed);
        ``delete_after`` counts from the creation (assumed)."""
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            for sandbox in list(self.sandboxes.values()):
                if sandbox.streams:
                    sandbox.used = now
                idle, delete = (
                    sandbox.lifecycle("pause_after_idle"),
                    sandbox.lifecycle("delete_after"),
                )
                if delete and time.time() - sandbox.created > delete:
                    await self.delete(sandbox)
                elif idle and sandbox.status == "running" and now - sandbox.used > idle:
                    await self.pause(sandbox)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sandbox in list(self.sandboxes.values()):
            await self.delete(sandbox)
