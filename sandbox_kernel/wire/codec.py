"""Codecs: how a session's bytes look on a link.

``raw`` is for byte-exact streams. ``base64`` is for text streams (most hosted SDKs decode stdout as
UTF-8 and would damage raw bytes): lines of base64, each at most MAX_LINE long.

From the sandbox, the session starts after the PREAMBLE line. The host skips greetings before it.
"""

import binascii
from typing import Dict, List, Sequence, Type

from . import WireError
from .frames import Buffer

PREAMBLE = b"\nsandbox-kernel/1 ready\n"
MAX_BANNER = 65536
_RAW_PER_LINE = 49152
MAX_LINE = 65536 + 2

RAW = "raw"
BASE64 = "base64"


class PreambleFilter:
    """Drops what comes before the preamble."""

    def __init__(self) -> None:
        self.seen = b""
        """What came instead of the preamble."""
        self._open = False

    def feed(self, data: bytes) -> bytes:
        """The part of ``data`` that belongs to the session."""
        if self._open:
            return data
        self.seen += data
        # A text stream may turn line ends into CR LF.
        for preamble in (PREAMBLE, PREAMBLE.replace(b"\n", b"\r\n")):
            at = self.seen.find(preamble)
            if at >= 0:
                self._open = True
                rest, self.seen = self.seen[at + len(preamble) :], b""
                return rest
        if len(self.seen) > MAX_BANNER:
            raise WireError("no preamble in the first %d bytes" % MAX_BANNER, fatal=False)
        return b""


class RawCodec:
    def encode(self, buffers: Sequence[Buffer]) -> List[Buffer]:
        return list(buffers)

    def decode(self, data: bytes) -> Buffer:
        return data


class Base64Codec:
    def __init__(self) -> None:
        self._partial: List[bytes] = []
        self._partial_size = 0

    def encode(self, buffers: Sequence[Buffer]) -> List[Buffer]:
        data, size = memoryview(b"".join(buffers)), _RAW_PER_LINE
        return [binascii.b2a_base64(data[at : at + size]) for at in range(0, len(data), size)]

    def decode(self, data: bytes) -> Buffer:
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._keep(data)
            return b""
        lines = b"".join([*self._partial, head]).split(b"\n")
        self._partial, self._partial_size = [], 0
        self._keep(rest)
        try:
            # A lost or added character shows here or, at the latest, in a frame's checksum.
            return b"".join(binascii.a2b_base64(_padded(line)) for line in lines)
        except binascii.Error as error:
            raise WireError("line is not base64: %s" % error, fatal=False) from error

    def _keep(self, data: bytes) -> None:
        self._partial_size += len(data)
        if self._partial_size > MAX_LINE:
            raise WireError("line is longer than %d bytes" % MAX_LINE, fatal=False)
        if data:
            self._partial.append(data)


def _padded(line: bytes) -> bytes:
    line = line.strip()
    if len(line) % 4:
        raise binascii.Error("length %d" % len(line))
    return line


CODECS: "Dict[str, Type[RawCodec] | Type[Base64Codec]]" = {RAW: RawCodec, BASE64: Base64Codec}
"""By name; each direction of each link has a codec of its own."""
