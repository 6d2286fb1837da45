"""``sandbox-kernel run``: a command in a sandbox of its own, which is gone afterwards."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import shlex

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.commands.exec_ import positive
from sandbox_kernel.cli.commands.shell import on_terminal, terminal_environment
from sandbox_kernel.cli.parser import Commands, add_command, add_spec_options, spec_values
from sandbox_kernel.cli.streams import Session
from sandbox_kernel.cli.text import note
from sandbox_kernel.errors import ExecFailed, SandboxError
from sandbox_kernel.jupyter.configuration import KernelConfiguration, read_configuration
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.spec import ENV_PREFIX, NOTEBOOK, SandboxSpec

INTERRUPT_GRACE = 3.0
_WHY_TIMEOUT = 5.0
_WORKSPACE, _VOLUME = ENV_PREFIX + "WORKSPACE", ENV_PREFIX + "VOLUME"


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "run",
        run,
        "run a command in a sandbox of its own, which is gone afterwards",
        details="Streams and\nexit code are as with `exec`. It sees none of your files but those "
        "in --readable. Ctrl-C\ninterrupts the command, and removes the sandbox after "
        f"{INTERRUPT_GRACE:g} s at the latest.",
        usage="[options] [--] CMD [ARGS...]",
        examples=(
            "run -- python -c 'import os; print(os.listdir(\"/\"))'",
            "run --memory-mib 256 --timeout 60 python - < untrusted.py",
            "run --tty -- bash",
        ),
        takes_command=True,
        bare=True,
    )
    parser.add_argument("--backend", metavar="BACKEND", help="default: local")
    parser.add_argument("--timeout", type=positive, metavar="SECONDS", help="kill it after so long")
    parser.add_argument("--cwd", metavar="FOLDER", help="in the sandbox (default: /workspace)")
    parser.add_argument("-t", "--tty", action="store_true", help="with a terminal, as `shell`")
    parser.set_defaults(reads_settings=True)
    add_spec_options(parser, volume=True)


def run(arguments: argparse.Namespace) -> int:
    configuration = configured(arguments, {}, f"run-{secrets.token_hex(4)}")

    async def work(session: Session) -> int:
        return await _run_once(session, configuration, arguments)

    if arguments.tty:
        return on_terminal(work)
    session = Session(interrupt_grace=INTERRUPT_GRACE)
    return foreground.run(work(session), on_signal=session.on_signal)


async def _run_once(
    session: Session, configuration: KernelConfiguration, arguments: argparse.Namespace
) -> int:
    client = load_backend(configuration.backend)
    try:
        handle = await client.create(configuration.spec)
        try:
            code = await session.exec(
                handle,
                arguments.command,
                env=terminal_environment() if arguments.tty else None,
                cwd=arguments.cwd,
                timeout=arguments.timeout,
                terminal=arguments.tty,
            )
            if code:
                await _tell_why(handle)
                _tell_unseen(arguments, configuration.spec)
            return code
        except ExecFailed:
            _tell_unseen(arguments, configuration.spec)
            raise
        finally:
            await asyncio.shield(client.remove(handle.name))
    finally:
        await client.close()


async def _tell_why(handle: SandboxHandle) -> None:
    """An exit code does not say that the sandbox itself has killed something."""
    with contextlib.suppress(
        SandboxError, asyncio.TimeoutError
    ):  # the code that it ended with is what counts
        info = await asyncio.wait_for(handle.info(), _WHY_TIMEOUT)
        if info.oom_kills:
            why = info.last_kill or "out of memory"
            most = info.limits.get("memory_mib", "")
            note(
                f"Something in the sandbox was killed for want of memory ({why}). The limit is "
                f"{most}; give more with --memory-mib."
            )
        elif info.last_kill:
            note(f"The sandbox has killed something: {info.last_kill}.")


def _tell_unseen(arguments: argparse.Namespace, spec: SandboxSpec) -> None:
    """A command that failed may have missed a file that lies here."""
    if spec.workspace or arguments.cwd:
        return  # there may be one of that name
    for word in arguments.command:
        if not os.path.isabs(word) and os.path.isfile(word):
            path = os.path.abspath(word)
            note(
                f"{word!r} lies here, in a folder that the sandbox does not see. Show it with "
                f"--readable {shlex.quote(path)}, and name it by that path."
            )
            return


def configured(
    arguments: argparse.Namespace, config: dict[str, object], default_name: str
) -> KernelConfiguration:
    """The settings in force for a new sandbox: options win over the environment, which wins over
    ``config``."""
    options = spec_values(arguments)
    if arguments.backend:
        options["backend"] = arguments.backend
    overridden = {ENV_PREFIX + key.upper() for key in options}
    environ = {name: value for name, value in os.environ.items() if name not in overridden}
    if environ.get(_VOLUME) and "workspace" not in options:
        environ[_WORKSPACE] = environ[_VOLUME]
    elif environ.get(_WORKSPACE, NOTEBOOK).endswith(NOTEBOOK) is False:
        note(f"{_WORKSPACE} is called {_VOLUME} here, since a saved workspace is something else.")
    return read_configuration(
        config, options, default_name=default_name, environ=environ, where="the command line"
    )
