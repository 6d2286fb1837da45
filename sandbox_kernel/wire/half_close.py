"""A pump whose two directions end one by one, as those of TCP do."""

import socket

from .pump import Pump


class HalfClosePump(Pump):
    """For connections of any protocol; a kernel's channels end both at once."""

    _far_ended = _near_ended = False

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
