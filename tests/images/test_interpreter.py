"""Finding the Python of an image without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.errors import SpecError
from sandbox_kernel.images.contents import Contents
from sandbox_kernel.images.interpreter import find_interpreter
from sandbox_kernel.images.layers import folder_entries

from .inputs import AARCH64, elf, entry, make_rootfs


def contents(root: Path) -> Contents:
    found = Contents()
    for item, content in folder_entries(root):
        found.add(item, content)
    return found


@pytest.mark.parametrize(
    ("shape", "packages", "says"),
    [
        ({}, "/usr/local/lib/python3.11/dist-packages", "3.11 on x86_64 with glibc 2.36"),
        ({"libc": "musl"}, "/usr/local/lib/python3.11/dist-packages", "x86_64 with musl 1.2"),
        ({"machine": AARCH64}, "/usr/local/lib/python3.11/dist-packages", "on aarch64"),
        ({"debian": False}, "/usr/lib/python3.11/site-packages", "3.11"),
        (
            {"python": "usr/local/bin/python3.12"},
            "/usr/local/lib/python3.12/site-packages",
            "Python 3.12",
        ),
        (
            {"python": "usr/local/bin/python3.13t"},
            "/usr/local/lib/python3.13t/site-packages",
            "3.13 (free-threaded)",
        ),
    ],
)
def test_what_is_found(shape: dict[str, Any], packages: str, says: str, tmp_path: Path) -> None:
    """Version, machine, C library and the place for packages are told from the files."""
    found = find_interpreter(contents(make_rootfs(tmp_path / "r", **shape)))
    assert found.packages == packages
    assert says in str(found.target)
    assert not found.has_ipykernel


def test_a_virtual_environment(tmp_path: Path) -> None:
    """The environment that is first on the image's PATH gets the packages."""
    root = make_rootfs(tmp_path / "r")
    (root / "opt/venv/bin").mkdir(parents=True)
    (root / "opt/venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    (root / "opt/venv/bin/python3").symlink_to("/usr/bin/python3")
    found = find_interpreter(contents(root), ["/opt/venv/bin", "/usr/bin"])
    assert (found.path, found.packages) == (
        "/opt/venv/bin/python3",
        "/opt/venv/lib/python3.11/site-packages",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"usr/bin/python3": None}, "has no python3 in"),
        ({"usr/bin/python3.11": b"#!/bin/sh\n"}, "no Linux program"),
        ({"usr/bin/python3.11": elf(bits=32)}, "32 bits"),
        ({"usr/bin/python3.11": elf(4711)}, "no wheels for the machine 'number 4711'"),
        ({"usr/lib/x86_64-linux-gnu/libc.so.6": None}, "neither glibc nor musl"),
        (
            {"usr/lib/x86_64-linux-gnu/libc.so.6": b"release version 2.12"},
            "glibc 2.12 is too old",
        ),
    ],
)
def test_what_cannot_be_used(change: dict[str, bytes | None], message: str, tmp_path: Path) -> None:
    """Each image that no kernel can run on is refused with the reason."""
    root = make_rootfs(tmp_path / "r")
    for name, content in change.items():
        (root / name).unlink()
        if content is not None:
            (root / name).write_bytes(content)
    with pytest.raises(SpecError, match=message):
        find_interpreter(contents(root))


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    """Kernels need Python 3.9."""
    root = make_rootfs(tmp_path / "r", python="usr/bin/python3.8")
    with pytest.raises(SpecError, match=r"Python 3\.8 is too old"):
        find_interpreter(contents(root))


def test_whiteouts_hide_what_is_below() -> None:
    """A layer can take away what lower ones have, one by one or a folder's all."""
    found = Contents()
    for name in ("a/one", "a/two", "b/one", "b/two/three"):
        found.add(entry(name), None)
    for name in ("a/.wh.one", "b/.wh..wh..opq", "b/four"):
        found.add(entry(name), None)
    assert found.names("a") == ["two"]
    assert found.names("b") == ["four"]
    assert not found.is_folder("b/two")


def test_links_stay_in_the_image() -> None:
    """Links are followed as they would be inside, and not for ever."""
    found = Contents()
    found.add(entry("usr/bin/python3.11"), None)
    for name, link in {
        "bin": "usr/bin",
        "usr/bin/python3": "/bin/python3.11",
        "up": "../../../usr/bin/python3",
        "loop": "loop",
    }.items():
        found.add(entry(name, b"2", link), None)
    assert found.resolve("/bin/python3") == found.resolve("up") == "usr/bin/python3.11"
    assert found.resolve("loop") is None
