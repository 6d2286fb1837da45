"""Target: the properties of an interpreter that decide which wheels fit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from packaging import tags

from sandbox_kernel.errors import SpecError

OLDEST_PYTHON = (3, 9)
OCI_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "ppc64le": "ppc64le",
    "riscv64": "riscv64",
    "s390x": "s390x",
}
"""Supported machines -> their names in the OCI."""

_OLDEST_GLIBC, _NEWEST_MINOR = 17, 99
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@dataclass(frozen=True)
class Target:
    """CPython of one version on Linux. SpecError if no kernel can run on it."""

    python: tuple[int, int]
    machine: str
    libc: str
    """``glibc`` or ``musl``."""
    libc_version: tuple[int, int]
    free_threaded: bool = False

    def __post_init__(self) -> None:
        if self.python < OLDEST_PYTHON:
            raise SpecError(
                f"Python {self.version} is too old: kernels need 3.9 or newer. "
                f"Use an image with a newer Python."
            )
        if self.machine not in OCI_ARCHITECTURES:
            raise SpecError(
                f"There are no wheels for the machine {self.machine!r}; known are "
                f"{', '.join(sorted(OCI_ARCHITECTURES))}. Use an image for one of those."
            )
        major, minor = self.libc_version
        known = {"glibc": (2, _OLDEST_GLIBC), "musl": (1, 0)}
        if self.libc not in known:
            raise SpecError(
                "The C library is neither glibc nor musl, and wheels are made for no other. "
                "Use an image of a common distribution, or one that has ipykernel."
            )
        if (major, minor) < known[self.libc] or major > 2 or minor > _NEWEST_MINOR:
            raise SpecError(
                f"{self.libc} {major}.{minor} is too old (or not a version): wheels need at least "
                f"{'.'.join(map(str, known[self.libc]))}. Use a newer image."
            )

    @property
    def version(self) -> str:
        return ".".join(map(str, self.python))

    @property
    def abi(self) -> str:
        return f"cp{self.python[0]}{self.python[1]}{'t' if self.free_threaded else ''}"

    @property
    def architecture(self) -> str:
        """The machine's name in the OCI."""
        return OCI_ARCHITECTURES[self.machine]

    def platforms(self) -> list[str]:
        """Platform tags of fitting wheels, best first."""
        major, minor = self.libc_version
        if self.libc == "musl":
            return [f"musllinux_{major}_{m}_{self.machine}" for m in range(minor, -1, -1)]
        oldest = 5 if self.machine == "x86_64" else _OLDEST_GLIBC
        found = []
        for m in range(minor, oldest - 1, -1):
            found.append(f"manylinux_{major}_{m}_{self.machine}")
            if m in _LEGACY:
                found.append(f"{_LEGACY[m]}_{self.machine}")
        return found

    def tags(self) -> Iterator[tags.Tag]:
        """Tags of all fitting wheels."""
        yield from tags.cpython_tags(self.python, [self.abi], self.platforms())
        yield from tags.compatible_tags(self.python, f"cp{self.python[0]}{self.python[1]}", ["any"])

    def markers(self) -> dict[str, str]:
        """The values for markers of requirements (``python_version < "3.11"``)."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.version}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.version}.0",
            "python_version": self.version,
            "sys_platform": "linux",
            "extra": "",
        }

    def key(self, *requirements: str) -> str:
        """A name for these requirements on this target."""
        libc = f"{self.libc} {self.libc_version[0]}.{self.libc_version[1]}"
        facts = "\n".join([self.abi, self.machine, libc, *sorted(requirements)])
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        libc = ".".join(map(str, self.libc_version))
        free = " (free-threaded)" if self.free_threaded else ""
        return f"Python {self.version}{free} on {self.machine} with {self.libc} {libc}"
