"""Warm without being asked: a server keeps a spare sandbox for each kernelspec in use.

Which kernelspecs were used, and when, is in ``<data dir>/used-kernelspecs.json``, so that the next
server has spares before the first notebook is opened. The spares themselves are in the pools of
this process (``pool.py``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, NoSuchKernel
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter import pool
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.server_kernels import ServerKernels
from sandbox_kernel.paths import data_dir
from sandbox_kernel.tunnel.background import run

UNUSED_AFTER = 3600.0
"""Seconds without a start after which a kernelspec has no spare any more."""
QUIET = 2.0
"""Seconds after the last start of a kernel, and of the server, before a spare is made."""
MOST_REMEMBERED = 16
_MAX_FILE = 64 * 1024


@dataclass(frozen=True)
class UsedKernelspec:
    """A kernelspec that a server started a kernel of."""

    name: str
    content: str
    """Digest of the kernelspec as it was then."""
    used: float


class WarmKernels:
    """Keeps spares for the kernels of one server. On the server's loop."""

    def __init__(self, kernels: ServerKernels, spares: int, least_memory: float) -> None:
        self._kernels = kernels
        self._log = kernels.log
        self._writing = asyncio.Lock()
        terms = pool.Terms(spares, UNUSED_AFTER, QUIET, least_memory)
        pool.unasked, pool.shares_spares = terms if spares else None, False

    async def use(self, name: str, kernelspec: KernelSpec) -> None:
        """A kernel was started: the next server expects another one."""
        if pool.unasked is None:
            return
        this = UsedKernelspec(name, _content(kernelspec), time.time())
        async with self._writing:
            try:
                await asyncio.to_thread(_remember, this)
            except OSError as error:  # no reason to refuse a kernel that runs
                self._log.warning("The next server has no spare for %r: %s", name, error)

    async def expect_as_before(self) -> None:
        """Have spares for the kernelspecs that were in use last, and are still the same."""
        if pool.unasked is None:
            return
        known = await asyncio.to_thread(_remembered)
        newest = max((one.used for one in known), default=0.0)
        for one in known:
            if one.used > newest - UNUSED_AFTER:
                try:
                    await self._expect(one)
                except (SandboxError, NoSuchKernel, OSError) as error:
                    self._log.info("No spare for the kernelspec %r: %s", one.name, error)

    async def _expect(self, used: UsedKernelspec) -> None:
        multi = self._kernels.manager
        if _content(multi.kernel_spec_manager.get_kernel_spec(used.name)) != used.content:
            return
        manager, _, kernel_id = multi.pre_start_kernel(used.name, {})
        factory = KernelProvisionerFactory.instance(parent=multi)
        provisioner = factory.create_provisioner_instance(
            kernel_id, manager.kernel_spec, parent=manager
        )
        if isinstance(provisioner, SandboxProvisioner):
            await provisioner.expect()

    async def close(self) -> None:
        """Remove all spares."""
        pool.unasked = None
        await run(pool.drain_all())


def _content(kernelspec: KernelSpec) -> str:
    facts = json.dumps(kernelspec.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(facts.encode()).hexdigest()


def _path() -> Path:
    return data_dir() / "used-kernelspecs.json"


def _remember(this: UsedKernelspec) -> None:
    known = [this, *(one for one in _remembered() if one.name != this.name)]
    newest = sorted(known, key=lambda one: one.used, reverse=True)[:MOST_REMEMBERED]
    write_atomically(_path(), json.dumps([asdict(one) for one in newest]), lasting=False)


def _remembered() -> list[UsedKernelspec]:
    """None if the file is not there, or cannot be read: it only makes the next start faster."""
    try:
        with _path().open("rb") as file:
            found: list[dict[str, Any]] = json.loads(file.read(_MAX_FILE))
        return [
            UsedKernelspec(str(one["name"]), str(one["content"]), float(one["used"]))
            for one in found[:MOST_REMEMBERED]
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []
