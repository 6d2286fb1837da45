"""A spec as Islo's fields: sizes, lifecycle and gateway profile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from islo.types import AutoResumePolicy, LifecyclePolicy

from sandbox_kernel.errors import SpecError
from sandbox_kernel.sandboxes.capabilities import refusal
from sandbox_kernel.sandboxes.islo.gateway_profiles import Profile
from sandbox_kernel.sandboxes.islo.options import Options
from sandbox_kernel.spec import SandboxSpec


@dataclass(frozen=True)
class SandboxPlan:
    """A spec as a request to Islo. ``of`` refuses what Islo cannot enforce; it touches nothing."""

    profile: Profile | str
    """A gateway profile to make, or the name of one that exists."""
    fields: dict[str, Any]
    limits: dict[str, str]

    @classmethod
    def of(cls, spec: SandboxSpec) -> SandboxPlan:
        options = Options.read(spec.options)
        if options.gateway_profile is not None and (spec.egress.rules or spec.egress):
            raise SpecError(
                f"Sandbox {spec.name!r} was not created: egress and options.gateway_profile both "
                f"say what may get out. Give one of them."
            )
        profile = options.gateway_profile or Profile.of(spec.egress, spec.name)
        lifecycle: dict[str, Any] = {
            "pause_after_idle": options.pause_after_idle or max(1, math.ceil(spec.lease_seconds)),
            "auto_resume": AutoResumePolicy(options.auto_resume),
        }
        if options.delete_after is not None:
            lifecycle["delete_after"] = options.delete_after
        fields: dict[str, Any] = {"lifecycle": LifecyclePolicy(**lifecycle)}
        if isinstance(profile, Profile):
            fields["internet_enabled"] = profile.internet_enabled
        limits = {}
        if spec.image:
            fields["image"] = spec.image
        if spec.memory_mib:
            fields["memory_mb"] = spec.memory_mib
            limits["memory_mib"] = f"{spec.memory_mib} MiB (memory of the VM)"
        if spec.cpus:
            fields["vcpus"] = _whole(spec, "cpus", spec.cpus, 1, "whole CPUs")
            limits["cpus"] = f"{fields['vcpus']} (virtual CPUs)"
        if spec.disk_mib:
            fields["disk_gb"] = _whole(spec, "disk_mib", spec.disk_mib, 1024, "GiB, so 1024 MiB")
            limits["disk_mib"] = f"{spec.disk_mib} MiB (disk of the VM)"
        return cls(profile, fields, limits)


def _whole(spec: SandboxSpec, field: str, value: float, unit: int, what: str) -> int:
    if value % unit:
        why = f"Islo counts in {what}; give a multiple."
        raise refusal(spec.name, "islo", f"{field}={value!r}", why)
    return int(value // unit)
