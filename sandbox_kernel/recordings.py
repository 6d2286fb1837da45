"""Recordings: a kernel's output as the recorder in its sandbox (``guest/recorder.py``) sends it.
They come from the sandbox, so they are bounded and never trusted."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field

from sandbox_kernel.errors import ProtocolError

OVERHEAD = 64 * 1024
"""Bytes by which a recording may exceed its limit."""
_SIZE = struct.Struct(">I")
_FEWEST_PARTS, _BYTES_A_PART = 4096, 32
"""Most parts of a recording: the first, and one for so many of its bytes. Parts of Jupyter messages
are longer on average, and each costs more memory here than its bytes."""


@dataclass(frozen=True)
class Recording:
    """Messages as lists of their ZMQ parts, oldest first."""

    first: int
    """Number of the first message; higher than requested if older ones were dropped."""
    messages: list[list[bytes]] = field(default_factory=list)
    problem: str = ""
    """Why nothing is recorded now, or empty."""

    @property
    def next(self) -> int:
        """Number of the message that comes after these."""
        return self.first + len(self.messages)


def parse_recording(data: bytes, sandbox: str) -> Recording:
    """ProtocolError if a recorder cannot have sent this. Call it in a thread: it takes time."""
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
