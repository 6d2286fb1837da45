"""Puts ipykernel into a sandbox whose image lacks it, once."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.errors import (
    ExecFailed,
    KernelLaunchFailed,
    SandboxError,
    SandboxGone,
    SandboxTimeout,
    SpecError,
)
from sandbox_kernel.guest.warm import PACKAGES_VARIABLE
from sandbox_kernel.images.target import Target
from sandbox_kernel.images.wheels import KERNEL, packages_for, unmet
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.untrusted_text import printable

Log = logging.Logger | logging.LoggerAdapter[Any]

FOLDERS = ("/opt/sandbox-kernel", "~/.sandbox-kernel", "/tmp/.sandbox-kernel-packages")  # noqa: S108
"""Where packages go in a sandbox: into the first of these that can be written to."""

_PROBE_TIMEOUT, _MARK_TIMEOUT = 120.0, 60.0
_MAX_ANSWER, _MAX_ITEMS = 512 * 1024, 5000
_MARK = "sandbox-kernel-probe:"
_COMPLETE = ".complete"
"""Written last: an interrupted upload does not look complete."""
_PATH = re.compile(r"/[\w./+@ -]{1,200}")
_INSTALLED = re.compile(
    r"([A-Za-z0-9._]{1,100})-([A-Za-z0-9.+!]{1,50})(-py[\d.]+)?\.(dist|egg)-info"
)
_LIBC = re.compile(r"glibc (\d{1,3})\.(\d{1,3})|musl\b.*?Version (\d{1,3})\.(\d{1,3})", re.DOTALL)

# Few imports, because Python starts slowly in some sandboxes. Any Python 3 runs it.
_PROBE = r"""
import json, os, sys
from importlib.util import find_spec
def libc():
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        import glob, subprocess
        for loader in sorted(glob.glob("/lib/ld-musl-*.so.1")):
            run = subprocess.Popen([loader], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            return run.communicate()[1].decode(errors="replace")[:500]
def names(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []
facts = dict(
    name=sys.implementation.name, version=sys.version_info[:2], is64=sys.maxsize > 2**32,
    threaded="t" in getattr(sys, "abiflags", ""), machine=os.uname().machine,
    has=all(find_spec(name) for name in ("ipykernel", "ipykernel_launcher", "zmq")),
)
if not facts["has"]:
    complete, writable = [], None
    for root in map(os.path.expanduser, sys.argv[2:]):
        complete += [
            os.path.join(root, name) for name in names(root)
            if os.path.exists(os.path.join(root, name, ".complete"))
        ]
        if writable is None:
            try:
                os.makedirs(root, exist_ok=True)
            except OSError:
                continue
            writable = root if os.access(root, os.W_OK | os.X_OK) else None
    installed = [n for path in sys.path for n in names(path or ".") if n.endswith("-info")]
    facts.update(libc=libc(), complete=complete, writable=writable, installed=installed)
print("\n" + sys.argv[1] + json.dumps(facts))
"""
_WRITE_MARK = "import sys; open(sys.argv[1], 'w').close()"


@dataclass(frozen=True)
class _Found:
    """The probe's answer, validated: untrusted code gives it."""

    target: Target
    complete: tuple[str, ...]
    """Folders of packages from earlier uploads."""
    writable: str | None
    """The first of FOLDERS that can be written to, without ``~``."""
    installed: Mapping[str, str]
    """Packages of the image that are known by name and version."""


async def provide(handle: SandboxHandle, log: Log) -> dict[str, str]:
    """Make sure that ``handle.python`` can run ipykernel; gives the environment that the agent
    and its kernels need for it. Called before the agent starts.

    Does nothing to an image that has ipykernel. KernelLaunchFailed if no packages fit.
    """
    try:
        found = await _probe(handle)
        if found is None:
            return {}
        folder = f"packages-{found.target.key(KERNEL)}"
        for path in found.complete:
            if path.endswith(f"/{folder}"):
                return {PACKAGES_VARIABLE: path}
        if found.writable is None:
            raise SandboxError(
                f"none of {', '.join(FOLDERS)} is writable, so the packages have no place to go. "
                f"Use an image with one of these folders, or with ipykernel."
            )
        log.info("The image of sandbox %s lacks ipykernel; uploading it.", handle.name)
        packages = await asyncio.to_thread(
            packages_for,
            found.target,
            lean=True,
            note=lambda line: log.info("Sandbox %s: %s", handle.name, line),
        )
        for conflict in unmet(packages, found.target, found.installed):
            log.warning(
                "The image of sandbox %s has %s. The image's version is used, and the kernel may "
                "fail. Update it in the image, or build one with `sandbox-kernel image build`.",
                handle.name,
                conflict,
            )
        target = f"{found.writable}/{folder}"
        await handle.upload(str(packages), target)
        python = handle.python or "python3"
        mark = Command([python, "-I", "-S", "-c", _WRITE_MARK, f"{target}/{_COMPLETE}"])
        marked = await handle.run_command(mark, timeout=_MARK_TIMEOUT)
        if not marked.ok:
            said = printable(marked.output[-500:])
            raise ExecFailed(f"marking {target} as complete failed: {said}")
    except (SandboxGone, SandboxTimeout):
        raise
    except SandboxError as error:
        raise KernelLaunchFailed(
            f"No kernel can be started in sandbox {handle.name!r} by {handle.python}: {error}"
        ) from error
    return {PACKAGES_VARIABLE: target}


async def _probe(handle: SandboxHandle) -> _Found | None:
    """Ask the interpreter what it is; None if it has ipykernel."""
    python = handle.python or "python3"
    try:
        probe = Command([python, "-c", _PROBE, _MARK, *FOLDERS], cwd="/")
        result = await handle.run_command(probe, timeout=_PROBE_TIMEOUT, max_output=_MAX_ANSWER)
    except ExecFailed as error:
        raise ExecFailed(
            f"it cannot be run ({error}). The image has no Python there, or is made for another "
            f"machine. Use an image with Python 3.9 or newer; `sandbox-kernel image build` makes "
            f"one."
        ) from error
    _, mark, answer = result.stdout.rpartition(f"\n{_MARK}")
    if not mark or not result.ok:
        code, said = result.exit_code, printable(result.output[-500:]).strip()
        hint = " The image has no Python there. Use one with Python 3.9 or newer."
        what = f"it ended with exit code {code} and said: {said!r}."
        raise SandboxError(what + (hint if code in (126, 127) else ""))
    try:
        facts = json.loads(answer)
        return None if facts["has"] is True else _understood(facts)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        raise SandboxError(f"its answer to the probe makes no sense ({error!r})") from None


def _understood(facts: dict[str, Any]) -> _Found:
    name, machine, libc = str(facts["name"]), str(facts["machine"])[:50], str(facts["libc"])
    if name != "cpython" or facts["is64"] is not True:
        raise SpecError(
            f"it is {printable(name[:50])}{'' if facts['is64'] is True else ' for 32 bits'}, for "
            f"which there are no packages here. Use an image with CPython for 64 bits, or one "
            f"that has ipykernel."
        )
    major, minor = facts["version"]
    version = _LIBC.search(libc[:500])
    numbers = [int(n) for n in version.groups() if n is not None] if version else [0, 0]
    writable = facts["writable"]
    return _Found(
        target=Target(
            python=(int(major), int(minor)),
            machine=printable(machine),
            libc="unknown" if not version else "glibc" if version.group(1) else "musl",
            libc_version=(numbers[0], numbers[1]),
            free_threaded=facts["threaded"] is True,
        ),
        complete=tuple(p for p in facts["complete"][:_MAX_ITEMS] if _safe(p)),
        writable=writable if _safe(writable) else None,
        installed={
            match.group(1): match.group(2)
            for match in map(_INSTALLED.fullmatch, map(str, facts["installed"][:_MAX_ITEMS]))
            if match
        },
    )


def _safe(path: object) -> bool:
    return isinstance(path, str) and bool(_PATH.fullmatch(path)) and ".." not in path.split("/")
