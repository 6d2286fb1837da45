"""A notebook's file, read and made ready for a run from its first cell to its last.

Nothing of the notebook is believed: it may come from anywhere. No package is needed for notebooks
of format 4, which Jupyter has written since 2015.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_kernel.agents.parameters import (
    has_defaults,
    inject,
    parameters_cell,
    tags_of,
)
from sandbox_kernel.errors import SpecError

MOST_BYTES = 512 * 1024 * 1024
SKIPPED, MAY_FAIL = "skip-execution", "raises-exception"
"""Tags of cells, as nbclient knows them."""
_FORMAT = 4
_CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FIELDS = {
    "code": ("cell_type", "id", "metadata", "source", "outputs", "execution_count"),
    "markdown": ("cell_type", "id", "metadata", "source", "attachments"),
    "raw": ("cell_type", "id", "metadata", "source", "attachments"),
}


@dataclass(frozen=True)
class PlannedCell:
    """A cell that will run."""

    number: int
    """Of the cells that run, from 1."""
    index: int
    """In the notebook, from 0."""
    id: str
    source: str
    may_fail: bool = False
    """An error in it is wanted."""


@dataclass(frozen=True)
class PreparedNotebook:
    """What a run begins with."""

    path: Path
    content: dict[str, Any]
    """Format 4.5, without outputs, with the parameters' cell."""
    cells: tuple[PlannedCell, ...]
    language: str
    kernel_name: str
    """The kernel that its metadata names; empty if none."""
    notices: tuple[str, ...] = ()
    """What the user should know."""


def prepare(path: Path, parameters: Mapping[str, Any], *, language: str = "") -> PreparedNotebook:
    """Read a notebook and make it ready. ``language``: of the kernel it will run with, if that is
    known. Blocks. SpecError says what is wrong with the file or the parameters."""
    content = read_notebook(path)
    kernelspec = _mapping(content["metadata"].get("kernelspec"))
    language_info = _mapping(content["metadata"].get("language_info"))
    own = kernelspec.get("language") or language_info.get("name") or ""
    language = language or (own if isinstance(own, str) else "") or "python"
    kernel_name = kernelspec.get("name")
    kernel_name = kernel_name if isinstance(kernel_name, str) else ""
    notices = []
    if parameters:
        if not has_defaults(content):
            notices.append(
                f"{path.name} has no cell with the tag 'parameters', so the parameters are set "
                f"in a new cell at the top."
            )
        source = parameters_cell(parameters, language, kernel_name)
        inject(content, parameters, source, _new_id({cell["id"] for cell in content["cells"]}))
    cells: list[PlannedCell] = []
    for index, cell in enumerate(content["cells"]):
        if cell["cell_type"] != "code" or not cell["source"].strip():
            continue
        if SKIPPED not in (tags := tags_of(cell)):
            number = len(cells) + 1
            one = PlannedCell(number, index, cell["id"], cell["source"], MAY_FAIL in tags)
            cells.append(one)
    return PreparedNotebook(path, content, tuple(cells), language, kernel_name, tuple(notices))


def read_notebook(path: Path) -> dict[str, Any]:
    """A notebook in format 4.5, its outputs left out. SpecError."""
    data = _bytes_of(path)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise SpecError(f"{path} is no notebook: it is not JSON.") from None
    if not isinstance(content, dict) or not isinstance(content.get("nbformat"), int):
        raise SpecError(f"{path} is no notebook: it does not name its format ('nbformat').")
    if content["nbformat"] != _FORMAT:
        raise SpecError(
            f"{path} is in notebook format {content['nbformat']}, and only format {_FORMAT} can "
            f"be run. Convert it: jupyter nbconvert --to notebook --nbformat {_FORMAT} {path}"
        )
    try:
        return _current(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{path} is a damaged notebook: {error}.") from None


def _bytes_of(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SpecError(f"{path} is no notebook: it is not a file.")
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SpecError(f"The notebook {path} cannot be read: {error.strerror}.") from None
    if len(data) > MOST_BYTES:
        raise SpecError(f"{path} is larger than {MOST_BYTES >> 20} MiB; clear its outputs first.")
    return data


def _current(content: dict[str, Any]) -> dict[str, Any]:
    """The notebook in format 4.5. ValueError and the like if it is damaged."""
    metadata = content.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is not an object")  # noqa: TRY004
    if not isinstance(content.get("cells"), list):
        raise ValueError("it has no list of cells")  # noqa: TRY004
    seen: set[str] = set()
    cells = [_cell(cell, number, seen) for number, cell in enumerate(content["cells"], 1)]
    metadata = copy.deepcopy(metadata)
    return {"cells": cells, "metadata": metadata, "nbformat": _FORMAT, "nbformat_minor": 5}


def _cell(cell: Any, number: int, seen: set[str]) -> dict[str, Any]:
    kind = cell.get("cell_type") if isinstance(cell, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"cell {number} has no known type")
    found = {key: cell[key] for key in _FIELDS[kind] if key in cell}
    source = cell.get("source", "")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str) or not isinstance(cell.get("metadata", {}), dict):
        raise ValueError(f"cell {number} has no text, or no metadata")  # noqa: TRY004
    cell_id = cell.get("id")
    if not isinstance(cell_id, str) or not _CELL_ID.fullmatch(cell_id) or cell_id in seen:
        cell_id = _new_id(seen)
    seen.add(cell_id)
    found |= {"id": cell_id, "source": source, "metadata": dict(cell.get("metadata", {}))}
    if kind == "code":
        found |= {"outputs": [], "execution_count": None}
    return found


def _new_id(taken: set[str]) -> str:
    while (made := secrets.token_hex(4)) in taken:
        pass
    return made


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
