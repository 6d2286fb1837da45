"""Islo's API, through its SDK: tokens, what is tried again, and errors as ours.

The SDK's own retries are switched off: it would repeat a create that was done, and a 409. What may
be done twice is tried again here, what may not is left to the caller (``Unsure``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from islo import AsyncIslo
from islo.core.api_error import ApiError
from islo.core.parse_error import ParsingError
from islo.custom import exchange_access_key

from sandbox_kernel.errors import (
    SandboxError,
    SandboxExists,
    SandboxNotFound,
    SandboxTimeout,
    SandboxUnavailable,
    SpecRefused,
)
from sandbox_kernel.untrusted_text import printable

T = TypeVar("T")

KEY_VARIABLE = "ISLO_API_KEY"
CONTROL, COMPUTE = "https://api.islo.dev", "https://ca.compute.islo.dev"
_CALL_TIMEOUT = 60.0
_EXCHANGE_TIMEOUT = 20.0
_TOKEN_MARGIN = 60.0
_ATTEMPTS = 6
_FIRST_DELAY, _MAX_DELAY = 0.25, 10.0
_MAX_FILE = 64 * 2**20
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_ERRORS = (ApiError, ParsingError, httpx.HTTPStatusError, httpx.TransportError)
"""The SDK raises ParsingError for answers that are not in its schema, such as a proxy's."""


class InvalidState(SandboxError):
    """The sandbox is not in a state for what was asked (409): paused, stopped, on its way."""


class Unsure(SandboxError):
    """No answer came: what was asked may have been done, or not."""


@dataclass(frozen=True)
class ServiceAddress:
    """Where the service is. Kept in records, so that a sandbox is found where it was made."""

    control: str = CONTROL
    compute: str = COMPUTE

    @classmethod
    def from_environment(cls) -> ServiceAddress:
        return cls(
            os.environ.get("ISLO_BASE_URL") or CONTROL,
            os.environ.get("ISLO_COMPUTE_URL") or COMPUTE,
        )


def api_key() -> str:
    """The key in the environment, which is the only place that it is kept in."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise SandboxUnavailable(
            f"The backend 'islo' needs an API key: make one in Islo's console and set "
            f"{KEY_VARIABLE} in the environment of Jupyter or of this command."
        )
    return key


class Tokens:
    """Session tokens, exchanged for the key and renewed before they end. The SDK and the exec
    streams ask here; a token that the service has refused is not used again."""

    def __init__(self, endpoint: ServiceAddress) -> None:
        self.current = ""
        self._endpoint = endpoint
        self._until = 0.0
        self._lock = asyncio.Lock()

    async def __call__(self) -> str:
        async with self._lock:
            if not self.current or time.monotonic() >= self._until:
                self.current = await self._renewed()
            return self.current

    def refused(self, token: str) -> None:
        if token == self.current:
            self.current = ""

    async def _renewed(self) -> str:
        key = api_key()
        try:
            answer = await asyncio.to_thread(
                exchange_access_key, self._endpoint.control, key, timeout=_EXCHANGE_TIMEOUT
            )
            token, age = answer.get("session_token"), answer.get("cookie_max_age", 600)
        except (KeyError, ValueError, AttributeError):
            token, age = None, None
        if not isinstance(token, str) or not token:
            raise SandboxUnavailable(f"Islo at {self._endpoint.control} gave no session token.")
        age = float(age) if isinstance(age, (int, float)) else 600.0
        self._until = time.monotonic() + max(age - _TOKEN_MARGIN, age / 2)
        return token


class Api:
    """The service at one endpoint. Belongs to one event loop."""

    def __init__(self, endpoint: ServiceAddress) -> None:
        self.endpoint = endpoint
        self._tokens = Tokens(endpoint)
        limits = httpx.Limits(max_connections=1000, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(limits=limits, timeout=_CALL_TIMEOUT)
        self._sdk = AsyncIslo(
            async_token=self._tokens,
            base_url=endpoint.control,
            compute_url=endpoint.compute,
            httpx_client=self._http,
        )
        self.sandboxes = self._sdk.sandboxes
        self.profiles = self._sdk.gateway_profiles

    async def close(self) -> None:
        await self._http.aclose()

    async def call(
        self,
        method: Callable[..., Awaitable[T]],
        *arguments: Any,
        doing: str,
        again: bool = True,
        timeout: float = _CALL_TIMEOUT,
        **fields: Any,
    ) -> T:
        """Call a method of the SDK. ``again`` says that doing it twice does no harm: then what
        passes is waited out; otherwise a call without an answer is Unsure."""
        options = {"max_retries": 0, "timeout_in_seconds": max(1, int(timeout))}

        async def attempt() -> T:
            return await method(*arguments, request_options=options, **fields)

        return await self._insist(attempt, doing, again)

    async def _insist(self, attempt: Callable[[], Awaitable[T]], doing: str, again: bool) -> T:
        renewed, number = False, 0
        while True:
            number += 1
            used = self._tokens.current
            try:
                return await attempt()
            except _ERRORS as error:
                status = _status(error)
                if status == 401 and not renewed:
                    # Refused before anything was done: the token was withdrawn early.
                    renewed = True
                    self._tokens.refused(used)
                    continue
                # A success that cannot be read was one, but tells nothing.
                lasting = status is not None and status >= 300 and status not in _TRANSIENT
                if lasting or (again and number >= _ATTEMPTS):
                    raise translated(error, doing) from error
                # With 429 it was turned away at the door, so nothing was done.
                if number >= _ATTEMPTS or not (again or status == 429):
                    raise Unsure(f"Islo did not say whether {doing}: {_words(error)}") from error
                delay = min(_MAX_DELAY, _FIRST_DELAY * 2 ** (number - 1))
                await asyncio.sleep(_retry_after(error) or delay)

    # --- what the SDK has no working call for

    @contextlib.asynccontextmanager
    async def exec_stream(
        self, sandbox: str, command: Sequence[str], env: Mapping[str, str], *, idle: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of an exec stream (SSE), as they come. The SDK's own call reads it to its end
        before it returns. ``idle`` seconds without a byte end it (httpx.ReadTimeout)."""
        url = f"{self.endpoint.compute}/sandboxes/{sandbox}/exec/stream"
        body = {"command": list(command), "env": dict(env)}
        timeout = httpx.Timeout(_CALL_TIMEOUT, read=idle)

        async def begin() -> httpx.Response:
            token = f"Bearer {await self._tokens()}"
            headers = {"Authorization": token, "Accept": "text/event-stream"}
            request = self._http.build_request(
                "POST", url, json=body, headers=headers, timeout=timeout
            )
            response = await self._http.send(request, stream=True)
            if response.is_error:
                await response.aread()
                await response.aclose()
                response.raise_for_status()
            return response

        response = await self._insist(begin, "the command was started", again=False)
        try:
            yield response.aiter_bytes()
        finally:
            await response.aclose()

    async def download(self, sandbox: str, path: str) -> bytes:
        """A file of the sandbox, up to a bound. SandboxNotFound."""

        async def attempt() -> bytes:
            kept = bytearray()
            pieces = self.sandboxes.download_file(
                sandbox, path=path, request_options={"max_retries": 0}
            )
            async for piece in pieces:
                kept += piece
                if len(kept) > _MAX_FILE:
                    raise SandboxError(f"{path} in sandbox {sandbox!r} is too large to be read.")
            return bytes(kept)

        return await self._insist(attempt, f"{path} was read", again=True)


def _answer(error: Exception) -> Any:
    """What may have a status and headers: an error of the SDK, or httpx's response."""
    return error.response if isinstance(error, httpx.HTTPStatusError) else error


def _status(error: Exception) -> int | None:
    return getattr(_answer(error), "status_code", None)


def _body(error: Exception) -> Mapping[str, Any]:
    body: Any = getattr(error, "body", None)
    if isinstance(error, httpx.HTTPStatusError):
        with contextlib.suppress(ValueError):
            body = error.response.json()
    if hasattr(body, "model_dump"):
        body = body.model_dump()
    return body if isinstance(body, dict) else {}


def _words(error: Exception) -> str:
    """What the service said, bounded, without anything that was sent to it."""
    body, status = _body(error), _status(error)
    inner = body.get("detail") if isinstance(body.get("detail"), dict) else body
    said = printable(str((inner or {}).get("message") or body.get("detail") or ""))[:500]
    if status is None:
        return f"{type(error).__name__}: {str(error)[:300]}".rstrip(": ")
    return f"HTTP {status}{f', {said}' if said else ''}"


def _retry_after(error: Exception) -> float | None:
    headers = dict(getattr(_answer(error), "headers", None) or {})
    value = {str(k).lower(): v for k, v in headers.items()}.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        return None
    return min(seconds, 60.0) if seconds > 0 else None


def translated(error: Exception, doing: str) -> SandboxError:
    """An error of the SDK as one of ours. ``doing`` is what did not happen."""
    status, words = _status(error), _words(error)
    what = f"Islo did not do it ({doing}): {words}."
    if status == 401:
        return SandboxUnavailable(
            f"Islo refused the API key in {KEY_VARIABLE}: {words}. Make a new one in its console."
        )
    if status in (402, 403):
        return SandboxUnavailable(f"{what} Look at the account's rights and credits.")
    if status == 404:
        return SandboxNotFound(what)
    if status == 409:
        code = str(_body(error).get("code", ""))
        return (SandboxExists if "EXISTS" in code else InvalidState)(what)
    if status in (400, 413, 422):
        return SpecRefused(what)
    if status is None and isinstance(error, httpx.TimeoutException):
        return SandboxTimeout(f"{what} Is {COMPUTE} reachable? Try again later.")
    return SandboxUnavailable(f"{what} Try again later.")
