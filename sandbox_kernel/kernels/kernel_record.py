"""What a sandbox's record says about its kernel: the agent's token, and which process uses it."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from typing import Any

from sandbox_kernel.errors import SandboxNotFound
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.sandboxes.unattended import in_use


class KernelRecord:
    """The ``kernel`` part of one sandbox's record, as this process writes it.

    Whoever wrote its ``owner`` last has the kernel: another process that attaches overwrites it.
    """

    def __init__(self, handle: SandboxHandle) -> None:
        self._handle = handle
        self._records = Records()
        self._owner = secrets.token_hex(8)
        self._in_order = asyncio.Lock()
        """Facts are written in the order in which they were noted."""

    def load(self) -> Record:
        return self._records.load(self._handle.backend, self._handle.name)

    def token(self) -> str:
        """The token of the agent's session. SandboxNotFound if the sandbox has no agent."""
        token = self.load().kernel.get("token")
        if not isinstance(token, str):
            raise SandboxNotFound(
                f"Sandbox {self._handle.name!r} has no kernel to attach to: it was made without "
                f"one. Start a kernel in a new sandbox."
            )
        return token

    async def claim(self, new_token: str = "") -> None:
        """This process uses the kernel from now on. ``new_token``: the agent and kernel are new."""
        await asyncio.to_thread(self._claim, new_token)

    def _claim(self, new_token: str) -> None:
        with self._records.edit(self._handle.backend, self._handle.name) as record:
            kernel = {"token": new_token} if new_token else record.kernel
            record.kernel = {**kernel, "owner": self._owner, **in_use()}

    async def note(self, **facts: Any) -> None:
        """Add facts, unless the sandbox is gone or another process uses its kernel."""
        async with self._in_order:
            await asyncio.to_thread(self._note, facts)

    def _note(self, facts: dict[str, Any]) -> None:
        try:
            with self._records.edit(self._handle.backend, self._handle.name) as record:
                if record.id == self._handle.id and record.kernel.get("owner") == self._owner:
                    record.kernel.update(facts)
        except SandboxNotFound:
            return

    def names_another_owner(self) -> bool:
        """Whether another process has taken the kernel over."""
        try:
            return self.load().kernel.get("owner") != self._owner
        except SandboxNotFound:
            return False

    def names_another_sandbox(self) -> bool:
        """Whether somebody removed the sandbox and made another one with its name."""
        try:
            found = self.load().id
        except SandboxNotFound:
            return False
        return bool(found and self._handle.id) and found != self._handle.id


def fingerprint(key: str) -> str:
    """Identifies a kernel by the key that it signs with, without revealing the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""
