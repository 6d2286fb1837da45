"""Installing packages: the cell that does it, what is refused, and advice after a failure."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.agents.install import install_advice, install_cell
from sandbox_kernel.errors import SpecError


def words(*packages: str) -> list[str]:
    """What pip gets after its options, as a shell splits it."""
    first = install_cell(packages).split("\n")[0]
    return shlex.split(first.partition(" -- ")[2])


@pytest.mark.parametrize(
    ("package", "word"),
    [
        ("numpy", "numpy"),
        (" pandas[excel, aws] >= 2, <3 ", "pandas[excel,aws]>=2,<3"),
        ("zope.interface==5.*", "zope.interface==5.*"),
        ("a~=1!2.0+local", "a~=1!2.0+local"),
        ("wheels/x-1.0-py3-none-any.whl", "/workspace/wheels/x-1.0-py3-none-any.whl"),
        ("/workspace/a b.whl", "/workspace/a b.whl"),
        ("-x.whl", "/workspace/-x.whl"),
    ],
)
def test_what_is_installed(package: str, word: str) -> None:
    """Names with extras and versions, and wheels in the workspace."""
    assert words(package, "other") == [word, "other"]


@pytest.mark.parametrize(
    "package",
    [
        *("", " ", "-r", "--index-url=http://x", "-e .", "a --pre", "a;rm -rf /", "a\nimport os"),
        *("$HOME", "{x}", "a`id`", "a'b", "http://x/y.whl", "git+https://x/y", "a @ file:///x"),
        *("../out.whl", "/etc/x.whl", "a\nb.whl", "$(id).whl", "x'.whl", ".", "./folder"),
        *("a==1; python_version<'3'", "a==", "a[", "a,b", "é", "a" * 201, None, 3, ["a"]),
    ],
)
def test_what_is_refused(package: Any) -> None:
    """Options, addresses, markers, folders, and whatever a shell or IPython would read."""
    with pytest.raises(SpecError):
        install_cell([package])


@pytest.mark.parametrize("count", [0, 101])
def test_how_many_at_once(count: int) -> None:
    """At least one, and not too many."""
    with pytest.raises(SpecError):
        install_cell(["a"] * count)


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4))
def test_no_text_is_more_than_names(packages: list[str]) -> None:
    """Either it is refused, or it is one word each, which is no option and runs nothing."""
    try:
        given = words(*packages)
    except SpecError:
        return
    assert len(given) == len(packages)
    assert not any(word.startswith("-") for word in given)
    assert not set("$`{}\n\\\"'|&;()?") & set("".join(given))


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("NOTE: this sandbox has no network, so pip", 'egress=["@pip"]'),
        ("Temporary failure in name resolution", 'egress=["@pip"]'),
        ("ERROR: No matching distribution found for nunpy", "Check the name"),
        ("OSError: [Errno 28] No space left on device", "disk_mib"),
        ("error: externally-managed-environment", "virtual environment"),
        ("ERROR: Failed building wheel for x", "compiled"),
        ("ERROR: ResolutionImpossible", "exclude each other"),
        ("/usr/bin/python: No module named pip", "no pip"),
        ("something else", ""),
    ],
)
def test_advice(output: str, says: str) -> None:
    """What is known of pip's failures."""
    assert says in install_advice(output) if says else install_advice(output) == ""
