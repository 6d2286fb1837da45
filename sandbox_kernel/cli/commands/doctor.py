"""``sandbox-kernel doctor``."""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.formatting import print_json
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.errors import SandboxError, SandboxUnavailable
from sandbox_kernel.sandboxes.backends import backend_names, load_backend, no_backend
from sandbox_kernel.sandboxes.base import Diagnosis
from sandbox_kernel.spec import DEFAULT_BACKEND
from sandbox_kernel.untrusted_text import printable

_TIMEOUT = 120.0
_MARKS = {True: "v", False: "x", None: "!"}


def add(commands: Commands) -> None:
    parser = add_command(commands, "doctor", run)
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="default: all")
    parser.add_flag("--profile", help="show where the time of a kernel's start goes")
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Check which backends work here, by trying them.

    Marks: v works, x does not, ! works with a remark; below it, what to do. The exit code is 0 if
    the named backends work; without names, all are shown and 'local' decides. With --json: a list
    of objects with the keys backend, ok, checks; each check has ok (true, false, or null for a
    remark), what, fix. With --profile, kernels of the named backends (default: local) are started
    and restarted, and a timeline of each is shown.

    examples:
      sandbox-kernel doctor
      sandbox-kernel doctor local
      sandbox-kernel doctor --json
      sandbox-kernel doctor --profile local
    """
    from sandbox_kernel.jupyter.kernelspec import list_kernelspecs  # lazy: start-up time

    unknown = sorted(set(arguments.backends) - set(backend_names()))
    if unknown:
        raise no_backend(unknown[0])
    if arguments.profile:
        return _profile(arguments.backends or [DEFAULT_BACKEND], arguments.json)
    asked = arguments.backends or backend_names()
    found = dict(zip(asked, foreground.run(_diagnose_all(asked)), strict=True))
    works = {backend: all(check.ok is not False for check in found[backend]) for backend in asked}
    if arguments.json:
        checks = {name: [asdict(check) for check in found[name]] for name in asked}
        print_json([{"backend": b, "ok": works[b], "checks": checks[b]} for b in asked])
    else:
        for backend in asked:
            print(f"{backend}: {'works' if works[backend] else 'does not work here'}")
            for check in found[backend]:
                _print(check)
        for spec in list_kernelspecs():
            if spec.outdated:
                _print(Diagnosis(None, f"kernel {spec.name}: outdated", spec.advice))
    needed = arguments.backends or [DEFAULT_BACKEND]
    return 0 if all(works.get(backend, False) for backend in needed) else 1


def _profile(backends: Sequence[str], as_json: bool) -> int:
    from sandbox_kernel.jupyter.trial_start import profile_kernel  # lazy: start-up time

    found = {backend: foreground.run(profile_kernel(backend)) for backend in backends}
    if as_json:
        print_json(
            {
                backend: {
                    name: [{"step": step, "milliseconds": round(at, 1)} for step, at in timeline]
                    for name, timeline in timelines.items()
                }
                for backend, timelines in found.items()
            }
        )
        return 0
    for backend, timelines in found.items():
        for name, timeline in timelines.items():
            print(f"{backend}, {name}: milliseconds until")
            for step, at in timeline:
                print(f"  {at:7.0f}  {step}")
    return 0


async def _diagnose_all(backends: Sequence[str]) -> list[Sequence[Diagnosis]]:
    return await asyncio.gather(*map(diagnose, backends))


def _print(check: Diagnosis) -> None:
    print(f"  {_MARKS[check.ok]} {_indented(check.what)}")
    if check.fix:
        print(f"      {_indented(check.fix)}")


def _indented(text: str) -> str:
    return printable(text.strip()).replace("\n", "\n      ")


async def diagnose(backend: str) -> Sequence[Diagnosis]:
    """What ``doctor`` says about one backend. Problems are results, not errors."""
    try:
        client = load_backend(backend)
    except SandboxUnavailable as error:
        fix = f"pip install 'sandbox-kernel[{backend}]'"
        return [Diagnosis(False, f"its SDK cannot be imported: {error.__cause__ or error}", fix)]
    except SandboxError as error:
        return [Diagnosis(False, str(error))]
    try:
        checks = await asyncio.wait_for(client.diagnose(), _TIMEOUT)
    except TimeoutError:
        return [Diagnosis(False, f"it did not answer within {_TIMEOUT:g} s", "Try again later.")]
    except (SandboxError, OSError) as error:
        return [Diagnosis(False, f"the check itself failed: {error}")]
    finally:
        await client.close()
    if backend == DEFAULT_BACKEND and all(check.ok is not False for check in checks):
        # Kernels of other backends cost money, or minutes.
        checks = [*checks, await _try_kernel(backend)]
    return checks or [Diagnosis(None, "nothing to check")]


async def _try_kernel(backend: str) -> Diagnosis:
    try:
        from sandbox_kernel.jupyter.trial_start import try_kernel  # lazy: start-up time

        problem = await asyncio.wait_for(try_kernel(backend), _TIMEOUT)
    except TimeoutError:
        problem = f"it did not answer within {_TIMEOUT:g} s"
    except Exception as error:  # noqa: BLE001  (an import that fails is a finding, too)
        problem = f"{type(error).__name__}: {error}"
    if problem:
        python = f"{sys.executable} (Python {platform.python_version()})"
        fix = f"The interpreter is {python}; `sandbox-kernel --debug doctor` logs more."
        return Diagnosis(False, f"no kernel can be started: {problem}", fix)
    return Diagnosis(True, "a kernel starts, and runs a cell")
