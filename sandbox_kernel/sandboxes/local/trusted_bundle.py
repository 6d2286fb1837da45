"""The certificates that programs in a jail trust: the host's, and the gateway's authority.

They are in a folder of the host's that the jail does not see. The bundle is changed in place, so
that the jail sees the change wherever it is mounted: at a path of its own, over the system's
bundle, and over those that Python packages bring along.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sandbox_kernel.gateway.tls.roots import SYSTEM_BUNDLES
from sandbox_kernel.paths import private_dir
from sandbox_kernel.sandboxes.local.mounts import Bind

BUNDLE = "/etc/sandbox-kernel/ca-bundle.crt"
"""In the jail."""
_ROOTS, _BUNDLE = "roots.pem", "bundle.pem"
_IN_PACKAGES = ("certifi/cacert.pem", "pip/_vendor/certifi/cacert.pem")


def make(folder: Path, roots: bytes) -> None:
    """For a jail that is about to start."""
    private_dir(folder)
    for name in (_ROOTS, _BUNDLE):
        (folder / name).write_bytes(roots)


def add(folder: Path, certificate: bytes) -> None:
    """Add an authority to the roots, in place of an earlier one."""
    content = (folder / _ROOTS).read_bytes() + certificate
    with open(folder / _BUNDLE, "r+b") as bundle:
        bundle.write(content)  # the roots stay what they are: whoever reads meanwhile finds them
        bundle.truncate()


def targets(site_packages: Iterable[str]) -> list[str]:
    """Where in the jail the bundle is seen."""
    others = [*SYSTEM_BUNDLES]
    others += [os.path.join(folder, name) for folder in site_packages for name in _IN_PACKAGES]
    return [BUNDLE, *dict.fromkeys(os.path.realpath(p) for p in others if os.path.isfile(p))]


def binds(folder: Path, site_packages: Iterable[str]) -> list[Bind]:
    return [Bind(str(folder / _BUNDLE), target) for target in targets(site_packages)]
