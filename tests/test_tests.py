"""The tests themselves: their map is complete, and none depends on another test module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
MODULES = sorted(HERE.rglob("*.py"))


def folders() -> set[str]:
    return {path.relative_to(HERE).parts[0] for path in MODULES if path.parent != HERE}


def test_the_map_names_every_folder() -> None:
    """tests/README.md has a row for each folder, and no other."""
    rows = re.findall(r"^\| `(\w+)/` \|", (HERE / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(folders())


def test_the_map_names_helpers_that_exist() -> None:
    """They were renamed at times."""
    text = (HERE / "README.md").read_text()
    named = re.findall(r"`(\w+/\w+\.py)`", text)
    assert len(named) > 10
    assert [name for name in named if not (HERE / name).exists()] == []


def imports(module: Path) -> Iterator[tuple[str, str]]:
    """What a module imports from the tests: (module, name). Programs in strings count, too."""
    package = ["tests", *module.relative_to(HERE).parts[:-1]]
    tree = ast.parse(module.read_text())
    sources = [tree]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            lines = re.findall(r"^\s*(from tests\.\S+ import .+)$", node.value, re.MULTILINE)
            sources += [ast.parse(line) for line in lines]
    for source in sources:
        for node in ast.walk(source):
            if isinstance(node, ast.ImportFrom):
                near = package[: len(package) - node.level + 1] if node.level else []
                name = ".".join([*near, *filter(None, [node.module])])
                if name.split(".")[0] == "tests":
                    yield from ((name, alias.name) for alias in node.names)


def test_no_module_imports_a_test_module_or_a_private_name() -> None:
    """Shared things live in helper modules, under public names."""
    wrong = [
        f"{module.relative_to(HERE)}: {name}.{what}"
        for module in MODULES
        for name, what in imports(module)
        if name.rpartition(".")[2].startswith("test_") or re.match("test_|_[a-z]", what)
    ]
    assert wrong == []
