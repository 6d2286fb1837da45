"""The tools for a sandbox as a whole: open, notebook, save, fork, close."""

from __future__ import annotations

from typing import Annotated, Any

from mcp.server.mcpserver import Context
from pydantic import Field

from sandbox_kernel.agents.mcp.arguments import SandboxName
from sandbox_kernel.agents.mcp.cells import told
from sandbox_kernel.agents.mcp.content import Content, status, text_block
from sandbox_kernel.agents.mcp.sandboxes import Sandboxes
from sandbox_kernel.agents.mcp.slow import StillRunning
from sandbox_kernel.agents.notebook import Notebook

_MOST_CELLS, _FIRST_CHARS = 200, 160


class Workspaces:
    """Tools over the sandboxes of one server."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._limits = sandboxes.policy.limits

    async def open(
        self,
        ctx: Context,
        notebook: Annotated[
            str | None,
            Field(max_length=1000, description="record the cells in this .ipynb, such as a.ipynb"),
        ] = None,
        backend: Annotated[
            str | None, Field(max_length=100, description="kind of sandbox (default: the first)")
        ] = None,
    ) -> Content:
        """Make a sandbox with a Python kernel of its own. Its name is the argument of all other
        tools; it stays when the connection or the server ends, and ends when nobody uses it."""
        kind = self._sandboxes.policy.choose(backend)
        path = str(self._sandboxes.policy.notebook_path(notebook)) if notebook else None
        name = await self._sandboxes.reserve(kind)
        try:
            made = await self._sandboxes.open(
                name, kind, path, self._limits.call_seconds, told(ctx)
            )
        except StillRunning:
            return [status(sandbox=name, backend=kind, status="starting", next="run")]
        return self._opened(made)

    async def notebook(
        self,
        sandbox: SandboxName,
        ctx: Context,
        first: Annotated[int, Field(ge=0, description="number of the first cell to list")] = 0,
    ) -> Content:
        """List the cells that were run, with their jobs and states, and say where the notebook is.
        A person of this machine can open it in JupyterLab while it runs."""
        held = await self._sandboxes.use(sandbox, told(ctx))
        jobs = list(held.jobs.values())
        rows = [
            f"{number}. job {job.id}: {job.state}: {_first_line(job.code)}"
            for number, job in enumerate(jobs)
            if number >= first
        ][:_MOST_CELLS]
        left = len(jobs) - first - len(rows)
        head = status(
            sandbox=sandbox,
            status=held.state,
            notebook=str(held.path) if held.path else None,
            cells=len(jobs),
            next_first=first + len(rows) if left > 0 else None,
            why=held.death,
        )
        return [head, text_block("\n".join(rows))] if rows else [head]

    async def save(self, sandbox: SandboxName, ctx: Context) -> Content:
        """Save the files of the sandbox on the host, so that they outlive it: with its notebook, or
        as a workspace of the sandbox's name, which the operator can export."""
        held, key = await self._sandboxes.use(sandbox, tell := told(ctx)), ("save", sandbox)
        workspace = None if held.path else sandbox
        work, seconds = lambda: held.persist(workspace), self._limits.call_seconds
        saved = await self._sandboxes.slow.outcome(key, work, seconds, tell, "saving")
        return [status(sandbox=sandbox, status="saved", save=saved, workspace=workspace)]

    async def fork(self, sandbox: SandboxName, ctx: Context) -> Content:
        """Make a second sandbox in the same state, variables included. Some backends can."""
        held, key = await self._sandboxes.use(sandbox, tell := told(ctx)), ("fork", sandbox)
        work, seconds = lambda: self._sandboxes.fork(held), self._limits.call_seconds
        return self._opened(await self._sandboxes.slow.outcome(key, work, seconds, tell, "forking"))

    async def close(
        self,
        sandbox: SandboxName,
        ctx: Context,
        save: Annotated[bool, Field(description="save its files on the host first")] = True,
    ) -> Content:
        """End a sandbox. Its notebook stays; its variables are lost."""
        await self._sandboxes.use(sandbox, tell := told(ctx))
        work = lambda: self._sandboxes.close(sandbox, save=save)  # noqa: E731
        key, seconds = ("close", sandbox), self._limits.call_seconds
        await self._sandboxes.slow.outcome(key, work, seconds, tell, "closing")
        return [status(sandbox=sandbox, status="closed")]

    def _opened(self, made: Notebook) -> Content:
        facts: dict[str, Any] = {"sandbox": made.sandbox, "backend": made.backend}
        where = str(made.path) if made.path else None
        return [status(**facts, status="ready", kernel=made.kernel_name, notebook=where)]


def _first_line(code: str) -> str:
    line = next((line for line in code.splitlines() if line.strip()), "")
    return line if len(line) <= _FIRST_CHARS else f"{line[:_FIRST_CHARS]}..."
