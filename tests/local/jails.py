"""Running real jails in tests, as this user and, where this user is root, as an ordinary one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sandbox_kernel.sandboxes.local import bubblewrap, seccomp
from sandbox_kernel.sandboxes.local.bubblewrap import Bubblewrap
from sandbox_kernel.sandboxes.local.mounts import Mount
from sandbox_kernel.sandboxes.local.system_mounts import system_binds

NOBODY = 65534
SYSTEM_PYTHON = next(
    (p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if os.access(p, os.X_OK)),
    sys.executable,
)
"""An interpreter that every user can run and that ``system_binds`` shows."""


@dataclass(frozen=True)
class Jails:
    """Makes jails for one user of the host's."""

    bwrap: Bubblewrap
    uid: int | None = None

    def run(
        self,
        argv: Sequence[str],
        *,
        binds: Sequence[Mount] = (),
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        tmp_bytes: int = 64 * 2**20,
        host_env: Mapping[str, str] | None = None,
        timeout: float = 90,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a jail of its own, to its end."""
        with contextlib.ExitStack() as stack:
            filter_fd = _filled(stack, seccomp.program())
            go_fd = _filled(stack, b"\n")
            info_fd = _filled(stack, b"")
            command = bubblewrap.jail_command(
                self.bwrap,
                binds=[*system_binds(), *binds],
                hostname="jail",
                tmp_bytes=tmp_bytes,
                env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **(env or {})},
                cwd=cwd,
                seccomp_fd=filter_fd,
                info_fd=info_fd,
                block_fd=go_fd,
                argv=argv,
            )
            user: dict[str, Any] = (
                {"user": self.uid, "group": self.uid, "extra_groups": []} if self.uid else {}
            )
            return subprocess.run(
                command,
                pass_fds=(filter_fd, go_fd, info_fd),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                text=True,
                env={**os.environ, **(host_env or {})},
                timeout=timeout,
                **user,
            )

    def answer(self, code: str, *, python: str = SYSTEM_PYTHON, **options: Any) -> Any:
        """Run Python code in a jail; the value is what it passes to ``answer(...)``."""
        prelude = "import json, os, sys\ndef answer(value): print('ANSWER', json.dumps(value))\n"
        ran = self.run([python, "-c", prelude + code], **options)
        assert ran.returncode == 0, f"{ran.returncode}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
        return json.loads(ran.stdout.rpartition("ANSWER ")[2])


def _filled(stack: contextlib.ExitStack, data: bytes) -> int:
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (the stack closes it)
    file.write(data)
    file.seek(0)
    return file.fileno()


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """A temporary folder that other users can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="jails-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def public_bwrap(folder: Path) -> Bubblewrap:
    """The bwrap in use, copied with its libraries to where other users can reach it."""
    found = bubblewrap.find()
    if found.source == "system":
        return found
    package = Path(found.path).parent.parent
    for source in (package / "_bin", package.with_name(package.name + ".libs")):
        if source.is_dir():
            place = folder / source.relative_to(package.parent)
            shutil.copytree(source, place)
    return replace(found, path=str(folder / package.name / "_bin" / "bwrap"))
