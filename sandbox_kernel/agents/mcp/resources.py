"""Resources: what is too large for a tool's answer. Their addresses name a sandbox, as tools do."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError

from sandbox_kernel.agents.images import decoded, picture_of
from sandbox_kernel.agents.mcp.cells import known_job
from sandbox_kernel.agents.mcp.content import picture_name
from sandbox_kernel.agents.mcp.sandboxes import Sandboxes


def add_resources(server: MCPServer[None], sandboxes: Sandboxes) -> None:
    """Register all templates."""

    @server.resource("sandbox://{sandbox}/jobs/{job}/text")
    async def text(sandbox: str, job: str) -> str:
        """All of the text that a job has put out."""
        return known_job(await sandboxes.use(sandbox), job).output(0).text

    @server.resource("sandbox://{sandbox}/jobs/{job}/pictures/{picture}")
    async def picture(sandbox: str, job: str, picture: str) -> bytes:
        """A picture that a job has displayed."""
        for item in known_job(await sandboxes.use(sandbox), job).output(0).items:
            data = decoded(*picture_of(item.get("data")))
            if data and picture_name(data) == picture:
                return data
        raise ResourceNotFoundError(f"The job {job!r} has no picture {picture!r}.")

    @server.resource("sandbox://{sandbox}/files/{+path}")
    async def file(sandbox: str, path: str) -> bytes:
        """A file of the workspace."""
        notebook = await sandboxes.use(sandbox)
        return await notebook.read(path, max_bytes=sandboxes.policy.limits.file_bytes)
