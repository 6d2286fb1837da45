"""An agent that writes cells, and reads what came of them.

A script stands for the model, so no key is needed; put yours in its place. What runs is a real
notebook: open ``agent.ipynb`` in JupyterLab afterwards.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator

from sandbox_kernel import Notebook

TASK = "What are mean and median of the incomes 20, 25, 30 and 200?"


def scripted_model() -> Generator[str, str, None]:
    """Gets what the last cell came to, and answers with the next cell; at last with text."""
    seen = yield "from statistics import mean, median\nincomes = [20, 25, 30, 200]\nmedain(incomes)"
    if "NameError" in seen:  # as a model would, it reads the traceback and mends its slip
        seen = yield "median(incomes), mean(incomes)"
    yield f"# answer\nMedian and mean are {seen.strip()}; one high income moves the mean."


async def main(path: str) -> None:
    model = scripted_model()
    cell = next(model)
    print(f"task: {TASK}")
    async with Notebook.open(path, memory_mib=512) as notebook:
        while not cell.startswith("# answer"):
            print(f"\n--- cell\n{cell}")
            result = await notebook.run(cell, timeout=60)
            print(f"--- {result.status} in {result.duration:.2f} s\n{result.text_for(2000)}")
            cell = model.send(result.text_for(2000))
    print(f"\nanswer: {cell.partition(chr(10))[2]}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "agent.ipynb"))
