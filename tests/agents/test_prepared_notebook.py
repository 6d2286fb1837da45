"""A notebook's file is read with suspicion, and made ready for a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sandbox_kernel.agents.prepared_notebook import prepare
from sandbox_kernel.errors import SpecError

from .notebooks import write_notebook

CELL = {"cell_type": "code", "metadata": {}, "source": "1"}


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def notebook(*cells: Any, **more: Any) -> dict[str, Any]:
    return {"nbformat": 4, "nbformat_minor": 2, "metadata": {}, "cells": list(cells), **more}


def test_outputs_go_and_ids_come(tmp_path: Path) -> None:
    """Notebooks of 4.0 to 4.5 become valid ones of 4.5; ids that are twice there do not."""
    cells = [
        {**CELL, "outputs": [{"output_type": "stream", "text": "old", "name": "stdout"}]},
        {**CELL, "id": "same", "source": ["a\n", "b"], "execution_count": 7},
        {**CELL, "id": "same", "collapsed": True},
        {"cell_type": "markdown", "source": "# title", "metadata": {}},
    ]
    content = prepare(written(tmp_path / "n.ipynb", notebook(*cells)), {}).content
    nbformat.validate(nbformat.from_dict(content))
    assert [cell.get("outputs") for cell in content["cells"]] == [[], [], [], None]
    assert [cell["source"] for cell in content["cells"]] == ["1", "a\nb", "1", "# title"]
    assert len({cell["id"] for cell in content["cells"]}) == 4


def test_which_cells_run(tmp_path: Path) -> None:
    """Code that is not empty, without the tag skip-execution; raises-exception allows an error."""
    tags = [["raises-exception"], ["skip-execution"]]
    path = write_notebook(tmp_path / "n.ipynb", "a", "b", "  \n", "d", tags=tags)
    cells = prepare(path, {}).cells
    assert [(c.number, c.index, c.source, c.may_fail) for c in cells] == [
        (1, 0, "a", True),
        (2, 3, "d", False),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "does not name its format"),
        ({"nbformat": 3, "worksheets": []}, "format 3, .* Convert it"),
        (notebook(metadata=[]), "its metadata is not an object"),
        (notebook(cells={}), "it has no list of cells"),
        (notebook(CELL, {"cell_type": "else"}), "cell 2 has no known type"),
        (notebook({**CELL, "source": 5}), "cell 1 has no text"),
        (notebook("x"), "cell 1 has no known type"),
    ],
)
def test_what_is_no_notebook(tmp_path: Path, content: Any, words: str) -> None:
    path = written(tmp_path / "n.ipynb", content)
    with pytest.raises(SpecError, match=rf"n\.ipynb .*{words}"):
        prepare(path, {})


def test_what_is_no_file(tmp_path: Path) -> None:
    """A folder, a pipe that would block, and nothing at all."""
    os.mkfifo(tmp_path / "pipe.ipynb")
    with pytest.raises(SpecError, match="is not a file"):
        prepare(tmp_path / "pipe.ipynb", {})
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        prepare(tmp_path, {})
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        prepare(tmp_path / "none.ipynb", {})
