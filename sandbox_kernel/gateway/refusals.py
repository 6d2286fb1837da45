"""Why a connection or a request goes no further."""

from __future__ import annotations

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.untrusted_text import printable

_MOST_TEXT = 300


class Refusal(SandboxError):
    """A request is answered with an error. ``status`` is HTTP's; the text is one line of ASCII;
    ``wait`` is after how many seconds another try makes sense, 0 if never."""

    def __init__(self, status: int, text: str, *, wait: int = 0) -> None:
        super().__init__(one_line(text))
        self.status = status
        self.wait = wait

    @property
    def is_denial(self) -> bool:
        """The policy said no; anything else went wrong."""
        return self.status in (403, 421, 429)


class PeerClosed(SandboxError):
    """The other side closed the connection before it had said all."""


def one_line(text: str) -> str:
    """Text for a status line: ASCII without control characters, and short."""
    plain = printable(" ".join(text.split())).encode("ascii", "backslashreplace").decode()
    return plain if len(plain) <= _MOST_TEXT else plain[: _MOST_TEXT - 3] + "..."
