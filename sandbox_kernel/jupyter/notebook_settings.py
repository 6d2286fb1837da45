"""Settings in a notebook's own metadata, under ``sandbox_kernel``.

    {"metadata": {"sandbox_kernel": {"egress": ["data.example"], "memory_mib": 512}}}

A notebook may come from anywhere. So it may ask for less than its kernel grants, and never gets
more: what it asks for beyond that is left out, and the notebook says so, so that it can be opened
and read. Only ``notebook_may_widen``, which is not the notebook's, changes that. A value that is
wrong is an error of the start: nobody knows what restriction was meant.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sandbox_kernel.egress import ALLOW, EgressPolicy, EgressRule
from sandbox_kernel.errors import SpecError
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.spec import NOTEBOOK_SETTINGS, SETTINGS, KernelConfiguration
from sandbox_kernel.untrusted_text import printable

KEY = "sandbox_kernel"
MOST_BYTES = 64 * 1024 * 1024
_MOST_TOLD, _MOST_TEXT = 10, 80
_LIMITS = ("memory_mib", "cpus", "processes", "disk_mib")
_LESS_THAN_A_MOUNT = {"mount": ("none", "copy", "mount-ro", "mount")}


def with_notebook_settings(
    configuration: KernelConfiguration, notebook: str
) -> tuple[KernelConfiguration, list[str]]:
    """The configuration as this notebook narrows it, and what its user should know. Reads a file:
    call it in a thread. SpecError names the notebook and the setting that is wrong."""
    found, notice = _metadata(notebook)
    if not found:
        return configuration, [notice] if notice else []
    narrowing = _Narrowing(configuration, notebook)
    try:
        narrowing.read(found)
        return narrowing.result(), narrowing.notices
    except SpecError as error:
        raise SpecError(
            f"The kernel was not started: {notebook!r} has a wrong setting in its metadata, under "
            f"{KEY!r}. {printable(str(error))[:500]}"
        ) from None


def _metadata(notebook: str) -> tuple[dict[str, Any], str]:
    """What a notebook has under our key, and what its user should know if that is not known."""
    try:
        fd = os.open(notebook, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}, ""  # it is not there yet, or only its client can read it
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return {}, ""
    with open(fd, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        return {}, (
            f"The notebook is larger than {MOST_BYTES >> 20} MiB, so settings that it may have in "
            f"its metadata were not read."
        )
    if f'"{KEY}"'.encode() not in data:
        return {}, ""
    try:
        metadata = json.loads(data).get("metadata")
    except (ValueError, AttributeError, RecursionError):
        raise SpecError(
            f"The kernel was not started: {notebook!r} is no notebook that can be read, so the "
            f"settings in its metadata are not known."
        ) from None
    found = metadata.get(KEY) if isinstance(metadata, dict) else None
    if found is None:
        return {}, ""
    if not isinstance(found, dict):
        raise SpecError(
            f"The kernel was not started: the metadata of {notebook!r} has under {KEY!r} no object "
            f"with settings."
        )
    return found, ""


class _Narrowing:
    """What one notebook makes of a configuration."""

    def __init__(self, configuration: KernelConfiguration, notebook: str) -> None:
        self.notices: list[str] = []
        self._given = configuration
        self._may_widen = configuration.notebook_may_widen
        self._spec: dict[str, Any] = {}
        self._kernel: dict[str, Any] = {}
        self._left_out: list[str] = []

    def read(self, found: Mapping[str, Any]) -> None:
        take: Mapping[str, Callable[[Any], None]] = {"egress": self._egress, "files": self._files}
        for name, value in found.items():
            if name not in NOTEBOOK_SETTINGS:
                self._left_out.append(f"{_short(name)} (no notebook can set it)")
            elif value is not None:
                wanted = SETTINGS[name].read(value)
                take.get(name, lambda wanted, name=name: self._limit(name, wanted))(wanted)
        if self._left_out:
            more = len(self._left_out) - _MOST_TOLD
            listed = ", ".join(self._left_out[:_MOST_TOLD]) + (f", {more} more" if more > 0 else "")
            self.notices.append(
                f"This notebook's metadata asks for more than its kernel grants, and does not get "
                f"it: {listed}. Who runs this kernel can grant it in the kernel's settings."
            )

    def result(self) -> KernelConfiguration:
        if not self._spec and not self._kernel:
            return self._given
        # Spares are for kernels that are alike.
        return replace(
            self._given,
            spec=replace(self._given.spec, **self._spec),
            **{**self._kernel, "warm_spares": False, "pool_size": 0},
        )

    def _egress(self, wanted: EgressPolicy) -> None:
        granted = self._given.spec.egress
        if wanted.within is not None:
            raise SpecError("egress: a notebook has one set of rules, without 'within'.")
        if "egress" in self._may_widen:
            self._spec["egress"] = wanted
            return
        kept = [rule for rule in wanted.rules if not self._is_foreign_preset(rule)]
        self._left_out += [
            f"egress {_short(rule.host)}"
            for rule in wanted.rules
            if rule.action == ALLOW and not _may_be_granted(rule, granted)
        ]
        if wanted.default == ALLOW and not granted:
            self._left_out.append(f"egress default={ALLOW}")
        if wanted == granted or not granted:
            return
        self._spec["egress"] = EgressPolicy(tuple(kept), wanted.default, granted)

    def _is_foreign_preset(self, rule: EgressRule) -> bool:
        """A preset that the kernel itself does not use: a notebook has no program run for it."""
        if not rule.is_preset or any(r.host == rule.host for r in self._given.spec.egress.rules):
            return False
        if rule.action != ALLOW:
            raise SpecError(f"egress: it denies {rule.host}, which its kernel does not know.")
        return True

    def _limit(self, name: str, wanted: float) -> None:
        granted = getattr(self._given.spec, name)
        if granted is None:
            granted = load_backend(self._given.backend).usual_limit(name)
        if name in self._may_widen or (granted is not None and wanted <= granted):
            self._spec[name] = wanted
        else:
            most = "no limit that is known" if granted is None else f"{granted:g}"
            self._left_out.append(f"{name}={wanted:g} (its kernel has {most})")

    def _files(self, wanted: str) -> None:
        granted = self._given.files
        less = _LESS_THAN_A_MOUNT.get(granted, ("none", granted))
        if wanted in less or "files" in self._may_widen:
            if wanted != granted:
                self._kernel["files"] = wanted
        else:
            self._left_out.append(f"files={wanted} (its kernel has {granted})")


def _may_be_granted(rule: EgressRule, granted: EgressPolicy) -> bool:
    """Whether the kernel may allow what this rule of a notebook names. In doubt, yes: this is for a
    notice, and decides nothing."""
    if not granted:
        return False
    if rule.is_preset:
        return any(one.host == rule.host for one in granted.all_rules)
    if "*" in rule.host or rule.is_address or any(one.is_preset for one in granted.all_rules):
        return True
    return any(
        granted.decide(rule.host, port) == ALLOW
        or any(one.is_partial and one.concerns(rule.host, port) for one in granted.all_rules)
        for port in rule.ports or (443, 80, *(p for one in granted.all_rules for p in one.ports))
    )


def _short(text: object) -> str:
    plain = printable(str(text)).replace("\n", "\\n")
    return plain if len(plain) <= _MOST_TEXT else plain[: _MOST_TEXT - 3] + "..."
