"""The example of an MCP client runs as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.own_folders import own_folders

EXAMPLE = Path(__file__).parents[2] / "examples" / "mcp_client.py"


def test_the_example_runs() -> None:
    """Without a key, and from another folder."""
    with own_folders() as folder:
        ran = subprocess.run(
            [sys.executable, EXAMPLE], cwd=folder, capture_output=True, text=True, check=False
        )
    assert ran.returncode == 0, ran.stderr
    assert "x is 42" in ran.stdout
    assert [f"step {n}" for n in range(5)] == [
        line for line in ran.stdout.splitlines() if line.startswith("step")
    ]
    assert "the slow cell is ok" in ran.stdout
