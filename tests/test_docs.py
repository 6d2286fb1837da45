"""The documents: links lead somewhere, and what the pages name exists."""

from __future__ import annotations

import ast
import errno
import functools
import os
import re
import tomllib
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest

from sandbox_kernel.cli.parser import build_parser
from sandbox_kernel.spec import KernelConfiguration, SandboxSpec

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sandbox_kernel"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/README.md")])
FOLDERS = (
    *("sandbox_kernel", "tests", "docs", "benchmarks", "tools", "notebooks", "examples"),
    "kernelspecs",
)
NOT_OURS = {"sitecustomize.py", "benchmarks/results/latest.json"}
"""Named on the pages, but not in the repository: an attacker's file, and a result."""

FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MODULE = re.compile(r"[\w./-]+\.py")
TEST = re.compile(r"(?:([\w./-]+\.py)::)?(test_\w+\*?)")
VARIABLE = re.compile(r"\bSANDBOX_KERNEL_[A-Z_]*[A-Z]\b")
CLASS = re.compile(r"\b(?:[A-Z][a-z]+){2,}(?:\.\w+)*")
RUN = re.compile(r"python3? -m ((?:sandbox_kernel|tests|benchmarks)[\w.]*)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
each_page_of_today = pytest.mark.parametrize(
    "page",  # the changelog also names what is gone
    [page for page in PAGES if page.name != "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    """Each relative link names a file, and each anchor a heading in it."""
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@each_page_of_today
def test_named_files_exist(page: Path) -> None:
    """Modules by any end of their path, other files and folders by the whole path; what is in the
    package may also be named from there."""
    missing = []
    for code in CODE.findall(prose(page)):
        name = code.partition("::")[0]
        if name in NOT_OURS or set("<>*{$ ") & set(name):
            continue
        top = name.partition("/")[0]
        if MODULE.fullmatch(name):
            known = any(f"/{path}".endswith(f"/{name}") for path in sources())
        elif top in FOLDERS and "/" in name:
            known = (ROOT / name).exists()
        elif (
            re.fullmatch(r"[a-z_]+/[a-z_/]*", name) and (PACKAGE / name.partition("/")[0]).is_dir()
        ):
            known = is_in_package(name)
        else:
            continue
        if not known:
            missing.append(name)
    for module in RUN.findall(page.read_text()):
        path = ROOT / module.replace(".", "/")
        if not (path.is_dir() or path.with_suffix(".py").exists()):
            missing.append(f"python -m {module}")
    assert not missing


@each_page_of_today
def test_named_classes_exist(page: Path) -> None:
    """Ours, and those of others that the sources use; with their attributes."""
    named = {name for code in CODE.findall(prose(page)) for name in CLASS.findall(code)}
    words = {word for name in named for word in name.split(".")}
    assert sorted(words - words_in_sources()) == []


def test_renamed_modules_exist() -> None:
    """The changelog says where they are now."""
    rows = rows_of_tables("before", (ROOT / "CHANGELOG.md").read_text())
    now = [name for row in rows for name in CODE.findall(row.split(" | ")[1])]
    assert len(now) > 50
    assert [name for name in now if not is_in_package(name)] == []


@each_page_of_today
def test_named_tests_exist(page: Path) -> None:
    """A test without a module is in the module that the page named last; * matches any ending."""
    missing, module = [], ""
    for code in CODE.findall(prose(page)):
        if MODULE.fullmatch(code):
            module = code
        if found := TEST.fullmatch(code):
            module = found[1] or module
            if not any(fnmatch(name, found[2]) for name in functions_of(module)):
                missing.append(f"{module}::{found[2]}")
    assert not missing


@each_page
def test_named_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|\$ )make ([a-z-]+)", page.read_text())
    assert set(named) <= targets


@each_page
def test_named_commands_exist(page: Path) -> None:
    """Commands of ``sandbox-kernel``, with their long options."""
    unknown = []
    for line in re.findall(r"(?:`|[$&] )sandbox-kernel ([a-z][^`\n|&#]*)", page.read_text()):
        words = line.split()
        usage = options_of(*words)
        options = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
        if usage is None or not options <= usage:
            unknown.append(line)
    assert not unknown


@each_page
def test_named_settings_exist(page: Path) -> None:
    """In the tables of fields, and as variables of the environment."""
    text = page.read_text()
    variables = {f"SANDBOX_KERNEL_{name.upper()}" for name in settings()}
    assert set(VARIABLE.findall(text)) <= variables | variables_in_sources()
    for row in rows_of_tables("field", text):
        named = {code for code in CODE.findall(row.split(" | ")[0]) if "/" not in code}
        assert named <= settings()


@each_page
def test_quoted_messages_are_in_the_sources(page: Path) -> None:
    """First column of the tables "the message has"; ``...`` stands for what is filled in."""
    missing = []
    for row in rows_of_tables("the message has", page.read_text()):
        for quote in CODE.findall(row.split(" | ")[0]):
            parts = [part.strip() for part in quote.split("...")]
            if not all(any(part in text for text in literals()) for part in parts):
                missing.append(quote)
    assert not missing


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def rows_of_tables(title: str, text: str) -> list[str]:
    """The rows of all tables whose first column has that title."""
    tables = re.findall(rf"^\| {title} \|.*\n\|.*\n((?:\|.*\n?)+)", text, re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def is_in_package(name: str) -> bool:
    """A module of sandbox_kernel/, or a folder of it."""
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


@functools.cache
def settings() -> set[str]:
    """Names of all settings of a sandbox and of a kernel."""
    return {field.name for cls in (SandboxSpec, KernelConfiguration) for field in fields(cls)}


whole_command = functools.cache(build_parser)


def options_of(*words: str) -> set[str] | None:
    """The options of the command that the words begin with; None if there is no such command."""
    parser = whole_command()
    for word in words:
        commands = [a.choices for a in parser._actions if isinstance(a.choices, dict)]
        if not commands:
            break
        if word not in commands[0]:
            return None
        parser = commands[0][word]
    return set(parser._option_string_actions)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(prose(page))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


@functools.cache
def sources() -> list[str]:
    return [
        str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    ]


@functools.cache
def variables_in_sources() -> set[str]:
    """Also those that no setting has, such as the folders and the suite's own."""
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in sources()]
    return {name for text in texts for name in VARIABLE.findall(text)}


@functools.cache
def words_in_sources() -> set[str]:
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in sources()]
    return {word for text in texts for word in re.findall(r"\w+", text)}


@functools.cache
def functions_of(module: str) -> set[str]:
    """Names of the test functions in all modules whose path ends so."""
    paths = [path for path in sources() if f"/{path}".endswith(f"/{module}")]
    return {
        name
        for path in paths
        for name in re.findall(r"def (test_\w+)", (ROOT / path).read_text(encoding="utf-8"))
    }


@functools.cache
def literals() -> list[str]:
    """All strings in the package, of f-strings the parts between the values; and the system's."""
    system = [os.strerror(number) for number in errno.errorcode]
    return system + [
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_the_design_shows_the_layers_in_their_order() -> None:
    """docs/design.md lists layers of import-linter's table, from top to bottom."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    table = next(c for c in settings["contracts"] if c["id"] == "layers")["layers"]
    order = [name.strip() for layer in table for name in layer.split(":")]
    page = (ROOT / "docs/design.md").read_text()
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert rows == sorted(rows, key=order.index)
    assert folders - {"__pycache__"} <= set(rows)
