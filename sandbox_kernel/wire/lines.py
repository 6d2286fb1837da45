"""Lines: cuts a stream of bytes into lines, for JSON messages."""

from typing import List

from .frames import Buffer

MAX_LINE = 4 * 2**20


class LineReader:
    """No line is longer than MAX_LINE."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: Buffer) -> List[bytes]:
        """The lines that ``data`` completes. ValueError for a line that is too long."""
        head, newline, rest = bytes(data).rpartition(b"\n")
        lines = []
        if newline:
            lines = bytes(self._partial + head).split(b"\n")
            self._partial.clear()
        # Only new bytes are searched, so a line that comes byte by byte costs no more.
        self._partial += rest
        if len(self._partial) > MAX_LINE:
            raise ValueError("line is longer than %d bytes" % MAX_LINE)
        return lines
