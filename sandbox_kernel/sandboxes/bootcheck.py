"""Can a microVM boot here? Found out by booting one, and remembered.

The backends that run microVMs call ``boot_check`` from their ``diagnose``. What decides is what
KVM really does: a /dev/kvm that is there and can be opened may still not run a guest.
"""

from __future__ import annotations

import asyncio
import grp
import json
import os
import platform
import stat
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.sandboxes.base import Diagnosis
from sandbox_kernel.untrusted_text import printable

KVM = Path("/dev/kvm")
FAILURE_KEPT = 3600.0
"""Seconds that a failure is believed; a success is, until one of its conditions changes."""
_MAX_REASON = 1500

_OTHER = (
    "Use the backend 'local' (sandbox-kernel install local) or a hosted one if you cannot "
    "change the machine."
)
_NO_KVM = (
    "Turn on virtualization in the firmware and load the module (`sudo modprobe kvm_intel` or "
    "`kvm_amd`); in a virtual machine or container, its host must offer nested virtualization and "
    f"pass /dev/kvm in. {_OTHER}"
)


def boot_timeout() -> float:
    """Seconds that a boot may take in a check: ``$SANDBOX_KERNEL_BOOT_TIMEOUT``, else 60."""
    return float(os.environ.get("SANDBOX_KERNEL_BOOT_TIMEOUT", "60"))


def kvm_problem(kvm: Path = KVM) -> Diagnosis | None:
    """A problem with /dev/kvm that can be seen without booting; None if there is none."""
    try:
        found = kvm.stat()
    except FileNotFoundError:
        return Diagnosis(False, f"there is no {kvm}, so no microVM can run", _NO_KVM)
    except OSError as error:
        return Diagnosis(False, f"{kvm} cannot be looked at ({error.strerror})", _OTHER)
    if not stat.S_ISCHR(found.st_mode):
        return Diagnosis(False, f"{kvm} is no device, so no microVM can run", _OTHER)
    try:
        os.close(os.open(kvm, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError:
        group = _group(found.st_gid)
        what = f"this user may not use {kvm} (mode {stat.S_IMODE(found.st_mode):o}, group {group})"
        fix = f"`sudo usermod -aG {group} $USER`, then log in again. "
        return Diagnosis(False, what, fix + _OTHER)
    except OSError as error:
        what = f"{kvm} is there, but cannot be opened ({error.strerror})"
        fix = "Load the module of your processor: `sudo modprobe kvm_intel` or `kvm_amd`. "
        return Diagnosis(False, what, fix + _OTHER)
    return None


async def boot_check(
    backend: str, version: str, boot: Callable[[], Awaitable[None]], *, timeout: float
) -> Diagnosis:
    """The line of ``doctor`` on whether VMs boot. Never raises.

    ``boot`` boots a tiny VM and runs a command in it, or raises; it must leave nothing behind,
    also when it is cancelled, which happens after ``timeout`` seconds. Its outcome is kept on
    disk for this kernel, this ``version`` of the backend's package and this /dev/kvm.
    """
    problem = kvm_problem()
    if problem is not None:
        return problem
    conditions = _conditions(version)
    if (known := _remembered(backend, conditions)) is not None:
        return known
    began = time.monotonic()
    try:
        await asyncio.wait_for(boot(), timeout)
    except asyncio.TimeoutError:
        found = _failed(backend, f"it was not up after {timeout:g} s")
    except Exception as error:  # noqa: BLE001  (an SDK may raise anything, and doctor goes on)
        found = _failed(backend, str(error) or type(error).__name__)
    else:
        found = Diagnosis(True, f"a microVM boots ({time.monotonic() - began:.1f} s)")
    _remember(backend, conditions, found)
    return found


def _failed(backend: str, why: str) -> Diagnosis:
    return Diagnosis(
        False,
        f"/dev/kvm is there, but a microVM of {backend} does not boot: "
        f"{printable(why)[:_MAX_REASON]}",
        "If this machine is itself virtual, its KVM may be unable to run a guest kernel: ask for "
        f"one with real nested virtualization. {_OTHER} The result is kept for an hour; "
        f"delete {_path(backend)} to try again at once.",
    )


def _conditions(version: str) -> dict[str, Any]:
    found = KVM.stat()
    return {
        "kernel": f"{platform.release()} {platform.machine()}",
        "package": version,
        "kvm": [found.st_rdev, found.st_mode, found.st_uid, found.st_gid],
        "user": [os.getuid(), sorted(os.getgroups())],
    }


def _path(backend: str) -> Path:
    return private_dir(data_dir() / "bootchecks") / f"{backend}.json"


def _remembered(backend: str, conditions: dict[str, Any]) -> Diagnosis | None:
    try:
        kept = json.loads(_path(backend).read_text())
        age = time.time() - kept["time"]
        if kept["conditions"] != conditions or age < 0 or (not kept["ok"] and age > FAILURE_KEPT):
            return None
        return Diagnosis(bool(kept["ok"]), str(kept["what"]), str(kept["fix"]))
    except (OSError, SandboxError, ValueError, KeyError, TypeError):
        return None  # not there, or not readable: the caller finds out again


def _remember(backend: str, conditions: dict[str, Any], found: Diagnosis) -> None:
    kept = {"time": time.time(), "conditions": conditions, **asdict(found)}
    write_atomically(_path(backend), json.dumps(kept), lasting=False)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
