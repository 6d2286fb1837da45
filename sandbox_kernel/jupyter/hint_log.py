"""Logs hints (``missing_file_hints``, ``network_hints``) for clients without our server extension.

Nbclient and its like show only what the kernel itself has signed, so a line below the traceback is
not ours to add; where no log is set up, a warning goes to stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sandbox_kernel.jupyter.death_message import visible_log
from sandbox_kernel.jupyter.envelopes import open_envelope
from sandbox_kernel.jupyter.iopub_listener import PREFIX, listen
from sandbox_kernel.kernels import SandboxedKernel

_MOST_HINTS = 20
Hint = Callable[[Mapping[str, Any]], str]
"""Says something after an error of a cell (the content of its message), or nothing."""
_STATUS, _ERROR = b"status", b"error"


async def log_hints(
    kernel: SandboxedKernel,
    connection: Mapping[str, Any],
    hint: Hint,
) -> None:
    """Log what ``hint`` says of each error. Runs until it is cancelled, or has said enough."""
    told: set[str] = set()
    socket, topic = listen(connection), PREFIX
    try:
        while len(told) < _MOST_HINTS:
            envelope = open_envelope(await socket.recv_multipart())
            if envelope is None:
                continue
            if topic == PREFIX and envelope.topic.endswith(_STATUS):
                # From now on only errors need to travel.
                topic = envelope.topic.removesuffix(_STATUS) + _ERROR
                socket.subscribe(topic)
                socket.unsubscribe(PREFIX)
            if envelope.kind == "error":
                text = hint(envelope.content())
                if text and text not in told:
                    told.add(text)
                    visible_log(kernel.log).warning("%s", text)
    finally:
        socket.close(linger=0)
