"""Parameters of notebooks are those of papermill: how they are given, and where they are set."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import nbformat
import papermill.cli
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from papermill.translators import PythonTranslator

from sandbox_kernel.agents.parameters import parameters_cell, python_cell, read_parameters, typed
from sandbox_kernel.agents.prepared_notebook import prepare
from sandbox_kernel.errors import SpecError

from .notebooks import write_notebook

VALUES: dict[str, Any] = {
    "text": 'a "quoted"\nline with \\ and é, \u2028 and {braces}',
    "code": "__import__('os').system('true')",
    "number": 5,
    "large": 10**30,
    "fraction": -0.25,
    "yes": True,
    "nothing": None,
    "several": [1, "two", [3.5]],
    "named": {"a": 1, "b": {"c": None}},
}


def values_of(source: str) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(source, scope)
    del scope["__builtins__"]
    return scope


@pytest.mark.parametrize("text", ["True", "None", "5", "-5", "1_0", "0x10", "1e3", "nan", "a", ""])
def test_values_are_read_as_papermill_reads_them(text: str) -> None:
    """-p NAME VALUE makes numbers of what looks like one."""
    expected = papermill.cli._resolve_type(text)
    assert repr(typed(text)) == repr(expected)


def test_the_cell_sets_what_papermills_cell_sets() -> None:
    """Another text, perhaps, but the same values; no value is ever run."""
    source = python_cell(VALUES)
    assert values_of(source) == VALUES == values_of(PythonTranslator.codify(VALUES))
    assert source.startswith("# Parameters\n")
    names = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert names == []


def test_floats_that_have_no_literal() -> None:
    found = values_of(python_cell({"a": math.inf, "b": -math.inf, "c": [math.nan]}))
    assert (found["a"], found["b"], math.isnan(found["c"][0])) == (math.inf, -math.inf, True)


@pytest.mark.parametrize("name", ["a b", "class", "1a", "x=1;y", ""])
def test_a_name_is_a_variable(name: str) -> None:
    with pytest.raises(SpecError, match="no name of a Python variable"):
        python_cell({name: 1})


def test_the_sources_of_parameters_and_which_wins(tmp_path: Path) -> None:
    """Files, then YAML, then -p, then -r; YAML that is no JSON, and its dates, too."""
    (tmp_path / "p.json").write_text(json.dumps({"a": 1, "b": 1, "c": 1, "d": 1}))
    (tmp_path / "p.yaml").write_text("b: 2\nc: 2\nd: 2\n")
    found = read_parameters(
        files=[str(tmp_path / "p.json"), str(tmp_path / "p.yaml")],
        yaml=["{c: 3, d: 3, day: 2026-01-02}"],
        pairs=[("d", "4")],
        raw=[("e", "5")],
    )
    assert {name: found[name] for name in "abcde"} == {"a": 1, "b": 2, "c": 3, "d": 4, "e": "5"}
    assert values_of(python_cell(found))["day"] == "2026-01-02"


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "7", "{1: 2}"])
def test_parameters_are_names_with_values(text: str) -> None:
    with pytest.raises(SpecError, match="-y "):
        read_parameters(yaml=[text])


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(SpecError, match=r"'nowhere\.yaml' cannot be read"):
        read_parameters(files=["nowhere.yaml"])


@pytest.mark.parametrize(
    "tags", [[], [[], ["parameters"]], [["parameters"], ["injected-parameters"]]]
)
def test_the_cell_is_where_papermill_puts_it(tmp_path: Path, tags: list[list[str]]) -> None:
    """Below the defaults, in place of an earlier one, or at the top; and it has the same tag."""
    path = write_notebook(tmp_path / "n.ipynb", "1", "2", "3", tags=tags)
    theirs = load_notebook_node(str(path))
    theirs = parameterize_notebook(theirs, {"a": 5})
    prepared = prepare(path, {"a": 5})
    ours = nbformat.from_dict(prepared.content)
    nbformat.validate(ours)
    assert [(c.source.strip(), c.metadata.get("tags", [])) for c in ours.cells] == [
        (c.source.strip(), c.metadata.tags) for c in theirs.cells
    ]
    assert ours.metadata.papermill.parameters == {"a": 5}
    assert bool(prepared.notices) == (not tags)


def test_other_languages_are_papermills(tmp_path: Path) -> None:
    """Its translators write them; what it does not know is refused by name."""
    assert parameters_cell({"a": [1]}, "julia", "j").splitlines()[-1] == "a = [1]"
    path = write_notebook(tmp_path / "n.ipynb", "1", language="cobol")
    with pytest.raises(SpecError, match="cannot write them in 'cobol'"):
        prepare(path, {"a": 1})
