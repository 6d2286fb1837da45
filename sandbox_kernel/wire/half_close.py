"""A pump whose two directions end one by one, as those of TCP do."""

import socket
import struct

from .pump import Pump

_RESET = struct.pack("ii", 1, 0)


class HalfClosePump(Pump):
    """For connections of any protocol; a kernel's channels end both at once. A connection that
    breaks at one end is reset at the other: an orderly end could be taken for that of a file."""

    _far_ended = _near_ended = False

    def close(self, reason: str) -> None:
        self._break_off()
        super().close(reason)

    def on_reset(self, reason: str) -> None:
        self._break_off()
        super().on_reset(reason)

    def _break_off(self) -> None:
        if not self._closed:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _hung_up(self, reason: str) -> None:
        self._near_ended = True
        super()._hung_up(reason)
        if not reason and self._far_ended:
            self._close_socket()

    def _finish(self) -> None:
        self._far_ended = True
        if self._near_ended:
            return self._close_socket()
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.close(str(error))
