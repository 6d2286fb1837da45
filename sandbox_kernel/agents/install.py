"""Installing packages as a cell: what is run, and what to do if it fails.

``Notebook.install`` runs ``install_cell`` as any other cell, so that it is in the notebook, and
adds ``install_advice`` to a result that is not well.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from sandbox_kernel.agents.files import path_inside
from sandbox_kernel.errors import SpecError

_MOST = 100
_LONGEST = 200
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION = r"\s*(?:===|==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9](?:[A-Za-z0-9.*+!_-])*\s*"
_REQUIREMENT = re.compile(
    rf"{_NAME}(?:\[{_NAME}(?:,\s?{_NAME})*\])?(?:{_VERSION}(?:,{_VERSION})*)?"
)
_WHEEL = re.compile(r"[A-Za-z0-9_./+ -]+\.whl")
_OPTIONS = "--no-input --disable-pip-version-check --progress-bar off"
_NO_NETWORK = (
    *("this sandbox has no network", "ame resolution", "ame or service not known"),
    *("ailed to resolve", "etwork is unreachable", "No address associated with hostname"),
    *("Connection refused", "Cannot connect to proxy", "Tunnel connection failed"),
)
_ADVICE = (
    (
        ("No module named pip",),
        "This Python has no pip. Use an image or an environment that has it.",
    ),
    (
        ("externally-managed-environment",),
        "This Python is managed by its system, which lets pip install nothing. Use a kernel with "
        "a virtual environment.",
    ),
    (
        ("No space left on device", "Disk quota exceeded", "File too large"),
        "The sandbox's disk is full. Open it with a larger disk_mib, or delete files.",
    ),
    (
        ("MemoryError", "Cannot allocate memory"),
        "The sandbox has too little memory. Open it with a larger memory_mib.",
    ),
    (
        ("ResolutionImpossible", "conflicting dependencies"),
        "These versions exclude each other. Leave some of them out.",
    ),
    (
        ("Could not find a version", "No matching distribution found", "Invalid requirement"),
        "The index has no such package or version for this Python. Check the name.",
    ),
    (
        ("Failed building wheel", "metadata-generation-failed", "subprocess-exited-with-error"),
        "A package would have to be compiled, and that failed. Ask for a version that has a wheel "
        "for this Python, or use an image with a compiler.",
    ),
)


def install_cell(packages: Sequence[str], workspace: str = "/workspace") -> str:
    """The code of a cell that installs packages with pip, and fails if pip does.

    Each is a name with perhaps extras and versions (``pandas[excel]>=2,<3``), or the path of a
    wheel in the workspace. SpecError for anything else: options, addresses, markers, shell.
    """
    if not packages or len(packages) > _MOST:
        raise SpecError(f"install takes 1 to {_MOST} packages, not {len(packages)}.")
    words = " ".join(shlex.quote(_checked(package, workspace)) for package in packages)
    return (
        f"%pip install {_OPTIONS} -- {words}\n"
        f"if _exit_code:\n"
        f'    raise RuntimeError(f"pip has failed (exit code {{_exit_code}})")'
    )


def install_advice(output: str) -> str:
    """What to do after an installation has failed with this output; empty if that is not known."""
    if any(sign in output for sign in _NO_NETWORK):
        return (
            'The sandbox cannot reach a package index. Open it with egress=["@pip"], which lets '
            "it reach this machine's index and nothing else, or upload wheels and install those."
        )
    for signs, advice in _ADVICE:
        if any(sign in output for sign in signs):
            return advice
    return ""


def _checked(package: object, workspace: str) -> str:
    """A requirement in which nothing means anything to pip, a shell or IPython but what it is."""
    if isinstance(package, str) and 0 < len(package) <= _LONGEST:
        text = package.strip()
        if text.lower().endswith(".whl") and _WHEEL.fullmatch(text):
            return f"{workspace}/{path_inside(text, workspace)}"
        if _REQUIREMENT.fullmatch(text):
            return re.sub(r"\s", "", text)
    raise SpecError(
        f"{package!r:.200} is not installed: a package is a name with perhaps extras and "
        f"versions, such as 'pandas[excel]>=2,<3', or the path of a wheel in the workspace."
    )
