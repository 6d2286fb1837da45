"""``sandbox-kernel cp``."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from sandbox_kernel import audit
from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import sandbox
from sandbox_kernel.cli.foreground import within
from sandbox_kernel.cli.formatting import note
from sandbox_kernel.cli.options import Commands, add_command, quota_of
from sandbox_kernel.errors import ExecFailed
from sandbox_kernel.guest import copy_stream
from sandbox_kernel.sandboxes.base import ExecStream, SandboxHandle
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.untrusted_text import printable

PATIENCE = 60.0
"""Seconds without a byte after which the copy fails."""
_MAX_WORDS = 4096
_MOST_SKIPPED = 20
T = TypeVar("T")


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
    from sandbox_kernel.workspace.copy_out import CopyWriter  # lazy: start-up time

    receiver = CopyWriter(
        arguments.target,
        (path or handle.workdir).rstrip("/").rpartition("/")[2] or handle.name,
        force=arguments.force,
        hidden=arguments.hidden,
        quota=quota_of(arguments),
    )
    try:
        stream = await handle.open_command(_command(handle, "out", path or "."))
        async with stream:
            while True:
                data = await _in_time(handle, stream.read())
                if not data:
                    raise ExecFailed(
                        f"Sandbox {handle.name!r} stopped sending files: "
                        f"{await _last_output(handle, stream)}"
                    )
                if await asyncio.to_thread(receiver.feed, data):
                    break
    finally:
        await asyncio.shield(asyncio.to_thread(receiver.close))
    for left_out in receiver.skipped[:_MOST_SKIPPED]:
        note(f"Left out: {left_out}")
    if len(receiver.skipped) > _MOST_SKIPPED:
        note(f"Left out: {len(receiver.skipped) - _MOST_SKIPPED} more.")
    print(f"{printable(receiver.path)}: {receiver.files} files, {receiver.bytes} bytes")


async def _in(handle: SandboxHandle, source: str, path: str) -> None:
    path_here = await asyncio.to_thread(Path(source).resolve, strict=True)
    stream = await handle.open_command(_command(handle, "in", path, path_here.name))
    async with stream:
        pieces = copy_stream.entries(str(path_here))
        try:
            while (piece := await asyncio.to_thread(next, pieces, b"")) != b"":
                await _in_time(handle, stream.write(piece))
            await _in_time(handle, stream.close_stdin())
        except (BrokenPipeError, ConnectionError):
            pass  # the other side says why it stopped reading
        said = await _last_output(handle, stream)
        code = await _in_time(handle, stream.wait())
    if code != 0:
        raise ExecFailed(f"{source} was not copied into sandbox {handle.name!r}: {said}")
    print(f"{handle.name}:{printable(path)}: {said} files")


def _command(handle: SandboxHandle, way: str, path: str, *names: str) -> Command:
    audit.note(handle, "copied", way=way, path=path)
    program = Path(copy_stream.__file__).read_text(encoding="utf-8")
    return Command([handle.python or "python3", "-I", "-c", program, way, path, *names])


async def _last_output(handle: SandboxHandle, stream: ExecStream) -> str:
    """The end of its output, on both streams."""
    said = bytearray()
    for read in (stream.read, stream.read_stderr):
        while data := await _in_time(handle, read()):
            said += data[: max(0, _MAX_WORDS - len(said))]
    return printable(said.decode(errors="replace")).strip()[-500:]


async def _in_time(handle: SandboxHandle, doing: Awaitable[T]) -> T:
    problem = f"Sandbox {handle.name!r} has neither sent nor accepted a byte for {PATIENCE:g} s."
    async with within(PATIENCE, problem):
        return await doing
