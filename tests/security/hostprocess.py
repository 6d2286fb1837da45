"""A process of a host's user that makes sandboxes for the security tests.

Run as a script, so that it can be another user's process. Reads one JSON request a line,
``{"call": name, ...arguments}``, and answers each with ``{"result": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
from typing import Any

from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec


class Calls:
    def __init__(self) -> None:
        self.client = LocalClient()
        self.kernels: dict[str, SandboxedKernel] = {}

    async def create(self, **spec: Any) -> str:
        return (await self.client.create(SandboxSpec.from_mapping(spec))).name

    async def create_with_agent(self, **spec: Any) -> str:
        """A sandbox with an agent that this process is attached to, as a kernel has it."""
        kernel = await SandboxedKernel.create(
            self.client, SandboxSpec.from_mapping(spec), logging.getLogger()
        )
        self.kernels[kernel.handle.name] = kernel
        return kernel.handle.name

    async def token(self, name: str) -> str:
        return str(Records().load("local", name).kernel["token"])

    async def agent_pid(self, name: str) -> int:
        return int((await self.kernels[name].tunnel.control.call("info"))["pid"])

    async def agent_folder(self, name: str) -> str:
        return self.kernels[name].handle.agent_folder

    async def reconnecting(self, name: str) -> bool:
        """Wait until the link to the agent is lost and could not be replaced for a while."""
        tunnel = self.kernels[name].tunnel
        for _ in range(300):
            if not tunnel.connected:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        return not tunnel.connected

    async def death(self, name: str) -> str:
        await asyncio.wait_for(self.kernels[name].wait(), 60)
        return self.kernels[name].death

    async def exec(self, name: str, argv: list[str], timeout: float = 60) -> dict[str, Any]:
        handle = await self.client.get(name)
        return dataclasses.asdict(await handle.exec(argv[0], argv[1:], timeout=timeout))

    async def spawn(self, name: str, argv: list[str]) -> None:
        await (await self.client.get(name)).spawn(argv)

    async def info(self, name: str) -> dict[str, Any]:
        return dataclasses.asdict(await (await self.client.get(name)).info())

    async def logs(self, name: str) -> str:
        return await (await self.client.get(name)).logs()

    async def folder(self, name: str) -> str:
        return str(Records().load("local", name).data["folders"]["base"])

    async def remove(self, name: str) -> None:
        kernel = self.kernels.pop(name, None)
        if kernel is not None:
            await kernel.tunnel.close()
        await self.client.remove(name)

    async def list(self) -> list[str]:
        return await self.client.list()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def pid(self) -> int:
        return os.getpid()


async def main() -> None:
    calls = Calls()
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        try:
            result = await getattr(calls, request.pop("call"))(**request)
            answer = {"result": result}
        except Exception as error:  # noqa: BLE001  (the test wants to see it)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
