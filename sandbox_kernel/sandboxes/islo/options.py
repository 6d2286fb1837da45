"""What a spec's ``options`` may say to the backend 'islo'. Read before anything is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sandbox_kernel.errors import SpecError
from sandbox_kernel.sandboxes.islo.gateway_profiles import Profile
from sandbox_kernel.suggestions import check_keys

AUTO_RESUME = ("never", "on_activity")


@dataclass(frozen=True)
class Options:
    """``gateway_profile`` is the name or id of a profile that exists, which is left alone, or one
    to be made for the sandbox. Times are in seconds."""

    gateway_profile: str | Profile | None = None
    pause_after_idle: int | None = None
    """Islo pauses the sandbox after this many seconds without a request; the default is the
    spec's ``lease_seconds``."""
    delete_after: int | None = None
    """Islo deletes the sandbox after so long; as it seems, since its creation."""
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
