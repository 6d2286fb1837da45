"""The sandboxes of an emulator: real jails of the local backend, which can be frozen.

A frozen jail's processes are stopped from outside (SIGSTOP, which not even process 1 of a jail can
refuse), so nothing in it notices but by the clock.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from sandbox_kernel.sandboxes.base import ExecStream
from sandbox_kernel.sandboxes.local import LocalClient, environment
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.sandboxes.local.jail_folders import JailFolders
from sandbox_kernel.sandboxes.local.jail_start import Launch
from sandbox_kernel.sandboxes.local.mounts import Mount, Symlink
from sandbox_kernel.sandboxes.local.system_mounts import HOME
from sandbox_kernel.spec import SandboxSpec

from .outside import Decide, Outside

_FOREVER = 1e8
_RESOLVER = ".machine-resolv.conf"
_THEIR_OWN = shutil.ignore_patterns(".venv")
"""What each jail is given when it is made."""


class MachineClient(LocalClient):
    """Makes jails that stand for machines of a provider, where commands see each other."""

    commands_apart = False

    def _launch(self, spec: SandboxSpec, sandbox_id: str, folders: JailFolders) -> Launch:
        python = environment.describe(sys.executable)
        return _MachineLaunch(spec, sandbox_id, folders, python, self.commands_apart)


class _MachineLaunch(Launch):
    """With a resolver's address in a file that a machine's root may change."""

    def _binds(self) -> list[Mount]:
        binds = super()._binds()
        (self._folders.home / _RESOLVER).write_text("nameserver 192.0.2.53\n")
        return [*binds, Symlink(f"{HOME}/{_RESOLVER}", "/etc/resolv.conf")]


class Jail:
    """One jail. Make it with ``create``."""

    def __init__(self, handle: LocalHandle) -> None:
        self.handle = handle
        self._outside = Outside()
        self._stopped: set[int] = set()

    @classmethod
    async def create(
        cls,
        name: str,
        env: Mapping[str, str],
        disk_mib: int | None = None,
        *,
        network: Decide | None,
        root: bool = True,
    ) -> Jail:
        """``network`` says what the provider's network lets through; None if there is none."""
        # The service decides how long it lives, not the jail.
        spec = SandboxSpec(name=name, env=dict(env), lease_seconds=_FOREVER, disk_mib=disk_mib)
        jail = cls(await MachineClient().create(spec))
        try:
            await jail._outside.connect(jail.handle._record.data["init"][0], network, root=root)
        except BaseException:
            await jail.destroy()
            raise
        return jail

    async def start(self, command: str, env: Mapping[str, str], cwd: str | None) -> ExecStream:
        """Run a shell command. ExecFailed if its folder is not there."""
        return await self.handle.open_stream(["/bin/sh", "-c", command], env=env, cwd=cwd)

    async def read(self, path: str) -> bytes:
        """FileNotFoundError if there is no such file."""
        stream = await self.handle.open_stream(["cat", "--", path], cwd="/")
        async with stream:
            pieces = []
            while piece := await stream.read():
                pieces.append(piece)
            if await stream.wait():
                raise FileNotFoundError(path)
        return b"".join(pieces)

    async def write(self, path: str, content: bytes) -> None:
        """Makes the folders on the way."""
        script = 'mkdir -p "$(dirname "$0")" && cat > "$0"'
        result = await self.handle.exec("/bin/sh", ["-c", script, path], stdin=content, cwd="/")
        if not result.ok:
            raise PermissionError(result.output)

    def freeze(self) -> None:
        """Stop every process of the jail, also those that are being started just now."""
        self._stopped = set()
        while new := self._processes() - self._stopped:
            for pid in new:
                self._signal(pid, signal.SIGSTOP)
            self._stopped |= new

    def thaw(self) -> None:
        for pid in self._processes():
            self._signal(pid, signal.SIGCONT)
        self._stopped = set()

    async def save(self, folder: Path) -> None:
        """Keep this jail's own files (workspace and home) in a folder."""
        mine = self.handle._folders
        for source, name in ((mine.workspace, "workspace"), (mine.home, "home")):
            await asyncio.to_thread(
                shutil.copytree, source, folder / name, symlinks=True, ignore=_THEIR_OWN
            )

    async def fill(self, folder: Path) -> None:
        """Put files that were saved into this jail."""
        its = self.handle._folders
        for target, name in ((its.workspace, "workspace"), (its.home, "home")):
            # A new jail's home is not empty; what was saved replaces what is there.
            command = ["cp", "-a", "--remove-destination", f"{folder / name}/.", str(target)]
            await asyncio.to_thread(subprocess.run, command, check=True)

    async def destroy(self) -> None:
        self._outside.close()
        self.thaw()
        await MachineClient().remove(self.handle.name)

    def _processes(self) -> set[int]:
        init = self.handle._record.data["init"][0]
        try:
            space = os.readlink(f"/proc/{init}/ns/pid")
        except OSError:
            return set()
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/pid") == space:
                    found.add(int(folder.name))
            except OSError:
                continue  # it has ended, or is not ours
        return found

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
