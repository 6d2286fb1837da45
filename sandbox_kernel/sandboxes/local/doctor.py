"""Lines of ``sandbox-kernel doctor`` about the local jail."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping

from sandbox_kernel.guest import landlock
from sandbox_kernel.sandboxes.results import Diagnosis


def landlock_diagnosis() -> Diagnosis:
    version = landlock.abi()
    if version >= landlock.LEAST_ABI:
        return Diagnosis(True, f"Landlock (version {version}) backs up the jail's mounts")
    return Diagnosis(
        None,
        "this kernel has no usable Landlock, so only the jail's mounts keep it from files",
        "Linux 5.19 and later have it; it may have to be turned on at boot (lsm=landlock,...).",
    )


def limits_diagnosis(limits: Mapping[str, str]) -> Diagnosis:
    held = [limits[name] for name in ("memory_mib", "processes") if name in limits]
    if all("cgroup" in words for words in held):
        return Diagnosis(True, f"cgroups limit memory and processes ({held[0]})")
    return Diagnosis(
        None,
        "no cgroup can be made here, so rlimits and a watch enforce the limits more coarsely: "
        + "; ".join(f"{name} {words}" for name, words in limits.items()),
        "Start the server in a delegated cgroup: systemd-run --user --scope -p Delegate=yes "
        "jupyter lab",
    )


def ipykernel_diagnosis() -> Diagnosis:
    if importlib.util.find_spec("ipykernel"):
        return Diagnosis(True, f"ipykernel is installed for {sys.executable}")
    fix = f"{sys.executable} -m pip install ipykernel"
    return Diagnosis(False, f"ipykernel is not installed for {sys.executable}", fix)


def weaknesses(limits: Mapping[str, str]) -> tuple[str, ...]:
    """For ``SandboxHandle.weaknesses``: limits that only a watch enforces."""
    coarse = [name for name in ("memory_mib", "processes") if "watch" in limits.get(name, "")]
    if not coarse:
        return ()
    return (
        f"no cgroup can be made here, so a watch enforces {' and '.join(coarse)}, and sees an "
        f"excess after the fact; `sandbox-kernel doctor` says how to get one.",
    )
