"""Inspect's own checks for sandboxes, whole, and an evaluation whose model works in a jail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval  # noqa: A004  (Inspect's name)
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash, python
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
)
from inspect_ai.util._sandbox.limits import override_max_exec_output_size
from inspect_ai.util._sandbox.self_check import *  # noqa: F403  (the checks, as it says)

from sandbox_kernel.agents.inspect_ai import TYPE, SandboxKernelConfig, SandboxKernelEnvironment
from sandbox_kernel.agents.sandbox_bridge import blocking
from sandbox_kernel.errors import SpecError

from ..backends import sandboxes

NOT_HERE = {"test_exec_as_user": "a sandbox of ours has one user"}


@pytest.fixture(scope="module")
def environment(local: str) -> Iterator[Any]:
    made = blocking(SandboxKernelEnvironment.sample_init("checks", None, {}))
    yield made["default"]
    blocking(SandboxKernelEnvironment.sample_cleanup("checks", None, made, False))


@pytest.fixture
def sandbox_env(environment: Any, request: pytest.FixtureRequest) -> Any:
    """For Inspect's checks."""
    if reason := NOT_HERE.get(request.node.originalname):
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    return environment


async def test_too_much_output_is_an_error(environment: Any) -> None:
    """With its beginning; the limit is Inspect's."""
    with override_max_exec_output_size(1000), pytest.raises(OutputLimitExceededError) as caught:
        await environment.exec(["head", "-c", "2000", "/dev/zero"])
    assert len(caught.value.truncated_output or "") == 1000


async def test_how_to_connect_is_told(environment: Any) -> None:
    """With the command of ours that does it."""
    connection = await environment.connection()
    assert connection.command == f"sandbox-kernel shell {environment.bridge.name}"


async def test_a_sandbox_that_is_gone_is_unavailable(local: str) -> None:
    """Inspect tells the model so, and the sample goes on."""
    made = await SandboxKernelEnvironment.sample_init("t", None, {})
    await SandboxKernelEnvironment.sample_cleanup("t", None, made, True)
    with pytest.raises(SandboxUnavailableError, match="was closed"):
        await made["default"].exec(["true"])


def evaluate(calls: list[tuple[str, dict[str, Any]]], sandbox: Any, tmp_path: Path) -> Any:
    """Have a scripted model call tools in turn and then say done; the log of its one sample."""
    outputs = [ModelOutput.for_tool_call("mockllm/model", *call) for call in calls]
    outputs.append(ModelOutput.from_content("mockllm/model", "done"))
    for output in outputs:
        output.usage = ModelUsage()  # else its tokens are counted, with a file from the network
    task = Task(
        dataset=[Sample(input="go", target="done")],
        solver=[use_tools(bash(timeout=1), python(timeout=60)), generate()],
        scorer=includes(),
        sandbox=sandbox,
    )
    model = get_model("mockllm/model", custom_outputs=outputs)
    [log] = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert log.samples
    return log.samples[0]


def test_a_model_works_in_a_jail(local: str, environment: Any, tmp_path: Path) -> None:
    """Found by its entry point; the sandbox is removed with the sample."""
    config = tmp_path / "sandbox.json"
    config.write_text(json.dumps({"backend": local, "memory_mib": 512}))
    calls = [
        ("python", {"code": "open('f', 'w').write('kept'); print(6 * 7)"}),
        ("bash", {"command": "cat f; cat /root/.ssh/id_rsa"}),
        ("bash", {"command": "sleep 3600"}),
    ]
    sample = evaluate(calls, (TYPE, str(config)), tmp_path)
    tools = [message for message in sample.messages if message.role == "tool"]
    assert "42" in tools[0].text
    assert "kept" in tools[1].text
    assert "No such file" in tools[1].text
    assert tools[2].error
    assert tools[2].error.type == "timeout"
    assert sample.scores["includes"].value == "C"
    assert sandboxes(local) == [environment.bridge.name]


def test_the_settings_are_in_the_configuration(local: str, tmp_path: Path) -> None:
    """As an object, too, which the log keeps."""
    config = SandboxKernelConfig(backend=local, settings={"env": {"A": "from the spec"}})
    spec = SandboxEnvironmentSpec(TYPE, config)
    sample = evaluate([("bash", {"command": "echo $A"})], spec, tmp_path)
    assert "from the spec" in next(m.text for m in sample.messages if m.role == "tool")
    assert SandboxKernelEnvironment.config_deserialize(config.model_dump()) == config


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    """With the file's name."""
    path = tmp_path / "sandbox.json"
    path.write_text(content)
    with pytest.raises(SpecError, match=r"sandbox\.json"):
        SandboxKernelConfig.of(str(path))
