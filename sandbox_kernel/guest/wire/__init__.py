"""The wire: what host and sandbox say to each other, as state machines without I/O.

    codec      link bytes <-> plain bytes (raw, or base64 lines for text-only streams)
    frames     plain bytes <-> frames
    handshake  the first frame in each direction of every link
    session    sequence numbers, acknowledgements, replay after a reconnect
    mux        many streams in one session: credit windows and priorities

No sockets, no clock, no threads: bytes in, events and bytes out. The same modules run on both
sides, so they use the standard library only and keep to Python 3.9. docs/wire.md is the contract.
"""

VERSION = 1
"""Version of the protocol. Both sides must have the same."""


class WireError(Exception):
    """The far side sent what the protocol does not allow, or bytes were damaged on the way.

    ``fatal`` tells whether the session is over (True: the peer itself is wrong) or only this link
    (False: bytes were lost or damaged; a new link and a replay mend it).
    """

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal
