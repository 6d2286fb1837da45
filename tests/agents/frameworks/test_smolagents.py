"""A smolagents CodeAgent whose code runs in one kernel in a jail, with a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from smolagents import CodeAgent, Model, tool
from smolagents.models import ChatMessage, MessageRole
from smolagents.utils import AgentExecutionError

from sandbox_kernel.agents.smolagents import SandboxKernelExecutor
from sandbox_kernel.errors import SandboxGone, SpecError

from ..backends import sandboxes


class Scripted(Model):
    """Writes these pieces of code in turn."""

    def __init__(self, *steps: str) -> None:
        super().__init__()
        self._steps = list(steps)

    def generate(self, *_: Any, **__: Any) -> ChatMessage:
        text = f"Thought: next.\n<code>\n{self._steps.pop(0)}\n</code>"
        return ChatMessage(role=MessageRole.ASSISTANT, content=text)


@tool
def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: the number
    """
    return 2 * number


STUBBORN = """
import time
while True:
    try:
        time.sleep(3600)
    except KeyboardInterrupt:
        pass
"""


@pytest.fixture(scope="module")
def shared(local: str) -> Iterator[SandboxKernelExecutor]:
    with SandboxKernelExecutor(backend=local) as made:
        yield made


def run(executor: SandboxKernelExecutor, *steps: str) -> tuple[Any, list[Any]]:
    """The agent's answer, and its steps."""
    agent = CodeAgent([double], Scripted(*steps), executor=executor, max_steps=len(steps))
    return agent.run("go"), agent.memory.steps[1:]


def test_an_agent_works_in_one_kernel(shared: SandboxKernelExecutor) -> None:
    """Variables, tools and files stay from step to step; errors are told; nothing of the host is
    there."""
    answer, steps = run(
        shared,
        "x = double(21); print(x)",
        "1 / 0",
        "open('/root/.ssh/id_rsa')",
        "final_answer({'x': x, 'pair': (1, b'2')})",
    )
    assert answer == {"x": 42, "pair": (1, b"2")}
    assert "42\n" in steps[0].observations
    assert "ZeroDivisionError" in str(steps[1].error)
    assert "\x1b" not in str(steps[1].error)
    assert "FileNotFoundError" in str(steps[2].error)


def test_variables_are_sent(shared: SandboxKernelExecutor) -> None:
    """As JSON, by value."""
    shared.send_variables({"given": {"a": [1, 2.5, None, "ü"]}})
    done = shared("given")
    assert (done.output, done.is_final_answer) == ("{'a': [1, 2.5, None, 'ü']}", False)


def test_no_pickle_of_the_sandbox_is_loaded(shared: SandboxKernelExecutor) -> None:
    """Code can pretend to be the final answer."""
    fake = "class FinalAnswerException(BaseException): pass\n"
    fake += "raise FinalAnswerException('pickle:gASVAA==')"
    with pytest.raises(Exception, match="Pickle data rejected"):
        shared(fake)
    with pytest.raises(AgentExecutionError):
        shared(fake.replace("FinalAnswerException", "Other"))


def test_output_is_bounded(shared: SandboxKernelExecutor) -> None:
    """And the next step works."""
    assert len(shared("print('x' * 5_000_000)").logs) < 51_000
    assert shared("print('y')").logs == "y\n"


def test_a_slow_step_is_interrupted(local: str) -> None:
    """The variables stay. If it cannot be interrupted, a new kernel takes over, with the tools."""
    with SandboxKernelExecutor(backend=local, timeout=1) as executor:
        _, steps = run(executor, "x = 1", "import time; time.sleep(3600)", "final_answer(x)")
        assert "did not end within its time" in str(steps[1].error)
        stubborn = (
            "while True:\n    try:\n        time.sleep(3600)\n    except KeyboardInterrupt: pass"
        )
        with pytest.raises(AgentExecutionError, match="all variables are gone"):
            executor(f"import time\n{stubborn}")
        assert executor("print(double(4))").logs == "8\n"


def test_a_kernel_that_dies_is_replaced(local: str) -> None:
    """The agent is told why, and that its variables are gone; files and tools are there."""
    with SandboxKernelExecutor(backend=local) as executor:
        answer, steps = run(
            executor,
            "open('file', 'w').write('kept'); x = 1",
            "import os; os.kill(os.getpid(), 9)",
            "print(x)",
            "final_answer(open('file').read() + str(double(2)))",
        )
        assert "SIGKILL" in str(steps[1].error)
        assert "all variables are gone" in str(steps[1].error)
        assert "NameError" in str(steps[2].error)
        assert answer == "kept4"


def test_the_steps_are_recorded(local: str, tmp_path: Path) -> None:
    """As a notebook, without what makes the tools."""
    path = tmp_path / "agent.ipynb"
    with SandboxKernelExecutor(backend=local, notebook=path) as executor:
        run(executor, "x = double(21); print(x)", "final_answer(x)")
    cells = json.loads(path.read_text())["cells"]
    assert ["".join(cell["source"]) for cell in cells] == [
        "x = double(21); print(x)",
        "final_answer(x)",
    ]
    assert cells[0]["outputs"][0]["text"] in ("42\n", ["42\n"])


def test_missing_packages_need_a_way_out(local: str) -> None:
    """The message says which setting gives one, and nothing is left."""
    before = sandboxes(local)
    with pytest.raises(AgentExecutionError, match=r'egress=\["@pip"\]'):
        SandboxKernelExecutor(["no_such_package_1"], backend=local)
    with SandboxKernelExecutor(["json", "ipykernel>=6"], backend=local) as executor:
        assert executor("json = 1").output is None
    assert sandboxes(local) == before


def test_it_is_removed_with_its_agent(local: str) -> None:
    """CodeAgent.cleanup; afterwards it says so. A wrong setting makes nothing."""
    before = sandboxes(local)
    executor = SandboxKernelExecutor(backend=local)
    assert len(sandboxes(local)) == len(before) + 1
    CodeAgent([], Scripted(), executor=executor).cleanup()
    executor.cleanup()
    with pytest.raises(SandboxGone, match="was closed"):
        executor("1")
    with pytest.raises(SpecError, match="memory_mb"):
        SandboxKernelExecutor(backend=local, memory_mb=1)
    assert sandboxes(local) == before
