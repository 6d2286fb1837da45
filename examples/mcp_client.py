"""An MCP client without a model: what an agent's calls look like, and what they answer.

pip install 'sandbox-kernel[mcp]'
python examples/mcp_client.py
"""

from __future__ import annotations

import asyncio
import json
import sys

from mcp import Client, StdioServerParameters
from mcp_types import TextContent

SERVER = StdioServerParameters(
    command=sys.executable,
    args=["-P", "-m", "sandbox_kernel", "mcp", "--call-seconds", "2", "--on-disconnect", "close"],
)
SLOW = "import time\nfor n in range(5):\n    print('step', n)\n    time.sleep(1)"


async def main() -> None:
    async with Client(SERVER) as client:
        print("tools:", ", ".join(tool.name for tool in (await client.list_tools()).tools))

        async def call(tool: str, **arguments: object) -> tuple[dict[str, object], str]:
            result = await client.call_tool(tool, arguments)
            texts = [block.text for block in result.content if isinstance(block, TextContent)]
            if result.is_error:
                raise SystemExit(texts[0])
            return json.loads(texts[0]), "\n".join(texts[1:])

        facts, _ = await call("open")
        sandbox = facts["sandbox"]
        _, text = await call("run", sandbox=sandbox, code="x = 6 * 7\nx")
        print("x is", text)

        # A cell that takes longer than a call: its job goes on, and is polled with a cursor.
        facts, text = await call("run", sandbox=sandbox, code=SLOW)
        print(text)
        while facts["status"] in ("queued", "running"):
            facts, text = await call(
                "poll", sandbox=sandbox, job=facts["job"], after=facts["cursor"]
            )
            print(text)
        print("the slow cell is", facts["status"])
        await call("close", sandbox=sandbox)


if __name__ == "__main__":
    asyncio.run(main())
