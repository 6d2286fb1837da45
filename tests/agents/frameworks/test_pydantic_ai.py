"""Pydantic AI's own suite for workspaces, whole, and an agent that works in a jail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.workspaces import (
    Workspace,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from sandbox_kernel.agents.pydantic_ai import SandboxKernelWorkspace
from sandbox_kernel.agents.sandbox_bridge import blocking
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.tunnel import background

from ..backends import sandboxes

Made = list[SandboxKernelWorkspace]


@pytest.fixture
def made() -> Iterator[Made]:
    """Those that a test makes; in the end they are closed."""
    found: Made = []
    yield found
    for one in found:
        blocking(one.close())


@pytest.fixture
def workspace(local: str, made: Made) -> SandboxKernelWorkspace:
    made.append(SandboxKernelWorkspace(local))
    return made[-1]


class TestSuite(WorkspaceBackendSuite):
    """Every rule applies: commands, files, links, first use, reattaching, destruction."""

    @pytest.fixture
    def backend(self, workspace: SandboxKernelWorkspace) -> SandboxKernelWorkspace:
        return workspace

    @pytest.fixture
    def fresh_backend(self, local: str, made: Made) -> Callable[[], SandboxKernelWorkspace]:
        def make() -> SandboxKernelWorkspace:
            made.append(SandboxKernelWorkspace(local))
            return made[-1]

        return make

    @pytest.fixture
    def attach_backend(self, made: Made) -> Callable[[WorkspaceRef], SandboxKernelWorkspace]:
        def make(ref: WorkspaceRef) -> SandboxKernelWorkspace:
            made.append(SandboxKernelWorkspace(ref=ref))
            return made[-1]

        return make

    @pytest.fixture
    def destroy_environment(self) -> Callable[[SandboxKernelWorkspace], Awaitable[None]]:
        async def destroy(backend: SandboxKernelWorkspace) -> None:
            client = load_backend("local")
            assert backend.ref
            await background.run(client.remove(backend.ref.id))

        return destroy


def scripted(*calls: tuple[str, dict[str, Any]]) -> FunctionModel:
    """A model that calls these tools in turn."""
    left = list(calls)

    def answer(*_: Any) -> ModelResponse:
        if left:
            return ModelResponse(parts=[ToolCallPart(*left.pop(0))])
        return ModelResponse(parts=[TextPart("done")])

    return FunctionModel(answer)


def coder(model: Any) -> Any:
    """An agent with two tools that use its workspace, as harnesses have them."""
    agent = Agent(model)

    @agent.tool
    async def write(ctx: RunContext[None], path: str, text: str) -> str:
        await ctx.workspace.write_text(path, text)
        return "written"

    @agent.tool
    async def run(ctx: RunContext[None], command: str, timeout: float = 60.0) -> str:
        try:
            done = await ctx.workspace.run(command, shell=True, timeout=timeout)
        except WorkspaceTimeoutError as error:
            return f"{error} Until then: {error.stdout}"
        return f"{done.exit_code} {done.stdout}{done.stderr}"

    return agent


def returns(result: Any) -> list[str]:
    parts = (part for message in result.all_messages() for part in message.parts)
    return [str(part.content) for part in parts if part.part_kind == "tool-return"]


async def test_an_agent_works_in_a_jail(workspace: SandboxKernelWorkspace) -> None:
    """It writes and runs a program, sees nothing of the host, and is told of its errors."""
    model = scripted(
        ("write", {"path": "job.py", "text": "print(6 * 7)"}),
        ("run", {"command": "python3 job.py; cat /root/.ssh/id_rsa"}),
        ("run", {"command": "echo part; sleep 3600", "timeout": 1}),
    )
    result = await coder(model).run("go", workspace=workspace)
    said = returns(result)
    assert said[1].startswith("1 42\n")
    assert "No such file" in said[1]
    assert "was killed" in said[2]
    assert said[2].endswith("Until then: part\n")
    assert result.output == "done"


async def test_the_sandbox_outlives_the_run(local: str, made: Made) -> None:
    """Another run goes on in it by the ref that the first one's messages have."""
    made.append(SandboxKernelWorkspace(local))
    model = TestModel(call_tools=["write"], custom_output_text="done")
    result = await coder(model).run("go", workspace=made[0])
    ref = result.all_messages()[-1].workspace_ref
    assert ref == made[0].ref
    assert ref is not None
    assert sandboxes(local) == [ref.id]
    made.append(SandboxKernelWorkspace(ref=ref))
    again = await coder(scripted(("run", {"command": "cat a"}))).run("go", workspace=made[1])
    assert returns(again) == ["0 a"]


async def test_too_much_output_is_an_error(workspace: SandboxKernelWorkspace) -> None:
    """With its beginning."""
    with pytest.raises(WorkspaceOutputLimitError, match="more than") as caught:
        await workspace.run(["head", "-c", "11000000", "/dev/zero"])
    assert len(caught.value.stdout) == caught.value.limit


async def test_paths_that_are_not_absolute_are_refused(workspace: SandboxKernelWorkspace) -> None:
    """Workspace makes them absolute; the backend does not guess."""
    for call in (workspace.read_bytes, workspace.stat, workspace.list_dir, workspace.remove):
        with pytest.raises(ValueError, match="absolute"):
            await call("../etc/passwd")
    with pytest.raises(FileNotFoundError):
        await Workspace(workspace).read_text("missing")


async def test_a_ref_of_another_provider_is_refused(local: str) -> None:
    """And a sandbox that does not exist is not made."""
    with pytest.raises(ValueError, match="not one of sandbox-kernel"):
        SandboxKernelWorkspace(ref=WorkspaceRef(provider="e2b", id="x"))
    lost = SandboxKernelWorkspace(ref=WorkspaceRef(provider=f"sandbox-kernel/{local}", id="none"))
    with pytest.raises(WorkspaceUnavailableError, match="none"):
        await lost.run(["true"])
