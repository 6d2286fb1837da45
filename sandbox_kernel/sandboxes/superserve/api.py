"""The SDK, as the rest of this package uses it.

Its own command sessions decode output as text, keep all of it and never push back, so streams are
opened here with the documented websocket frames (``dial``). For that the SDK's token, routing hint
and host are needed, which it keeps to itself: the few private names are all in this module.

The API key is read from the environment whenever it is needed, and is stored nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone

import superserve as sdk
import websockets
from superserve._config import resolve_config
from websockets.asyncio.client import ClientConnection

from sandbox_kernel.errors import (
    SandboxError,
    SandboxExists,
    SandboxNotFound,
    SandboxTimeout,
    SandboxUnavailable,
    SpecError,
)

KEY, BASE_URL = "SUPERSERVE_API_KEY", "SUPERSERVE_BASE_URL"
DIAL_TIMEOUT, DELETE_TIMEOUT = 20.0, 120.0
_PROTOCOL = "superserve.exec.v1"
_MAX_MESSAGE = 4 * 2**20
_QUEUE = 16
NO_KEY = (
    "Superserve needs an API key: create one in its console, then "
    f"`export {KEY}=ss_live_...` before Jupyter is started."
)
_quiet = logging.getLogger("sandbox_kernel.websocket")
_quiet.setLevel(logging.WARNING)
ERRORS = (sdk.SandboxError, ValueError)
"""What the SDK raises; ValueError for a status that it does not know."""
DIAL_ERRORS = (OSError, TimeoutError, websockets.exceptions.WebSocketException)


def has_key() -> bool:
    return bool(os.environ.get(KEY))


def endpoint(base_url: str | None = None) -> str:
    """The control plane's address, given or the environment's. SandboxUnavailable without a key."""
    if not has_key():
        raise SandboxUnavailable(NO_KEY)
    return resolve_config(base_url=base_url).base_url


def remote(sandbox_id: str, base_url: str | None) -> sdk.AsyncSandbox:
    """The SDK's object for a sandbox, not touched (the SDK's own ``connect`` resumes it)."""
    endpoint(base_url)
    info = sdk.SandboxInfo(
        id=sandbox_id,
        name="",
        status=sdk.SandboxStatus.ACTIVE,
        created_at=datetime.now(timezone.utc),
    )
    return sdk.AsyncSandbox(info, "", resolve_config(base_url=base_url))


async def forget(sandbox: sdk.AsyncSandbox) -> None:
    """Close the connections of an SDK object; the sandbox lives on."""
    await sandbox._close_http_client()


async def fresh_token(sandbox: sdk.AsyncSandbox) -> None:
    """A new access token. Resumes the sandbox if it is paused, so ask for its state first."""
    await sandbox.commands._deps.refresh_activate()


def has_token(sandbox: sdk.AsyncSandbox) -> bool:
    return bool(sandbox.commands._deps.get_access_token())


async def dial(sandbox: sdk.AsyncSandbox) -> ClientConnection:
    """A websocket for one command. Raises one of ``DIAL_ERRORS`` if the token is stale, the
    sandbox does not run, or the service is out of reach."""
    deps = sandbox.commands._deps
    protocols = [_PROTOCOL, f"token.{deps.get_access_token()}"]
    if hint := deps.get_routing_hint():
        protocols.append(f"route.{hint}")
    return await websockets.connect(
        f"wss://boxd-{deps.sandbox_id}.{deps.sandbox_host}/exec/connect",
        subprotocols=[websockets.Subprotocol(p) for p in protocols],
        open_timeout=DIAL_TIMEOUT,
        compression=None,
        max_size=_MAX_MESSAGE,
        max_queue=_QUEUE,
        # Keeps proxies from closing an idle connection. The answer may be late: it waits behind
        # output that nobody has read yet.
        ping_interval=20,
        # At DEBUG it would write the access token down.
        logger=_quiet,
        ping_timeout=None,
        close_timeout=5,
    )


async def find(metadata: Mapping[str, str], base_url: str | None) -> list[sdk.SandboxInfo]:
    """The account's sandboxes with all of these tags."""
    url = endpoint(base_url)
    found = await sdk.AsyncSandbox.list(metadata=dict(metadata), base_url=url)
    # Not to be trusted blindly: whatever is found this way may be deleted.
    return [info for info in found if metadata.items() <= info.metadata.items()]


async def delete_snapshot(snapshot_id: str, base_url: str | None = None) -> None:
    """Delete a snapshot at the service."""
    with translating(f"Snapshot {snapshot_id} was not deleted"):
        async with asyncio.timeout(DELETE_TIMEOUT):
            await sdk.AsyncSnapshot.delete_by_id(snapshot_id, base_url=endpoint(base_url))


@contextlib.contextmanager
def translating(what: str) -> Iterator[None]:
    """Raise errors of the SDK as ours. ``what`` says what failed, with the sandbox's name."""
    try:
        yield
    except (*ERRORS, TimeoutError) as error:
        raise translated(error, what) from error


def is_ambiguous(error: BaseException) -> bool:
    """Whether a request that failed like this may have done its work nevertheless."""
    if isinstance(error, (sdk.SandboxTimeoutError, sdk.ServerError)):
        return True
    return isinstance(error, sdk.SandboxError) and error.status_code is None


def translated(error: BaseException, what: str) -> SandboxError:
    """An error of the SDK as one of ours."""
    said = str(error)[:500]
    if isinstance(error, sdk.AuthenticationError):
        return SandboxUnavailable(
            f"{what}: Superserve refuses the API key in {KEY} ({said}). Check it, or create a new "
            f"one in the console."
        )
    if isinstance(error, sdk.NotFoundError):
        return SandboxNotFound(f"{what}: Superserve does not know it ({said}).")
    if isinstance(error, sdk.ValidationError):
        return SpecError(f"{what}: Superserve does not take the request ({said}).")
    if isinstance(error, sdk.ConflictError):
        if error.code == "name_taken":
            return SandboxExists(f"{what}: {said}")
        return SandboxError(f"{what}: it is not in a state for that ({said}). Try again shortly.")
    if isinstance(error, sdk.RateLimitError):
        return SandboxUnavailable(f"{what}: {said} ({error.code}). {_RATE.get(error.code, '')}")
    if isinstance(error, (sdk.SandboxTimeoutError, TimeoutError)):
        return SandboxTimeout(f"{what}: Superserve did not answer in time ({said}).")
    if isinstance(error, ValueError):
        return SandboxError(
            f"{what}: the SDK does not understand the answer ({said}). Nothing was changed; try "
            f"`pip install -U superserve`."
        )
    return SandboxUnavailable(f"{what}: {said or type(error).__name__}. Try again shortly.")


_RATE: Mapping[str | None, str] = {
    "too_many_sandboxes": "Pause or remove one: `sandbox-kernel ps` lists them.",
    "rate_limited": "Try again shortly.",
}
