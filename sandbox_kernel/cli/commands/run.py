"""``sandbox-kernel run``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.commands import run_notebook
from sandbox_kernel.cli.commands.exec_ import on_terminal, terminal_environment
from sandbox_kernel.cli.formatting import note
from sandbox_kernel.cli.options import Commands, add_command, configured
from sandbox_kernel.cli.streams import AttachedCommand, terminal_size
from sandbox_kernel.errors import ExecFailed, SandboxError
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.sandboxes.capabilities import EgressWay
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.spec import KernelConfiguration, SandboxSpec

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.kernels import SandboxedKernel

_log = logging.getLogger(__name__)
INTERRUPT_GRACE = 3.0
_WHY_TIMEOUT = 5.0


def add(commands: Commands) -> None:
    usage = (
        "[options] [--] CMD [ARGS...]\n       sandbox-kernel run [options] NOTEBOOK [NOTEBOOK...]"
    )
    parser = add_command(commands, "run", run, usage=usage, takes_command=True, bare=True)
    parser.add_timeout()
    parser.add_argument("--cwd", metavar="FOLDER", help="in the sandbox (default: /workspace)")
    parser.add_flag("-t", "--tty", help="with a terminal, as `shell`")
    run_notebook.add_options(parser)
    parser.add_sandbox_settings()


def run(arguments: argparse.Namespace) -> int:
    """Run a command, or a notebook, in a sandbox of its own, which is removed afterwards.

    A command: streams and exit code are as with `exec`. The command sees none of your files but
    those in --readable; with --files mount-ro (or mount), /workspace is this folder. Ctrl-C
    interrupts it, and removes the sandbox 3 s later at the latest.

    A notebook (*.ipynb): runs from its first cell to its last, and is written to NAME.run.ipynb, or
    where --output says, as far as it came, whatever happens. With --files, the kernel sees the
    notebook's folder. --timeout is for each cell. The failed cell comes last on stderr.

    Exit codes of notebooks: 0 all passed, 1 the sandbox failed, 2 wrong usage or no notebook,
    3 a cell failed, 4 out of time, 5 the kernel died, 130 Ctrl-C. Of several notebooks, the first
    that did not pass decides.

    examples:
      sandbox-kernel run -- python -c 'import os; print(os.listdir("/"))'
      sandbox-kernel run --memory-mib 256 --timeout 60 python - < untrusted.py
      sandbox-kernel run --tty -- bash
      sandbox-kernel run analysis.ipynb -p year 2026 --files copy --output done.ipynb
      sandbox-kernel run reports/*.ipynb --jobs 4 --output done/ --deadline 3600
    """
    if arguments.notebooks:
        return run_notebook.run(arguments)
    configuration = configured(arguments, {}, f"run-{secrets.token_hex(4)}")
    if configuration.files != "none":
        from sandbox_kernel.jupyter.file_plan import with_folder  # lazy: start-up time

        configuration = with_folder(configuration)

    async def work(attached: AttachedCommand) -> int:
        return await _run_once(attached, configuration, arguments)

    if arguments.tty:
        return on_terminal(work)
    attached = AttachedCommand(interrupt_grace=INTERRUPT_GRACE)
    return foreground.run(work(attached), on_signal=attached.on_signal)


async def _run_once(
    attached: AttachedCommand, configuration: KernelConfiguration, arguments: argparse.Namespace
) -> int:
    client = load_backend(configuration.backend)
    try:
        async with _sandbox(client, configuration.spec) as (handle, variables):
            env, size = (terminal_environment(), terminal_size()) if arguments.tty else ({}, None)
            command = Command(arguments.command, {**env, **variables}, arguments.cwd, tty=size)
            try:
                code = await attached.exec(handle, command, timeout=arguments.timeout)
            except ExecFailed:
                _hint_at_hidden_file(arguments, configuration.spec)
                raise
            if code:
                await _explain_kill(handle)
                _hint_at_hidden_file(arguments, configuration.spec)
            return code
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _sandbox(
    client: SandboxClient, spec: SandboxSpec
) -> AsyncIterator[tuple[SandboxHandle, Mapping[str, str]]]:
    """A sandbox for one command, and variables for that; with an agent if that must carry the
    command's connections."""
    way = client.capabilities.egress_way(spec.egress)
    if way is EgressWay.GATEWAY or client.capabilities.puts_in_secrets(spec):
        from sandbox_kernel.kernels import SandboxedKernel  # lazy: start-up time

        kernel = await SandboxedKernel.create(client, spec, _log)
        try:
            yield kernel.handle, kernel.exposed_variables()
        finally:
            _tell_denials(kernel)
            await asyncio.shield(kernel.remove())
    else:
        handle = await client.create(spec)
        try:
            yield handle, {}
        finally:
            await asyncio.shield(client.remove(handle.name))


def _tell_denials(kernel: SandboxedKernel) -> None:
    """What the rules denied to the command, whatever it said itself."""
    from sandbox_kernel.jupyter.denial_lines import denial_lines  # lazy: start-up time

    if kernel.way_out is not None:
        denials = kernel.way_out.decisions.unseen
        for line in denial_lines(denials, "", "--egress"):
            note(line)


async def _explain_kill(handle: SandboxHandle) -> None:
    """An exit code does not say that the sandbox itself has killed something."""
    with contextlib.suppress(SandboxError, TimeoutError):  # the exit code is what counts
        info = await asyncio.wait_for(handle.info(), _WHY_TIMEOUT)
        if info.oom_kills:
            why = info.last_kill or "out of memory"
            most = info.limits.get("memory_mib", "")
            note(
                f"A process in sandbox {handle.name!r} was killed, out of memory ({why}). The "
                f"limit is {most}; raise it with --memory-mib."
            )
        elif info.last_kill:
            note(f"Sandbox {handle.name!r} killed a process: {info.last_kill}.")


def _hint_at_hidden_file(arguments: argparse.Namespace, spec: SandboxSpec) -> None:
    """A command that failed may have missed a file of this folder."""
    if spec.volume or spec.folder or arguments.cwd:
        return  # there may be one of that name
    for word in arguments.command:
        if not os.path.isabs(word) and os.path.isfile(word):
            path = os.path.abspath(word)
            note(
                f"{word!r} is a file here, in a folder that the sandbox does not see. Show the "
                f"folder with --files mount-ro, or the file alone with "
                f"--readable {shlex.quote(path)}, and name it by that path."
            )
            return
