"""Finds the Python of an image by its files. Nothing of the image is run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sandbox_kernel.errors import SpecError
from sandbox_kernel.images.contents import Contents
from sandbox_kernel.images.target import Target

PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""The PATH of images that do not set one."""

_MACHINES = {62: "x86_64", 183: "aarch64", 22: "s390x", 243: "riscv64", 21: "ppc64le"}
_PYTHON = re.compile(r"python(\d)\.(\d{1,3})(t?)")
_GLIBC_FILE = re.compile(r"(?:.*/)?libc-2\.(\d+)\.so")
_GLIBC = re.compile(r"(?:.*/)?libc\.so\.6|(?:.*/)?libc-2\.\d+\.so")
_GLIBC_VERSION = re.compile(rb"release version 2\.(\d{1,3})")
_MUSL = re.compile(r"(?:.*/)?ld-musl-[^/]+\.so\.1")
_MUSL_VERSION = re.compile(rb"\0(1)\.(\d{1,2})\.\d{1,3}\0")


@dataclass(frozen=True)
class Interpreter:
    """A Python in an image."""

    path: str
    """Absolute, in the image."""
    target: Target
    packages: str
    """Where packages are installed, absolute in the image."""
    programs: str
    """Where their programs are installed."""
    has_ipykernel: bool


def find_interpreter(
    contents: Contents, path: Sequence[str] = PATH, python: str | None = None
) -> Interpreter:
    """The ``python3`` on PATH, or the one at ``python``. SpecError if it cannot run kernels."""
    candidates = [python] if python else [f"{folder.rstrip('/')}/python3" for folder in path]
    for candidate in candidates:
        if contents.is_file(candidate):
            return _described(contents, candidate)
    if python:
        raise SpecError(f"The image has no file {python}. Name its Python with --python.")
    raise SpecError(
        f"The image has no python3 in {', '.join(path)}, and kernels need one. Add it to the "
        f"image, name it with --python, or use `--from debian`, which has it."
    )


def _described(contents: Contents, path: str) -> Interpreter:
    resolved = contents.resolve(path)
    assert resolved is not None
    folder = path.rpartition("/")[0]
    prefix = folder.rpartition("/")[0]
    own = bool(contents.read(f"{prefix}/pyvenv.cfg"))  # a virtual environment
    if not own:
        prefix = "/" + resolved.rpartition("/")[0].rpartition("/")[0].lstrip("/")
        prefix = "/usr" if prefix == "/" else prefix
    major, minor, free = _version(contents, resolved, prefix)
    libc, libc_version = _libc(contents)
    target = Target((major, minor), _machine(contents, resolved), libc, libc_version, free)
    library = f"python{target.version}{'t' if free else ''}"
    # Debian separates its own packages from others.
    debian = prefix == "/usr" and contents.is_folder("/usr/lib/python3/dist-packages")
    site = f"{prefix}/lib/{library}/site-packages"
    packages = f"/usr/local/lib/{library}/dist-packages" if debian else site
    places = [packages, site, *(["/usr/lib/python3/dist-packages"] if debian else [])]
    return Interpreter(
        path=path,
        target=target,
        packages=packages,
        programs="/usr/local/bin" if debian else f"{prefix}/bin",
        has_ipykernel=any(contents.is_file(f"{p}/ipykernel/__init__.py") for p in places),
    )


def _version(contents: Contents, resolved: str, prefix: str) -> tuple[int, int, bool]:
    found = _PYTHON.fullmatch(resolved.rpartition("/")[2])
    if found is None:
        libraries = [n for n in contents.names(f"{prefix}/lib") if n.startswith("python3.")]
        versions = [match for match in map(_PYTHON.fullmatch, libraries) if match]
        found = versions[0] if len(versions) == 1 else None
    if found is None:
        raise SpecError(
            f"The version of /{resolved} in the image does not follow from its name. "
            f"Name the interpreter itself with --python, for example /usr/bin/python3.12."
        )
    return int(found.group(1)), int(found.group(2)), bool(found.group(3))


def _machine(contents: Contents, resolved: str) -> str:
    head = contents.read(resolved)
    if len(head) < 20 or head[:4] != b"\x7fELF":
        raise SpecError(f"/{resolved} in the image is no Linux program, so it cannot run kernels.")
    order: Literal["little", "big"] = "little" if head[5] == 1 else "big"
    number = int.from_bytes(head[18:20], order)
    machine = _MACHINES.get(number, f"number {number}")
    if head[4] != 2 or (machine == "ppc64le" and order == "big"):
        raise SpecError(
            f"/{resolved} in the image is for 32 bits, or for a machine without wheels. Use an "
            f"image for x86_64 or aarch64."
        )
    return machine


def _libc(contents: Contents) -> tuple[str, tuple[int, int]]:
    """The C library and its version."""
    for path in contents.files(_GLIBC):
        named = _GLIBC_FILE.fullmatch(path)
        said = _GLIBC_VERSION.search(contents.read(path))
        if version := named or said:
            return "glibc", (2, int(version[1]))
    for path in contents.files(_MUSL):
        said = _MUSL_VERSION.search(contents.read(path))
        return "musl", (1, int(said.group(2)) if said else 1)
    return "unknown", (0, 0)
