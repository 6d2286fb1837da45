"""The guest program as jails see it: a copy, compiled for their interpreter.

A jail cannot write bytecode next to what it is shown, and an installer may not have either, so
without this every start would compile the agent again. The copy also keeps what a running jail
imports later the same as what it began with, whatever happens to the installed package.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import tempfile
from pathlib import Path

from sandbox_kernel import guest_program
from sandbox_kernel.host_programs import run_program
from sandbox_kernel.paths import data_dir, private_dir

_log = logging.getLogger(__name__)

_COMPILE_TIMEOUT = 60.0


def compiled_guest(python: str, version: tuple[int, ...], shown_at: str) -> Path:
    """The folder to show at ``shown_at`` in a jail that runs the interpreter ``python``."""
    cache = private_dir(data_dir() / "cache")
    folder = _compiled(python, version, shown_at, cache)
    if not folder.is_dir():  # somebody has emptied the cache
        _compiled.cache_clear()
        folder = _compiled(python, version, shown_at, cache)
    return folder


@functools.cache
def _compiled(python: str, version: tuple[int, ...], shown_at: str, cache: Path) -> Path:
    sources = guest_program.sources()
    digest = hashlib.sha256(repr(version).encode())
    for path, content in sources.items():
        digest.update(f"{path} {len(content)}\n".encode() + content)
    folder = cache / f"guest-{digest.hexdigest()[:24]}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=cache, prefix=".guest-") as temporary:
        made = Path(temporary, "guest")
        for path, content in sources.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_bytes(content)
        command = [python, "-I", "-S", "-m", "compileall", "-q", "-d", shown_at]
        command += ["--invalidation-mode", "unchecked-hash", str(made)]
        result = run_program(command, _COMPILE_TIMEOUT, env={})
        if result.returncode:
            # It works without bytecode, too, only slower.
            _log.warning("the guest program was not compiled: %s", result.stdout[-500:])
        made.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first
                raise
    return folder
