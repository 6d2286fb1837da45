"""``sandbox-kernel cp``."""

from __future__ import annotations

import argparse
import os

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import sandbox
from sandbox_kernel.cli.foreground import within
from sandbox_kernel.cli.formatting import note
from sandbox_kernel.cli.options import Commands, add_command, quota_of
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.untrusted_text import printable

_MOST_SKIPPED = 20


def add(commands: Commands) -> None:
    parser = add_command(commands, "cp", run, usage="NAME:PATH PATH | PATH NAME:PATH")
    parser.add_argument("source", metavar="SOURCE", help="NAME:PATH, or a path here")
    parser.add_argument("target", metavar="TARGET", help="NAME:PATH, or a path here")
    parser.add_flag("-f", "--force", help="replace a file that is here")
    parser.add_flag("--hidden", help="also names that begin with a dot")
    parser.add_timeout(3600.0)
    parser.add_quota()
    parser.add_which_backend()


def run(arguments: argparse.Namespace) -> None:
    """Copy files or folders into a sandbox, or out of it.

    One of the two is NAME:PATH, with a path in the sandbox (relative to /workspace). A copy into an
    existing folder keeps its own name there. Nothing on this host is overwritten without --force,
    and folders never are. A copy out of a sandbox appears when it is complete, without hidden
    files and links that lead out of it. A file here whose name has a colon is ./its:name.

    examples:
      sandbox-kernel cp kernel-1a2b3c4d:results.csv .
      sandbox-kernel cp work/demo.ipynb:/workspace/plots ./plots
      sandbox-kernel cp data.csv kernel-1a2b3c4d:
    """
    arguments.source, arguments.target = map(
        os.path.expanduser, (arguments.source, arguments.target)
    )
    source, target = split(arguments.source), split(arguments.target)
    if (source is None) == (target is None):
        arguments.parser.error("one of the two is NAME:PATH, and the other a path here")
    foreground.run(_copy(arguments, source, target))


def split(text: str) -> tuple[str, str] | None:
    """Name (or notebook) and path, if the text is NAME:PATH."""
    name, colon, path = text.partition(":")
    here = name.startswith(("/", ".", "~")) and not name.endswith(NOTEBOOK)
    return (name, path) if colon and name and not here else None


async def _copy(
    arguments: argparse.Namespace, source: tuple[str, str] | None, target: tuple[str, str] | None
) -> None:
    name, path = source or target or ("", "")
    async with sandbox(name, arguments.backend) as (_, handle):
        problem = (
            f"The copy from or to sandbox {handle.name!r} did not end within "
            f"{arguments.timeout:g} s. Give a longer --timeout."
        )
        async with within(arguments.timeout, problem):
            if source:
                await _out(handle, path, arguments)
            else:
                await _in(handle, arguments.source, path or ".")


async def _out(handle: SandboxHandle, path: str, arguments: argparse.Namespace) -> None:
    from sandbox_kernel.agents.copying import copy_out  # lazy: start-up time
    from sandbox_kernel.workspace.copy_out import CopyWriter

    receiver = CopyWriter(
        arguments.target,
        (path or handle.workdir).rstrip("/").rpartition("/")[2] or handle.name,
        force=arguments.force,
        hidden=arguments.hidden,
        quota=quota_of(arguments),
    )
    await copy_out(handle, path or ".", receiver)
    for left_out in receiver.skipped[:_MOST_SKIPPED]:
        note(f"Left out: {left_out}")
    if len(receiver.skipped) > _MOST_SKIPPED:
        note(f"Left out: {len(receiver.skipped) - _MOST_SKIPPED} more.")
    print(f"{printable(receiver.path)}: {receiver.files} files, {receiver.bytes} bytes")


async def _in(handle: SandboxHandle, source: str, path: str) -> None:
    from sandbox_kernel.agents.copying import copy_in  # lazy: start-up time

    files = await copy_in(handle, source, path)
    print(f"{handle.name}:{printable(path)}: {files} files")
