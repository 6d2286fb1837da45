"""What to paste into the configuration of an MCP client, for ``--print-config``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from sandbox_kernel.agents.mcp.policy import NAME

CLIENTS = {
    "claude": ".mcp.json of a project (Claude Code), or claude_desktop_config.json",
    "cursor": "~/.cursor/mcp.json, or .cursor/mcp.json of a project",
    "vscode": ".vscode/mcp.json of a project, or the command 'MCP: Open User Configuration'",
}
"""Clients, and where they have their servers."""
_LISTS = {"vscode": "servers"}
_WITHOUT_TYPE = ("cursor",)


def stdio_config(client: str, arguments: Sequence[str]) -> dict[str, Any]:
    """For a client that starts ``sandbox-kernel mcp`` itself, with these further arguments."""
    command, *words = own_command()
    entry: dict[str, Any] = {"command": command, "args": [*words, "mcp", *arguments]}
    return _config(client, {"type": "stdio", **entry})


def http_config(client: str, url: str, token: str) -> dict[str, Any]:
    """For a client that talks to a server that runs."""
    headers = {"Authorization": f"Bearer {token}"}
    return _config(client, {"type": "http", "url": url, "headers": headers})


def _config(client: str, entry: dict[str, Any]) -> dict[str, Any]:
    if client in _WITHOUT_TYPE:
        del entry["type"]
    return {_LISTS.get(client, "mcpServers"): {NAME: entry}}


def own_command() -> list[str]:
    """How a client starts this installation, from whatever folder: the command beside our Python.
    Else ``-P``, without which Python would import from the folder that the client is in."""
    command = os.path.join(os.path.dirname(sys.executable), "sandbox-kernel")
    if os.access(command, os.X_OK):
        return [command]
    return [sys.executable, "-P", "-m", "sandbox_kernel"]
