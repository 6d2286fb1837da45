"""A deep agent works in a jail, with a model that follows a script."""

from __future__ import annotations

from typing import Any

import pytest
from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage

from sandbox_kernel.agents.deepagents import SandboxKernelBackend
from sandbox_kernel.errors import SandboxGone

from ..backends import sandboxes


class Scripted(GenericFakeChatModel):
    """Says what it was given, whatever its tools are."""

    def bind_tools(self, tools: Any, **_: Any) -> Scripted:
        return self


def scripted(*calls: tuple[str, dict[str, Any]], end: str = "done") -> Scripted:
    messages = [
        AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": str(number)}])
        for number, (name, arguments) in enumerate(calls)
    ]
    return Scripted(messages=iter([*messages, AIMessage(end)]))


def answers(messages: list[Any]) -> list[str]:
    return [str(message.content) for message in messages if isinstance(message, ToolMessage)]


SCRIPT = (
    ("write_file", {"file_path": "/workspace/job.py", "content": "print(6 * 7)\n"}),
    ("execute", {"command": "python3 job.py; id -u; cat /root/.ssh/id_rsa"}),
    ("edit_file", {"file_path": "/workspace/job.py", "old_string": "7", "new_string": "8"}),
    ("execute", {"command": "python3 job.py"}),
    ("read_file", {"file_path": "/workspace/missing.py"}),
    ("execute", {"command": "sleep 3600", "timeout": 1}),
)


def check(said: list[str]) -> None:
    assert "42\n1000\n" in said[1]
    assert "No such file" in said[1]
    assert "48" in said[3]
    assert "file_not_found" in said[4]
    assert "was killed" in said[5]


def test_an_agent_works_in_a_jail(local: str) -> None:
    """It writes, edits and runs a program, sees nothing of the host, and is told of its errors."""
    with SandboxKernelBackend(local, memory_mib=512) as backend:
        agent = create_deep_agent(model=scripted(*SCRIPT), backend=backend)
        result = agent.invoke({"messages": [("user", "go")]})
        check(answers(result["messages"]))
        assert result["messages"][-1].content == "done"
        assert sandboxes(local) == [backend.id]
    assert sandboxes(local) == []


async def test_an_agent_works_in_a_jail_with_asyncio(local: str) -> None:
    """The same, on a loop of the caller's."""
    async with SandboxKernelBackend(local) as backend:
        agent = create_deep_agent(model=scripted(*SCRIPT), backend=backend)
        result = await agent.ainvoke({"messages": [("user", "go")]})
        check(answers(result["messages"]))


def test_another_one_goes_on_with_the_sandbox(local: str) -> None:
    """By its id, after it was left; once closed, it says what to do."""
    first = SandboxKernelBackend(local)
    first.execute("echo kept > file")
    first.detach()
    with SandboxKernelBackend(local, attach=first.id) as second:
        assert second.execute("cat file").output == "kept\n"
    with pytest.raises(SandboxGone, match="Make a new one"):
        second.execute("true")


def test_the_default_time_limit_is_the_callers(local: str) -> None:
    """A limit of the command's own goes before it."""
    with SandboxKernelBackend(local, timeout=1) as backend:
        late = backend.execute("echo part; sleep 3600")
        assert (late.exit_code, late.truncated) == (124, False)
        assert late.output.startswith("part\nError: '/bin/sh' in sandbox")
        assert backend.execute("echo quick", timeout=60).output == "quick\n"
