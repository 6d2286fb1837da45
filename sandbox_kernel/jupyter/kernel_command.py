"""A kernel's command line and environment, and what its sandbox must show to run it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sandbox_kernel.errors import SpecError
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.local import environment
from sandbox_kernel.sandboxes.local.hidden_paths import contains, shown_with
from sandbox_kernel.spec import KernelConfiguration, SandboxSpec

_PASSED_ON = ("JPY_SESSION_NAME",)
"""Environment variables of the host that a kernel may see without being named in its spec."""


def guest_command(argv: Sequence[str], connection_file: str) -> list[str]:
    """The command line with a placeholder for the connection file: its path differs inside."""
    if not connection_file:
        return list(argv)
    paths = {connection_file, os.path.realpath(connection_file), os.path.abspath(connection_file)}
    return ["{connection_file}" if argument in paths else argument for argument in argv]


def guest_environment(
    env: Mapping[str, str], names: Iterable[str], spec: SandboxSpec
) -> dict[str, str]:
    """The kernel's environment: these variables of ``env``, and those of the spec. A variable that
    is a secret's holds its placeholder, or nothing at all."""
    secret = {one.name for one in spec.secrets}
    passed = {n: env[n] for n in (*names, *_PASSED_ON) if n in env and n not in secret}
    return {**passed, **spec.env}


def with_interpreter(argv: Sequence[str], spec: SandboxSpec) -> list[str]:
    """The command line, run by the interpreter that the spec names. Jupyter has turned a
    kernelspec's plain ``python`` into the interpreter of this process."""
    if spec.python and argv and argv[0] == sys.executable:
        return [spec.python, *argv[1:]]
    return list(argv)


def show_program(spec: SandboxSpec, argv: Sequence[str]) -> SandboxSpec:
    """The spec with what the kernel's program needs made readable: its environment if it has one,
    else hardly more than its file. SpecError if that would show what must stay hidden."""
    program = shutil.which(argv[0]) or argv[0] if argv else ""
    if not os.path.isabs(program):
        return spec
    if os.path.basename(program).startswith("python"):
        return spec if spec.python else replace(spec, python=program)
    return replace(spec, readable=(*spec.readable, *shown_with(program)))


def check_out_of_reach(
    configuration: KernelConfiguration,
    argv: Sequence[str],
    folder: str,
    setting: str = "mirror",
) -> None:
    """SpecError if the kernel's interpreter, which the host runs to describe it, is in a folder
    that ``setting`` lets the sandbox write. Hidden names are out of its reach."""
    if not load_backend(configuration.backend).capabilities.python:
        return
    from sandbox_kernel.workspace.export_guard import hidden_part  # lazy: start-up time

    python = show_program(configuration.spec, argv).python
    if python is None or os.path.dirname(python) == os.path.dirname(sys.executable):
        return
    top = os.path.realpath(folder)
    for path in environment.on_the_way(python):
        if contains(top, path) and not hidden_part(os.path.relpath(path, top)):
            raise SpecError(
                f"The kernel was not started: {setting} would let code in the sandbox write to "
                f"{top}, and the interpreter python={python!r} is in there and runs on the host, "
                f"too. Move its environment out of the folder or into a hidden one (.venv), or "
                f"leave {setting} out."
            )
