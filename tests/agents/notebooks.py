"""Notebooks for tests, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat


def write_notebook(
    path: Path, *sources: str, tags: Sequence[Sequence[str]] = (), language: str = "python"
) -> Path:
    """A notebook of code cells with these sources and, from the first on, these tags."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    for cell, named in zip(cells, tags, strict=False):
        cell.metadata["tags"] = list(named)
    notebook = nbformat.v4.new_notebook(cells=cells)
    name = "python3" if language == "python" else language
    notebook.metadata["kernelspec"] = {"name": name, "display_name": "", "language": language}
    nbformat.write(notebook, path)
    return path


def valid_notebook(path: Path) -> Any:
    """A notebook that a run has written; it must be valid in the current format."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    return notebook


def printed(cell: Any) -> str:
    """What a cell has printed on stdout."""
    streams = [one for one in cell.outputs if one.output_type == "stream" and one.name == "stdout"]
    return "".join(one.text for one in streams)
