"""The examples of docs/agents.md run as they are written."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_an_example_runs(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And prints what its comments say."""
    monkeypatch.chdir(folder)
    code = EXAMPLES[number]
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    outcome = eval(compile(code, f"{PAGE}, example {number}", "exec", flags=flags), {})
    if inspect.isawaitable(outcome):
        await outcome
    printed = capsys.readouterr().out
    for comment in re.findall(r"^ *print\(.*#(.*)$", code, re.MULTILINE):
        assert comment.strip() in printed
    assert printed
