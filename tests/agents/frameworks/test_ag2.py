"""An AG2 agent runs code in a jail, with its own scripted model."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import pytest
from ag2 import Agent
from ag2.events import ToolCallEvent
from ag2.testing import TestConfig
from ag2.tools import SandboxCodeTool, SandboxShellTool
from ag2.tools.sandbox import CodeAdapter

from sandbox_kernel.agents.ag2 import SandboxKernelSandbox

from ..backends import sandboxes


async def test_an_agent_works_in_a_jail(local: str) -> None:
    """Code and shell share one sandbox."""
    async with SandboxKernelSandbox(local, memory_mib=512) as sandbox:
        code = "open('f', 'w').write('kept'); print(6 * 7)"
        script = (
            call("run_code", code=code, language="python"),
            call("run_shell_command", command="cat f; cat /root/.ssh/id_rsa"),
            "done",
        )
        tools = [SandboxCodeTool(sandbox), SandboxShellTool(sandbox)]
        agent = Agent("coder", config=TestConfig(*script), tools=tools)
        reply = await agent.ask("go")
        said = str(list(await reply.context.stream.history.get_events()))
        assert "42" in said
        assert "kept" in said
        assert "No such file" in said
        assert len(sandboxes(local)) == 1
    assert sandboxes(local) == []


def call(name: str, **arguments: Any) -> ToolCallEvent:
    return ToolCallEvent(name=name, arguments=json.dumps(arguments))


async def test_commands_end_as_ag2_expects(local: str) -> None:
    """124 for a time limit, 127 for a missing program, and bounded output."""
    async with SandboxKernelSandbox(local, max_output=10) as sandbox:
        late = await sandbox.exec(["sh", "-c", "echo part; sleep 3600"], timeout=1)
        assert (late.exit_code, late.output[:5]) == (124, "part\n")
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        long = await sandbox.exec(["head", "-c", "500", "/proc/self/status"])
        assert "[truncated: showing the first 10 characters]" in long.output
        run = await CodeAdapter(sandbox, languages=("bash",)).run("echo $0", "bash")
        assert (run.output, run.exit_code) == ("bash", 0)


async def test_files_stay_in_the_working_folder(local: str) -> None:
    """Neither names nor links lead out of it."""
    async with SandboxKernelSandbox(local) as sandbox:
        await sandbox.put_file(PurePosixPath("a/b.txt"), b"text")
        assert (await sandbox.exec(["cat", "a/b.txt"])).output == "text"
        await sandbox.exec(["ln", "-s", "/tmp", "link"])
        for path in ("/tmp/x", "../x", "a/../../x", "link/x", "..", "."):
            with pytest.raises(ValueError, match="working folder"):
                await sandbox.put_file(PurePosixPath(path), b"")
        await sandbox.remove_file(PurePosixPath("a/b.txt"))
        await sandbox.remove_file(PurePosixPath("a/b.txt"))
        assert (await sandbox.exec(["ls", "a"])).output == ""
        assert sandbox.host_workdir is None
