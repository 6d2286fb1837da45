"""Questions to a kernel that show whether it answers, and whether its output arrives."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sandbox_kernel.agents.channels import Channels
from sandbox_kernel.jupyter.envelopes import Envelope

_AGAIN = 0.2
"""Seconds after which output that did not come is asked for again."""


@dataclass
class _Probe:
    reply: asyncio.Future[dict[str, Any]]
    heard: asyncio.Event = field(default_factory=asyncio.Event)


class Probes:
    """kernel_info_requests: kernels answer them on each channel and say so on iopub."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._open: dict[str, _Probe] = {}

    def answered(self, parent: str, envelope: Envelope) -> None:
        """A message that belongs to no job."""
        probe = self._open.get(parent)
        if probe is not None and not probe.reply.done():
            probe.reply.set_result(envelope.content())

    def published(self, parent: str) -> None:
        """The same on the iopub channel."""
        if (probe := self._open.get(parent)) is not None:
            probe.heard.set()

    async def ask(self, channel: str = "shell") -> dict[str, Any]:
        """The kernel's answer, whenever it comes. The caller has a limit."""
        with self._asked(channel) as probe:
            return await probe.reply

    async def until_heard(self) -> dict[str, Any]:
        """The kernel's answer, when its output arrives, too. The caller has a limit."""
        while True:
            with self._asked("shell") as probe:
                reply = await probe.reply
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN):
                        await probe.heard.wait()
                    return reply

    @contextlib.contextmanager
    def _asked(self, channel: str) -> Iterator[_Probe]:
        message_id = secrets.token_hex(16)
        probe = _Probe(asyncio.get_running_loop().create_future())
        self._open[message_id] = probe
        try:
            self._channels.send(channel, "kernel_info_request", {}, message_id)
            yield probe
        finally:
            del self._open[message_id]
