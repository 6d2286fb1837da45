"""The OpenAI Agents SDK's sandboxes, made by any backend of this project.

    from sandbox_kernel.agents.openai_agents import SandboxKernelClient, SandboxKernelClientOptions

    options = SandboxKernelClientOptions(backend="local", memory_mib=1024)
    run_config = RunConfig(sandbox=SandboxRunConfig(client=SandboxKernelClient(), options=options))

Importing this registers the options and the session state with the SDK, which a process must do
before it reads a ``RunState`` that has one.

options     what a sandbox is to be, and what of it a session's state keeps
client      makes, resumes and deletes sessions
session     one session: its commands, files, snapshots and ports
sandbox     its sandbox, found or made once
transfers   its work on the background loop, and its temporary files
terminals   commands that run on while the model does something else
"""

from __future__ import annotations

try:
    import agents.sandbox  # noqa: F401
except ImportError as error:
    raise ImportError(
        "The OpenAI Agents SDK is missing: pip install 'sandbox-kernel[openai]'."
    ) from error

from sandbox_kernel.agents.openai_agents.client import SandboxKernelClient
from sandbox_kernel.agents.openai_agents.options import (
    SandboxKernelClientOptions,
    SandboxKernelSessionState,
)
from sandbox_kernel.agents.openai_agents.session import SandboxKernelSession

__all__ = [
    "SandboxKernelClient",
    "SandboxKernelClientOptions",
    "SandboxKernelSession",
    "SandboxKernelSessionState",
]
