"""The examples of docs/frameworks.md, each with a model that follows a script."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..backends import sandboxes

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def deepagents() -> Any:
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage

    class Scripted(GenericFakeChatModel):
        def bind_tools(self, tools: Any, **_: Any) -> Any:
            return self

    call = {"name": "execute", "args": {"command": "echo $((6 * 7))"}, "id": "1"}
    return Scripted(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("done")]))


def pydantic_ai() -> Any:
    from pydantic_ai.models.test import TestModel

    return TestModel()


def inspect_ai() -> Any:
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    outputs = [
        ModelOutput.for_tool_call("mockllm/model", "python", {"code": "print(6 * 7)"}),
        ModelOutput.from_content("mockllm/model", "done"),
    ]
    for output in outputs:
        output.usage = ModelUsage()
    return get_model("mockllm/model", custom_outputs=outputs)


def smolagents() -> Any:
    from smolagents import Model
    from smolagents.models import ChatMessage, MessageRole

    class Scripted(Model):
        def generate(self, *_: Any, **__: Any) -> ChatMessage:
            text = "Thought: easy.\n<code>\nfinal_answer(6 * 7)\n</code>"
            return ChatMessage(role=MessageRole.ASSISTANT, content=text)

    return Scripted()


def ag2() -> Any:
    from ag2.events import ToolCallEvent
    from ag2.testing import TestConfig

    arguments = json.dumps({"code": "print(6 * 7)", "language": "python"})
    return TestConfig(ToolCallEvent(name="run_code", arguments=arguments), "done")


EXAMPLES: dict[str, tuple[Callable[[], Any], Callable[[dict[str, Any]], bool]]] = {
    "LangChain and deepagents": (
        deepagents,
        lambda v: v["result"]["messages"][-2].content[:2] == "42",
    ),
    "Pydantic AI": (pydantic_ai, lambda v: bool(v["result"].output)),
    "Inspect": (inspect_ai, lambda v: "42" in str(v["logs"][0].samples[0].messages)),
    "smolagents": (smolagents, lambda v: v["answer"] == 42),
    "AG2": (ag2, lambda v: v["reply"].body == "done"),
}


def code_of(heading: str) -> str:
    sections = dict(SECTION.findall(PAGE.read_text()))
    [code] = FENCE.findall(sections[heading])
    assert isinstance(code, str)
    return code


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_example_runs(
    local: str, heading: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As it stands on the page; it leaves no sandbox behind."""
    monkeypatch.chdir(tmp_path)
    Path("sandbox.json").write_text('{"backend": "local", "memory_mib": 1024}')
    model, check = EXAMPLES[heading]
    variables: dict[str, Any] = {"model": model()}
    code = compile(code_of(heading), heading, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    made = eval(code, variables)
    if inspect.iscoroutine(made):
        asyncio.run(made)
    assert check(variables)
    assert sandboxes(local) == []
