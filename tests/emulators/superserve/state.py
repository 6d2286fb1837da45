"""Sandboxes and snapshots of the emulated service, with their states and timers."""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import ipaddress
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..jails import Jail
from ..service import Refused, when

TICK = 0.1
TEMPLATES = ("superserve/base", "superserve/python-3.11", "superserve/node-22")


@dataclass
class Settings:
    """What tests may change while the emulator runs (``POST /_emulator/settings``)."""

    pause_seconds: float = 0.02
    resume_seconds: float = 0.02
    chunk: int = 32 * 1024 - 1
    """Bytes of output in one message: odd, so that characters are split."""
    rate: float = 0.0
    """Bytes a second of output; 0: no limit."""
    max_active: int = 100
    keep_network: bool = False
    """New sandboxes have the whole network, whatever rules they are asked for with."""
    root: bool = True
    """Whether commands run as root of their machine."""


@dataclass
class Sandbox:
    """One sandbox. ``status`` is what the API says."""

    request: Mapping[str, Any]
    jail: Jail
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: str = "active"
    created: float = field(default_factory=time.time)
    token: str = ""
    active_since: float = field(default_factory=time.monotonic)
    paused_since: float = 0.0
    changes: dict[str, Any] = field(default_factory=dict)
    attached: dict[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        return self.changes.get(key, self.request.get(key))

    def rotate(self) -> str:
        """A fresh access token; the one before is good for nothing from now on."""
        self.token = secrets.token_urlsafe(24)
        return self.token

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.request["name"],
            "status": self.status,
            "vcpu_count": 1,
            "memory_mib": 1024,
            "created_at": when(self.created),
            "timeout_seconds": self.get("timeout_seconds"),
            "auto_delete_seconds": self.get("auto_delete_seconds"),
            "network": self.get("network"),
            "metadata": self.get("metadata") or {},
            "preview_access": "private",
            "secrets": [
                {"env_key": key, "secret_name": name}
                for key, name in (self.request.get("secrets") or {}).items()
            ],
            "source_snapshot_id": self.request.get("from_snapshot"),
        }


@dataclass
class Snapshot:
    """The files of a sandbox as they were."""

    sandbox_id: str
    name: str | None
    key: str
    folder: Path
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    created: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "sandbox_id": self.sandbox_id,
            "kind": "mem+fs",
            "status": "ready",
            "name": self.name,
            "size_bytes": 1,
            "resources": {"vcpu_count": 1, "memory_mib": 1024, "disk_mib": 4096},
            "created_at": when(self.created),
            "ready_at": when(self.created),
        }


def _is_open(network: Mapping[str, Any]) -> bool:
    return bool(network.get("allow_out")) or "0.0.0.0/0" not in (network.get("deny_out") or ())


def _reaches(network: Mapping[str, Any], address: str, name: str, method: str, path: str) -> bool:
    """What is allowed, by name or address, wins over what is denied (docs: networking)."""
    for pattern in network.get("allow_out") or ():
        if fnmatch.fnmatchcase(name, pattern) or _contains(pattern, address):
            return True
    return not any(_contains(denied, address) for denied in network.get("deny_out") or ())


def _contains(pattern: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(pattern)
    except ValueError:
        return False  # it is a name


class Service:
    """All that the emulated service knows."""

    def __init__(self, folder: Path, drop: Callable[[str], None]) -> None:
        self.api_key = f"ss_live_{secrets.token_urlsafe(24)}"
        self.settings = Settings()
        self.sandboxes: dict[str, Sandbox] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.team_secrets = {"openai-prod", "TOKEN"}
        self._folder = folder
        self._drop = drop
        self._timer = asyncio.get_running_loop().create_task(self._tick())

    def find(self, sandbox_id: str) -> Sandbox:
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None:
            raise Refused(404, "not_found", "sandbox not found")
        return sandbox

    def find_snapshot(self, snapshot_id: str) -> Snapshot:
        snapshot = self.snapshots.get(snapshot_id)
        if snapshot is None:
            raise Refused(404, "not_found", "snapshot not found")
        return snapshot

    async def create(self, request: Mapping[str, Any]) -> Sandbox:
        """Names are not unique (assumed: the docs call them human-readable)."""
        self._check(request)
        source = None
        if request.get("from_snapshot"):
            source = self.find_snapshot(request["from_snapshot"])
        env = {**(request.get("env_vars") or {})}
        for key, name in (request.get("secrets") or {}).items():
            env[key] = f"proxy-token-for-{name}"
        if self.settings.keep_network:
            request = {**request, "network": None}
        network = request.get("network") or {}
        decide = functools.partial(_reaches, network) if _is_open(network) else None
        name, root = f"vm-{secrets.token_hex(6)}", self.settings.root
        jail = await Jail.create(name, env, network=decide, root=root)
        if source is not None:
            await jail.fill(source.folder)
        sandbox = Sandbox(dict(request), jail)
        sandbox.rotate()
        self.sandboxes[sandbox.id] = sandbox
        return sandbox

    def _check(self, request: Mapping[str, Any]) -> None:
        if not request.get("name"):
            raise Refused(400, "bad_request", "name is required")
        template = request.get("from_template")
        if template is not None and template not in TEMPLATES:
            raise Refused(404, "not_found", f"template {template!r} not found")
        for key in ("timeout_seconds", "auto_delete_seconds"):
            value = request.get(key)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise Refused(400, "bad_request", f"{key} must be a positive integer")
        for rule in (request.get("network") or {}).get("deny_out") or []:
            if not rule.replace(".", "").replace("/", "").isdigit():
                raise Refused(400, "bad_request", f"deny_out takes CIDRs, not {rule!r}")
        for name in (request.get("secrets") or {}).values():
            if name not in self.team_secrets:
                raise Refused(404, "not_found", f"secret {name!r} not found")
        active = sum(sandbox.status == "active" for sandbox in self.sandboxes.values())
        if active >= self.settings.max_active:
            raise Refused(429, "too_many_sandboxes", "active sandbox limit reached")

    async def pause(self, sandbox: Sandbox) -> None:
        """Stops every process and cuts every connection."""
        if sandbox.status != "active":
            raise Refused(409, "conflict", f"sandbox is {sandbox.status}")
        sandbox.status = "pausing"
        self._drop(sandbox.id)
        sandbox.jail.freeze()
        await asyncio.sleep(self.settings.pause_seconds)
        if sandbox.status == "pausing":
            sandbox.status, sandbox.paused_since = "paused", time.monotonic()

    async def resume(self, sandbox: Sandbox) -> None:
        if sandbox.status != "paused":
            raise Refused(409, "conflict", f"sandbox is {sandbox.status}")
        sandbox.status = "resuming"
        await asyncio.sleep(self.settings.resume_seconds)
        if sandbox.status == "resuming":
            sandbox.jail.thaw()
            sandbox.status, sandbox.active_since = "active", time.monotonic()

    async def delete(self, sandbox: Sandbox) -> None:
        sandbox.status = "deleted"
        self.sandboxes.pop(sandbox.id, None)
        self._drop(sandbox.id)
        await sandbox.jail.destroy()

    async def snapshot(self, sandbox: Sandbox, name: str | None, key: str) -> Snapshot:
        """The same key gives the same snapshot."""
        for known in self.snapshots.values():
            if known.key == key:
                return known
        if sandbox.status not in ("active", "paused"):
            raise Refused(409, "conflict", f"sandbox is {sandbox.status}")
        made = Snapshot(sandbox.id, name, key, self._folder / f"snapshot-{secrets.token_hex(6)}")
        await sandbox.jail.save(made.folder)
        self.snapshots[made.id] = made
        return made

    async def delete_snapshot(self, snapshot: Snapshot) -> None:
        del self.snapshots[snapshot.id]
        await asyncio.to_thread(shutil.rmtree, snapshot.folder)

    async def _tick(self) -> None:
        """``timeout_seconds`` caps the time that a sandbox is active at a stretch (docs: create);
        ``auto_delete_seconds`` counts while it is paused (SDK: SandboxInfo)."""
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            for sandbox in list(self.sandboxes.values()):
                limit, delete = sandbox.get("timeout_seconds"), sandbox.get("auto_delete_seconds")
                if sandbox.status == "active" and limit and now - sandbox.active_since > limit:
                    await self.pause(sandbox)
                elif sandbox.status == "paused" and delete and now - sandbox.paused_since > delete:
                    await self.delete(sandbox)

    async def close(self) -> None:
        self._timer.cancel()
        for sandbox in list(self.sandboxes.values()):
            await self.delete(sandbox)
