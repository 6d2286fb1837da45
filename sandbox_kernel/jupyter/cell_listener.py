"""Hears which cell a kernel runs, for the audit of what leaves its sandbox.

A client of our own that subscribes to the kernel's status messages and to the echo of its input.
Only kernels with a gateway have one. All of it is the guest's word: bounded, and never believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from sandbox_kernel.jupyter.envelopes import Envelope, open_envelope
from sandbox_kernel.jupyter.iopub_listener import PREFIX, listen
from sandbox_kernel.kernels.cells import Cells

_STATUS, _INPUT = b"status", b"execute_input"
_REQUEST = "execute_request"
_OLDEST = 5.0


async def follow_cells(cells: Cells, connection: Mapping[str, Any]) -> None:
    """Tell ``cells`` what the kernel does. Runs until it is cancelled."""
    socket, narrowed = listen(connection), False
    cells.heard = True
    try:
        while True:
            envelope = open_envelope(await socket.recv_multipart())
            if envelope is None:
                continue
            if not narrowed and envelope.topic.endswith(_STATUS):
                # From now on nothing else needs to travel.
                narrowed, topic = True, envelope.topic.removesuffix(_STATUS)
                socket.subscribe(topic + _STATUS)
                socket.subscribe(topic + _INPUT)
                socket.unsubscribe(PREFIX)
            hear(cells, envelope)
    finally:
        cells.heard = False
        cells.flush()
        socket.close(linger=0)


def hear(cells: Cells, envelope: Envelope) -> None:
    """Take one message."""
    if envelope.parent_kind != _REQUEST:
        return
    request, ago = str(envelope.parent.get("msg_id")), _age(envelope)
    if envelope.kind == "execute_input":
        cells.began(request, envelope.content().get("execution_count"), ago=ago)
    elif envelope.kind == "status":
        state = envelope.content().get("execution_state")
        if state == "busy":
            cells.began(request, ago=ago)
        elif state == "idle":
            cells.ended(request, ago=ago)


def _age(envelope: Envelope) -> float:
    """Seconds since the message was sent, as far as the guest's clock and word are good."""
    try:
        sent = datetime.fromisoformat(str(envelope.header.get("date")))
        return min(max((datetime.now(timezone.utc) - sent).total_seconds(), 0.0), _OLDEST)
    except (ValueError, TypeError, OverflowError):
        return 0.0
