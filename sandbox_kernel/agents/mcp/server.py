"""The MCP server: its tools and resources, and how errors reach a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import (
    ResourceError,
    ResourceNotFoundError,
    ToolError,
    UnexpectedResourceError,
    UnexpectedToolError,
)
from mcp_types import CallToolResult, InputRequiredResult, Tool, ToolAnnotations
from pydantic import ValidationError

from sandbox_kernel import __version__
from sandbox_kernel.agents.mcp.cells import Cells
from sandbox_kernel.agents.mcp.content import status
from sandbox_kernel.agents.mcp.files import Files, mime_of
from sandbox_kernel.agents.mcp.policy import NAME, Policy
from sandbox_kernel.agents.mcp.resources import add_resources
from sandbox_kernel.agents.mcp.sandboxes import Sandboxes
from sandbox_kernel.agents.mcp.slow import NotReady, StillRunning
from sandbox_kernel.agents.mcp.workspaces import Workspaces
from sandbox_kernel.errors import SandboxError, SandboxNotFound, SpecError
from sandbox_kernel.suggestions import check_keys
from sandbox_kernel.untrusted_text import printable

_MOST = 4000
"""Characters of an error."""
_READS = ToolAnnotations(read_only_hint=True)
_ADDS = ToolAnnotations(read_only_hint=False, destructive_hint=False)
_DESTROYS = ToolAnnotations(read_only_hint=False, destructive_hint=True)


class SandboxServer(MCPServer[None]):
    """An MCPServer that refuses arguments that a tool does not have, and says why a call failed."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        super().__init__(
            NAME,
            title="Sandboxes with Jupyter kernels",
            instructions=instructions(sandboxes.policy),
            version=__version__,
            log_level="WARNING",
        )
        cells, files, workspaces = Cells(sandboxes), Files(sandboxes), Workspaces(sandboxes)
        offered: list[tuple[Any, ToolAnnotations]] = [
            (workspaces.open, _ADDS),
            (cells.run, _ADDS),
            (cells.poll, _READS),
            (cells.cancel, _DESTROYS),
            (cells.input, _ADDS),
            (cells.interrupt, _ADDS),
            (cells.restart, _DESTROYS),
            (files.list_files, _READS),
            (files.read_file, _READS),
            (files.write_file, _ADDS),
            (workspaces.notebook, _READS),
            (workspaces.save, _ADDS),
            (workspaces.fork, _ADDS),
            (workspaces.close, _DESTROYS),
        ]
        if sandboxes.policy.limits.install:
            offered.append((cells.install, _ADDS))
        for tool, hints in offered:
            self.add_tool(tool, annotations=hints, structured_output=False)
        add_resources(self, sandboxes)

    async def list_tools(self) -> list[Tool]:
        tools = await super().list_tools()
        for tool in tools:
            tool.input_schema = {**tool.input_schema, "additionalProperties": False}
            tool.description = " ".join((tool.description or "").split())
        return tools

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        tool = self._tool_manager.get_tool(name)
        if tool is None:
            raise ToolError(f"There is no tool {name[:100]!r}.")
        try:
            check_keys(arguments, tool.parameters["properties"], f"The call of {name}")
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError as error:
            if isinstance(error.__cause__, StillRunning):
                return _not_yet(name, arguments, error.__cause__)
            if isinstance(error.__cause__, SandboxError):
                raise ToolError(_for_model(error.__cause__)) from error.__cause__
            raise
        except ToolError as error:
            if isinstance(error.__cause__, ValidationError):
                raise ToolError(_wrong_arguments(name, error.__cause__)) from error.__cause__
            raise
        except SpecError as error:
            raise ToolError(_for_model(error)) from error

    async def read_resource(
        self, uri: Any, context: Context[Any, Any] | None = None
    ) -> Iterable[ReadResourceContents] | InputRequiredResult:
        try:
            found = await super().read_resource(uri, context)
        except UnexpectedResourceError as error:
            if isinstance(error.__cause__, (SandboxNotFound, SpecError)):
                raise ResourceNotFoundError(_for_model(error.__cause__)) from error.__cause__
            if isinstance(error.__cause__, (SandboxError, StillRunning)):
                raise ResourceError(_for_model(error.__cause__)) from error.__cause__
            raise
        if isinstance(found, InputRequiredResult):
            return found
        for one in found:
            if isinstance(one.content, bytes):
                one.mime_type = mime_of(one.content)
        return found


def instructions(policy: Policy) -> str:
    """What a model is told before it sees the tools: how they work together, and its limits."""
    limits = policy.limits
    where = (
        "Name a notebook in open to record the cells on the host."
        if limits.notebooks
        else "Cells are not recorded on the host."
    )
    return (
        "Runs Python as the cells of notebooks in sandboxes. First open a sandbox, then run cells "
        f"in it; variables and files stay. Calls end within {limits.call_seconds:g} s: a cell that "
        "takes longer goes on, and poll gives its output from a cursor on. Pass the sandbox's name "
        f"in every call. {where} Allowed are {limits.max_sandboxes} sandboxes at once "
        f"({', '.join(limits.backends)}), {limits.cell_seconds:g} s for a cell, and "
        f"{limits.output_chars} characters of output in one answer. Close sandboxes after use."
    )


def _not_yet(name: str, arguments: dict[str, Any], why: StillRunning) -> CallToolResult:
    known = {key: arguments[key] for key in ("sandbox", "job") if key in arguments}
    if isinstance(why, NotReady):
        facts = {"status": "starting", "next": f"Nothing was done yet. Call {name} again."}
    else:
        facts = {"status": "not done yet", "next": f"It goes on. Call {name} again to learn more."}
    return CallToolResult(content=[status(**known, **facts)])


def _for_model(error: BaseException) -> str:
    if isinstance(error, StillRunning):
        return "The sandbox is not ready yet. Try again."
    return printable(str(error) or type(error).__name__)[:_MOST]


def _wrong_arguments(name: str, error: ValidationError) -> str:
    """Which arguments are wrong, in one line for each, without their values."""
    lines = [
        f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}"
        for one in error.errors(include_url=False, include_input=False, include_context=False)[:20]
    ]
    return printable(f"The call of {name} has wrong arguments.\n" + "\n".join(lines))[:_MOST]
