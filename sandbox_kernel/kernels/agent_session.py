"""The agent of a sandbox: starting it, and giving the agent of a copied sandbox a new token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from sandbox_kernel import guest_program
from sandbox_kernel.errors import SessionRefused
from sandbox_kernel.kernels.kernel_record import KernelRecord
from sandbox_kernel.kernels.launched_process import Log
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.untrusted_text import printable

_MAX_OUTPUT = 4000


async def start_agent(
    handle: SandboxHandle, record: KernelRecord, warm_argv: Sequence[str], log: Log
) -> str:
    """Start an agent in a sandbox that has none; its token. ``warm_argv`` is the command line of a
    kernel that the agent should keep ready."""
    # First, because it says in plain words that an image has no Python, or the wrong one.
    environment = await _missing_packages(handle, log) if handle.python else {}
    await handle.install_guest(guest_program.zipapp())
    warm = handle.kernel_argv(warm_argv) if warm_argv else ()
    await handle.spawn(
        handle.guest_argv("agent", handle.agent_folder, str(handle.agent_lease), *warm),
        env=environment,
        main=True,
    )
    token = secrets.token_hex(32)
    await record.claim(token)
    return token


async def _missing_packages(handle: SandboxHandle, log: Log) -> dict[str, str]:
    # Only images lack packages; jails do not need this.
    from sandbox_kernel.sandboxes.missing_packages import provide  # lazy: start-up time

    return await provide(handle, log)


async def rekey_agent(handle: SandboxHandle, record: KernelRecord) -> str:
    """Tell the agent of a copied sandbox that it is a copy; its new token."""
    token = secrets.token_hex(32)
    request = {
        "token": record.token(),
        "new_token": token,
        "name": handle.name,
        "entropy": secrets.token_hex(64),
    }
    command, *arguments = handle.guest_argv("rekey", handle.agent_folder)
    result = await handle.exec(
        command,
        arguments,
        stdin=json.dumps(request).encode() + b"\n",
        timeout=handle.spec.start_timeout,
        max_output=_MAX_OUTPUT,
    )
    if not result.ok:
        raise SessionRefused(
            f"The agent in sandbox {handle.name!r} refused its new token: "
            f"{printable(result.output).strip()}"
        )
    await record.claim(token)
    return token
