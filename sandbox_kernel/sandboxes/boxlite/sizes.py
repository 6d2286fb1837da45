"""What a VM is made of: the fields of a spec that decide it, and what is told about them."""

from __future__ import annotations

from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.sandboxes.boxlite.facts import BACKEND
from sandbox_kernel.spec import SandboxSpec


def sizes(spec: SandboxSpec) -> dict[str, int | None]:
    """For ``Runtime.create``. SpecRefused for what a VM cannot have: nothing is rounded."""
    if spec.cpus is not None and spec.cpus != int(spec.cpus):
        raise SpecRefused(
            f"Sandbox {spec.name!r} was not created: the backend {BACKEND!r} cannot enforce "
            f"cpus={spec.cpus!r}. A VM has whole CPUs; ask for {int(spec.cpus) + 1}."
        )
    if spec.disk_mib is not None and spec.disk_mib % 1024:
        raise SpecRefused(
            f"Sandbox {spec.name!r} was not created: the backend {BACKEND!r} cannot enforce "
            f"disk_mib={spec.disk_mib!r}. BoxLite's disks have whole GiB, image included; ask "
            f"for {(spec.disk_mib // 1024 + 1) * 1024}."
        )
    return {
        "cpus": int(spec.cpus) if spec.cpus is not None else None,
        "memory_mib": spec.memory_mib,
        "disk_gib": spec.disk_mib // 1024 if spec.disk_mib is not None else None,
    }


def merged(kept: SandboxSpec, spec: SandboxSpec, snapshot: str) -> SandboxSpec:
    """The spec of a box from a snapshot: what the VM is made of is the snapshot's."""
    values = {**kept.to_dict(), **spec.to_dict()}
    for field in ("image", "cpus", "memory_mib", "disk_mib"):
        if getattr(spec, field) not in (None, getattr(kept, field)):
            raise SpecRefused(
                f"Sandbox {spec.name!r} was not created: the snapshot {snapshot!r} has "
                f"{field}={getattr(kept, field)!r}, which a restored box keeps. Leave it out."
            )
    return SandboxSpec.from_mapping(values)


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
