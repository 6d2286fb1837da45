"""The gateway's own answers to HTTP clients."""

from __future__ import annotations

from sandbox_kernel.gateway.http_head import Headers, write_response
from sandbox_kernel.gateway.refusals import Refusal

ESTABLISHED = write_response(200, "Connection established", ())


def error_answer(refusal: Refusal, *, to_head: bool = False, close: bool = True) -> bytes:
    """The answer to a request that goes no further. Its reason phrase is what requests and curl
    show of a failed CONNECT. ``to_head``: the request was HEAD, so there is no body."""
    text = f"{refusal}\n".encode("ascii")
    headers: Headers = (
        ("content-type", "text/plain; charset=us-ascii"),
        ("content-length", str(len(text))),
        *((("retry-after", str(refusal.wait)),) if refusal.wait else ()),
        *((("connection", "close"),) if close else ()),
    )
    return write_response(refusal.status, str(refusal), headers) + (b"" if to_head else text)
