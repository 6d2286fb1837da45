"""An agent of the OpenAI Agents SDK that works in a sandbox of this project.

A script stands for the model, so no key is needed; put yours in its place. The sandbox is a local
jail; ``backend="boxlite"`` or another one changes nothing else.

    pip install 'sandbox-kernel[openai]'
"""

from __future__ import annotations

import asyncio

from agents import RunConfig, Runner, set_tracing_disabled
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from agents.testing import ScriptedModel, assistant_message, function_call

from sandbox_kernel.agents.openai_agents import SandboxKernelClient, SandboxKernelClientOptions

DATA = b"city,people\nBern,137000\nThun,44000\nBiel,56000\n"
COUNT = """python3 -c "
import csv
print(sum(int(row['people']) for row in csv.DictReader(open('cities.csv'))))
" """


def scripted_model() -> ScriptedModel:
    return ScriptedModel(
        [
            [function_call("exec_command", {"cmd": COUNT, "login": False}, call_id="count")],
            [function_call("exec_command", {"cmd": "ls /home /root"}, call_id="look")],
            [assistant_message("237000 people live in the three cities.")],
        ]
    )


async def main() -> None:
    set_tracing_disabled(True)  # it would send what the agent does to OpenAI
    agent = SandboxAgent(
        name="analyst",
        instructions="Answer from the files in the workspace.",
        model=scripted_model(),
        default_manifest=Manifest(entries={"cities.csv": File(content=DATA)}),
    )
    options = SandboxKernelClientOptions(backend="local", memory_mib=512, processes=64)
    config = RunConfig(sandbox=SandboxRunConfig(client=SandboxKernelClient(), options=options))
    result = await Runner.run(agent, "How many people are that?", run_config=config)
    for item in result.new_items:
        if item.type == "tool_call_output_item":
            print(f"--- the sandbox says\n{item.output}")
    print(f"--- the agent says\n{result.final_output}")


if __name__ == "__main__":
    asyncio.run(main())
