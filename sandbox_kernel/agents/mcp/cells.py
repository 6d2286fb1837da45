"""The tools that run code: run, poll, cancel, input, interrupt, restart, install."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

from mcp.server.mcpserver import Context
from pydantic import Field

from sandbox_kernel.agents.install import install_advice, install_cell
from sandbox_kernel.agents.jobs import Job
from sandbox_kernel.agents.mcp.arguments import JobId, SandboxName, Wait
from sandbox_kernel.agents.mcp.content import Content, ended, going_on, status, text_block
from sandbox_kernel.agents.mcp.sandboxes import Sandboxes
from sandbox_kernel.agents.mcp.slow import TELL_EVERY, Tell
from sandbox_kernel.agents.notebook import Notebook
from sandbox_kernel.errors import SandboxTimeout, SpecError, SpecRefused

INSTALLS = "%pip install "
"""How the code of a cell begins that installs packages."""


class Cells:
    """Tools over the sandboxes of one server."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._limits = sandboxes.policy.limits

    async def run(
        self,
        sandbox: SandboxName,
        code: Annotated[str, Field(description="Python source, as in a notebook's cell")],
        ctx: Context,
        wait: Wait = None,
    ) -> Content:
        """Run code as the next cell of the sandbox's notebook. Variables, imports and files stay.

        Answers within seconds: with the result, or, if the cell still runs, with its job and a
        cursor for `poll`. Cells of a sandbox run one after the other.
        """
        if len(code) > self._limits.code_chars:
            raise SpecRefused(
                f"The code has {len(code)} characters, and {self._limits.code_chars} are allowed. "
                f"Write it to a file with write_file, and run that."
            )
        notebook = await self._sandboxes.use(sandbox, tell := told(ctx))
        self._sandboxes.check_queue(notebook)
        job = await notebook.start(code)
        return await self._answer(notebook, job, 0, wait, tell)

    async def poll(
        self,
        sandbox: SandboxName,
        job: JobId,
        ctx: Context,
        after: Annotated[
            int, Field(ge=0, description="cursor of the last answer; 0 is the beginning")
        ] = 0,
        wait: Wait = None,
        offset: Annotated[
            int | None,
            Field(ge=0, description="read all of the text so far, from this character on"),
        ] = None,
    ) -> Content:
        """Get what a job has put out since the cursor, and its result when it has ended.

        Waits for the job as `run` does. With `offset` it does not wait, and leaves nothing out:
        read long output in parts with it.
        """
        notebook = await self._sandboxes.use(sandbox, tell := told(ctx))
        found = known_job(notebook, job)
        if offset is None:
            return await self._answer(notebook, found, after, wait, tell)
        text, most = found.output(0).text, self._limits.output_chars
        part = text[offset : offset + most]
        more = offset + len(part) if offset + len(part) < len(text) else None
        head = status(
            sandbox=sandbox, job=job, status=found.state, characters=len(text), next_offset=more
        )
        return [head, text_block(part)]

    async def cancel(self, sandbox: SandboxName, job: JobId, ctx: Context) -> Content:
        """Cancel a job: a cell that waits is removed, one that runs is interrupted. If it does not
        heed that within seconds, its kernel is restarted, and all variables are lost."""
        notebook = await self._sandboxes.use(sandbox, tell := told(ctx))
        found = known_job(notebook, job)
        if not found.is_over:
            seconds = self._limits.call_seconds
            key = ("cancel", sandbox, job)
            await self._sandboxes.slow.outcome(key, found.cancel, seconds, tell, "cancelling")
        return await self._answer(notebook, found, 0, 0.5, tell)

    async def input(
        self,
        sandbox: SandboxName,
        job: JobId,
        text: Annotated[str, Field(max_length=100_000, description="one line, without its end")],
        ctx: Context,
        wait: Wait = None,
    ) -> Content:
        """Answer a cell that waits for input (status "waiting for input")."""
        notebook = await self._sandboxes.use(sandbox, tell := told(ctx))
        found = known_job(notebook, job)
        cursor = found.output(0).cursor
        await found.input(text)
        return await self._answer(notebook, found, cursor, wait, tell)

    async def interrupt(self, sandbox: SandboxName, ctx: Context) -> Content:
        """Interrupt the cell that runs, as Ctrl-C does. Waiting cells go on."""
        notebook = await self._sandboxes.use(sandbox, told(ctx))
        await notebook.interrupt()
        return [status(sandbox=sandbox, status=notebook.state)]

    async def restart(self, sandbox: SandboxName, ctx: Context) -> Content:
        """Restart the kernel: variables and cells that wait are lost, files stay."""
        notebook = await self._sandboxes.use(sandbox, tell := told(ctx))
        key, seconds = ("restart", sandbox), self._limits.call_seconds
        await self._sandboxes.slow.outcome(key, notebook.restart, seconds, tell, "restarting")
        return [status(sandbox=sandbox, status=notebook.state)]

    async def install(
        self,
        sandbox: SandboxName,
        packages: Annotated[
            list[Annotated[str, Field(min_length=1, max_length=500)]],
            Field(min_length=1, max_length=100, description='as for pip: "pandas>=2"'),
        ],
        ctx: Context,
        wait: Wait = None,
    ) -> Content:
        """Install packages with pip, as a job: `poll` it if it takes longer than this call. The
        operator decides what the sandbox reaches; where it reaches no index, pip says so."""
        code = install_cell(packages)
        notebook = await self._sandboxes.use(sandbox, tell := told(ctx))
        self._sandboxes.check_queue(notebook)
        job = await notebook.start(code)
        return await self._answer(notebook, job, 0, wait, tell)

    async def _answer(
        self, notebook: Notebook, job: Job, after: int, wait: float | None, tell: Tell
    ) -> Content:
        """Wait for a job, at most as long as a call may take, and say what there is."""
        most = self._limits.call_seconds
        await until_it_waits(job, most if wait is None else min(wait, most), tell)
        page = job.output(after)
        if not job.is_over:
            return going_on(notebook.sandbox, job, page, self._limits)
        result = job.result()
        if result.status == "error" and job.code.startswith(INSTALLS):
            result = replace(result, why=install_advice(result.text) or result.why)
        return ended(notebook.sandbox, result, page, self._limits)


async def until_it_waits(job: Job, seconds: float, tell: Tell) -> None:
    """Until a job has ended, waits for input, or the time is over."""
    began = time.monotonic()
    while not job.is_over and job.prompt is None:
        passed = time.monotonic() - began
        if passed >= seconds:
            return
        try:
            await job.until_asked(min(TELL_EVERY, seconds - passed))
        except SandboxTimeout:
            await tell(time.monotonic() - began, job.state)


def known_job(notebook: Notebook, job: str) -> Job:
    """A job of a notebook. SpecError for an unknown one."""
    found = notebook.jobs.get(job)
    if found is None:
        raise SpecError(
            f"Sandbox {notebook.sandbox!r} has no job {job!r}. The tool notebook lists its cells."
        )
    return found


def told(ctx: Context[Any, Any]) -> Tell:
    """Progress for the client of a call, if it has asked for some."""

    async def tell(seconds: float, what: str) -> None:
        await ctx.report_progress(round(seconds, 1), None, f"{what} ({seconds:.0f} s)")

    return tell
