"""A spec as Islo's fields: sizes, lifecycle, gateway profile, and what ``options`` say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from islo.types import AutoResumePolicy, LifecyclePolicy

from sandbox_kernel.errors import SpecError
from sandbox_kernel.sandboxes.capabilities import whole
from sandbox_kernel.sandboxes.islo.gateway_profiles import Profile
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.suggestions import check_keys

AUTO_RESUME = ("never", "on_activity")


@dataclass(frozen=True)
class Options:
    """What a spec's ``options`` may say. ``gateway_profile`` is the name or id of a profile that
    exists, which is left alone, or one to be made for the sandbox. Times are in seconds."""

    gateway_profile: str | Profile | None = None
    pause_after_idle: int | None = None
    """Seconds without a request after which Islo pauses it; by default ``lease_seconds``."""
    delete_after: int | None = None
    """Seconds after which Islo deletes the sandbox, it seems since its creation."""
    auto_resume: str = "never"
    """``on_activity``: Islo resumes a paused sandbox as soon as it is used, also by a kernel's
    tunnel that looks for it."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Options:
        check_keys(values, [field.name for field in fields(cls)], "`options` for 'islo'")
        taken = dict(values)
        profile = taken.get("gateway_profile")
        if isinstance(profile, Mapping):
            taken["gateway_profile"] = Profile.read(profile)
        elif profile is not None and (not isinstance(profile, str) or not profile):
            raise SpecError(
                f"options: gateway_profile is the name or id of a profile, or an object with its "
                f"rules, not {profile!r}."
            )
        for key in ("pause_after_idle", "delete_after"):
            value = taken.get(key)
            if value is not None and (type(value) is not int or not 0 < value < 10**9):
                raise SpecError(f"options: {key} takes whole seconds, not {value!r}.")
        if taken.get("auto_resume", AUTO_RESUME[0]) not in AUTO_RESUME:
            raise SpecError(
                f"options: auto_resume is 'never' or 'on_activity', not {taken['auto_resume']!r}."
            )
        return cls(**taken)


@dataclass(frozen=True)
class SandboxPlan:
    """A spec as a request to Islo. ``of`` refuses what Islo cannot enforce; it touches nothing."""

    profile: Profile | str
    """A gateway profile to make, or the name of one that exists."""
    fields: dict[str, Any]
    limits: dict[str, str]

    @classmethod
    def of(cls, spec: SandboxSpec, *, own_rules: bool) -> SandboxPlan:
        """``own_rules``: the profile holds ``spec.egress``; else it lets nothing out."""
        options = Options.read(spec.options)
        if options.gateway_profile is not None and (spec.egress.rules or spec.egress):
            raise SpecError(
                f"Sandbox {spec.name!r} was not created: egress and options.gateway_profile both "
                f"say what may get out. Give one of them."
            )
        own = Profile.of(spec.egress) if own_rules else Profile()
        profile = options.gateway_profile or own
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
        if cpus := whole(spec, "islo", "cpus", 1, "Islo counts in whole CPUs"):
            fields["vcpus"] = cpus
            limits["cpus"] = f"{cpus} (virtual CPUs)"
        if disk := whole(spec, "islo", "disk_mib", 1024, "Islo counts in GiB"):
            fields["disk_gb"] = disk
            limits["disk_mib"] = f"{spec.disk_mib} MiB (disk of the VM)"
        return cls(profile, fields, limits)
