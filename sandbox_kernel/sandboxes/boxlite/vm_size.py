"""The size of a box's VM: from a spec, and as limits in words."""

from __future__ import annotations

from sandbox_kernel.sandboxes.boxlite.backend import BACKEND
from sandbox_kernel.sandboxes.capabilities import refusal
from sandbox_kernel.spec import SandboxSpec


def sizes(spec: SandboxSpec) -> dict[str, int | None]:
    """For ``Runtime.create``. SpecRefused for what a VM cannot have: nothing is rounded."""
    if spec.cpus is not None and spec.cpus != int(spec.cpus):
        why = f"A VM has whole CPUs; ask for {int(spec.cpus) + 1}."
        raise refusal(spec.name, BACKEND, f"cpus={spec.cpus!r}", why)
    if spec.disk_mib is not None and spec.disk_mib % 1024:
        more = (spec.disk_mib // 1024 + 1) * 1024
        why = f"BoxLite's disks have whole GiB, image included; ask for {more}."
        raise refusal(spec.name, BACKEND, f"disk_mib={spec.disk_mib!r}", why)
    return {
        "cpus": int(spec.cpus) if spec.cpus is not None else None,
        "memory_mib": spec.memory_mib,
        "disk_gib": spec.disk_mib // 1024 if spec.disk_mib is not None else None,
    }


def limits(spec: SandboxSpec) -> dict[str, str]:
    """For ``SandboxInfo.limits``."""
    found = {}
    if spec.memory_mib is not None:
        found["memory_mib"] = f"{spec.memory_mib} MiB (the VM's memory)"
    if spec.cpus is not None:
        found["cpus"] = f"{int(spec.cpus)} (the VM's CPUs)"
    if spec.disk_mib is not None:
        found["disk_mib"] = f"{spec.disk_mib} MiB (the VM's disk, with the image)"
    return found
