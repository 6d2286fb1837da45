"""The wire: the protocol between host and sandbox, and the shells that carry it.

The protocol has no sockets, no clock and no threads: bytes in, events and bytes out.

    codec        link bytes <-> plain bytes (raw, or base64 lines for text-only streams)
    frames       plain bytes <-> frames
    handshake    the first frame in each direction of every link
    session      sequence numbers, acknowledgements, replay after a reconnect
    mux          many streams in one session: credit windows and priorities
    connection   all of them behind one object for each side of a link
    zmtp         a reader of ZeroMQ's own protocol

The shells do the I/O: ``peer`` (link <-> connection), ``pump`` (stream <-> socket), ``fdlink`` (a
link over descriptors), ``descriptors`` (descriptor passing). Both sides run the same modules, so
they use the standard library only and keep to Python 3.9. docs/wire.md is the contract.
"""

VERSION = 1
"""Version of the protocol. Both sides must have the same."""


class WireError(Exception):
    """The far side broke the protocol (``fatal``: the session is over), or the link lost or damaged
    bytes (not ``fatal``: a new link and a replay mend it)."""

    def __init__(self, message: str, *, fatal: bool = True) -> None:
        super().__init__(message)
        self.fatal = fatal
