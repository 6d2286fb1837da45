"""What a kernel has published, as the recorder in its sandbox (``guest/recorder.py``) hands it
over. It is the word of the sandbox: bounded and taken apart with care."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field

from sandbox_kernel.errors import ProtocolError

OVERHEAD = 64 * 1024
"""Bytes that a recording may be longer than its limit."""
_SIZE = struct.Struct(">I")
_FEWEST_PARTS, _BYTES_A_PART = 4096, 32
"""A recording has no more parts than the first, or one for so many of its bytes: a Jupyter message
has longer ones, on average, and each costs more memory here than its bytes."""


@dataclass(frozen=True)
class Recording:
    """Messages as lists of their ZMQ parts, oldest first."""

    first: int
    """Number of the first message here; more than what was asked for if some are lost."""
    messages: list[list[bytes]] = field(default_factory=list)
    problem: str = ""
    """Why nothing is recorded now; empty if all is well."""

    @property
    def next(self) -> int:
        """Number of the message that comes after these."""
        return self.first + len(self.messages)


def parse_recording(data: bytes, sandbox: str) -> Recording:
    """ProtocolError if it is not what a recorder sends. It takes a moment for much data, so it is
    for a thread that nobody waits on."""
    try:
        head, newline, _ = data[:OVERHEAD].partition(b"\n")
        status = json.loads(head)
        first, problem = status["first"], status["problem"]
        if not newline or not isinstance(first, int) or not 0 <= first < 2**53:
            raise ValueError("no number")
        messages, position = [], len(head) + 1
        left = _FEWEST_PARTS + len(data) // _BYTES_A_PART
        while position < len(data):
            (count,) = _SIZE.unpack_from(data, position)
            position += _SIZE.size
            left -= count + 1
            if left < 0:
                raise ValueError("too many parts")
            parts = []
            for _ in range(count):
                (size,) = _SIZE.unpack_from(data, position)
                position += _SIZE.size
                if position + size > len(data):
                    raise ValueError("cut off")
                parts.append(data[position : position + size])
                position += size
            messages.append(parts)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise ProtocolError(
            f"The recording of the kernel in sandbox {sandbox!r} cannot be read ({error})."
        ) from error
    return Recording(first, messages, str(problem)[:200])
