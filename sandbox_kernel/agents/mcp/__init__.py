"""``sandbox-kernel mcp``: sandboxes for agents, through the Model Context Protocol.

policy          what the operator allows; configuration reads it from a file and options
ledger          which sandboxes the servers of a policy have made; sandboxes has those in use
slow            work that may take longer than a call
cells           the tools that run code; workspaces, files and resources the others
content         what a cell put out, as MCP content
server          all of it as an MCPServer; stdio and http are its two doors
client_config   what to paste into a client's configuration

Nothing hangs on an MCP session: a sandbox and a job are named in each call, so that a client or a
server that starts again goes on where it was. No call waits longer than ``call_seconds``.
The package ``mcp`` is an extra: policy, configuration, ledger, sandboxes, slow and client_config do
without.
"""
