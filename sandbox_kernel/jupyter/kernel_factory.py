"""Makes and ends the kernels of this process, for the provisioner and the launcher.

Everything here runs on the background loop.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from sandbox_kernel.errors import SandboxError, SandboxExists, SandboxGone, SandboxNotFound
from sandbox_kernel.jupyter import pool as pools
from sandbox_kernel.jupyter.kernel_command import show_program, with_interpreter
from sandbox_kernel.jupyter.pool import Pool, Terms, pool_for
from sandbox_kernel.jupyter.process_exit import disown, making_a_sandbox, own
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.kernels.spare_plan import SparePlan, SpareSandbox, make_spare
from sandbox_kernel.kernels.spare_shelf import Shelf
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.sandboxes.unattended import user_of
from sandbox_kernel.spec import KernelConfiguration
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks


async def create_kernel(
    configuration: KernelConfiguration, argv: Sequence[str], log: Log
) -> SandboxedKernel:
    """A new sandbox for a kernel with this command line, or a spare."""
    made = _Making(configuration, argv, log)
    with making_a_sandbox():
        kernel = await made.take_spare() or await made.make()
    kernel.log = log
    kernel.pause_on_exit = configuration.pause_on_exit
    own(kernel)
    if configuration.keep_on_exit:
        await kernel.keep_unused()
        disown(kernel)
    return kernel


def expect_kernel(configuration: KernelConfiguration, argv: Sequence[str], log: Log) -> None:
    """Have a spare for such a kernel in a while, if this process keeps any unasked."""
    pool = _Making(configuration, argv, log).pool()
    if pool is not None:
        pool.fill()


_following = OwnedTasks()


class _Making:
    """Makes a sandbox for one kernel, and spares for those to come."""

    def __init__(self, configuration: KernelConfiguration, argv: Sequence[str], log: Log) -> None:
        self._configuration = configuration
        self._client = client = load_backend(configuration.backend)
        client.capabilities.check_kernel(configuration, client.backend)
        spec = configuration.spec
        self._spec = show_program(spec, argv) if client.capabilities.python else spec
        self._warm_argv = tuple(argv) if configuration.warm_start else ()
        self._plan = SparePlan.of(configuration.backend, self._spec, self._warm_argv)
        self._log = log

    async def make(self) -> SandboxedKernel:
        configuration, client, log = self._configuration, self._client, self._log
        kernel = None
        if configuration.pause_on_exit and configuration.named:
            kernel = await _paused_earlier(client, self._spec.name, log)
        return kernel or await SandboxedKernel.create(
            client,
            self._spec,
            log,
            warm_argv=self._warm_argv,
            keep_unused=configuration.keep_on_exit,
        )

    async def take_spare(self) -> SandboxedKernel | None:
        pool = self.pool()
        if pool is not None:
            return await pool.take(self._likeness)
        if self._has_spares_unasked and pools.shares_spares:
            return await self._take_from_shelf()
        return None

    def pool(self) -> Pool | None:
        """None if this process has no spares for such a kernel."""
        configuration, terms = self._configuration, pools.unasked
        if self._spec.folder is not None or configuration.mounts:
            return None  # each is for one folder
        if configuration.pool_size and not configuration.named:
            terms = Terms(configuration.pool_size, configuration.pool_idle_seconds)
        elif terms is None or not self._has_spares_unasked:
            return None
        return pool_for(self._plan, terms, self._make_spare, remove_kernel)

    @property
    def _has_spares_unasked(self) -> bool:
        configuration = self._configuration
        wanted = configuration.warm_spares and not (configuration.named or configuration.mounts)
        wanted = wanted and not self._spec.secrets  # a keyring may ask its user at each start
        return wanted and self._client.makes_spares(self._spec)

    async def _likeness(self) -> str:
        return await self._plan.likeness(self._client)

    async def _take_from_shelf(self) -> SandboxedKernel | None:
        """A spare that another process holds, if it is like a sandbox made now. Without one the
        kernel starts as ever, so no problem with spares is one of the start."""
        shelf, kernel, stale = None, None, ""
        try:
            shelf = await asyncio.to_thread(Shelf.of, self._plan)
            offer = await asyncio.to_thread(shelf.take)
            if offer is not None and offer.likeness != await self._likeness():
                stale = offer.name
            elif offer is not None:
                kernel = await SandboxedKernel.take_spare(
                    self._client, offer.name, self._log, sandbox_id=offer.id
                )
        except (SandboxGone, SandboxNotFound) as error:
            self._log.info("A spare sandbox has ended, so the kernel gets a new one: %s", error)
        except (SandboxError, OSError) as error:
            self._log.warning("A spare sandbox cannot be used: %s", error)
        if shelf is not None:
            _following.start(self._after_the_start(shelf, stale))
        return kernel

    async def _after_the_start(self, shelf: Shelf, stale: str) -> None:
        """Remove a stale spare, and have one for the next kernel."""
        await pools.calm(0.0)
        try:
            await asyncio.to_thread(shelf.ask_for_one, self._plan)
            if stale:
                await self._client.remove(stale)
        except (SandboxError, OSError) as error:
            self._log.warning("The next kernel finds no spare sandbox: %s", error)

    async def _make_spare(self) -> SpareSandbox:
        with making_a_sandbox():
            spare = await make_spare(self._client, self._plan, pools.log)
            own(spare.kernel)
            return spare


async def _paused_earlier(client: SandboxClient, name: str, log: Log) -> SandboxedKernel | None:
    """The sandbox that an earlier kernel of this name left, if any; its kernel is killed."""
    try:
        handle = await client.get(name)
        user = user_of(Records().load(handle.backend, handle.name))
    except SandboxNotFound:
        return None
    if user is not None:
        raise SandboxExists(
            f"The kernel was not started: sandbox {name!r} is in use by process {user}. Shut its "
            f"kernel down first, or choose another name."
        )
    kernel = await SandboxedKernel.attach(client, name, log)
    if kernel.exit_code is None:
        await kernel.send_signal(signal.SIGKILL)
        await kernel.wait()
    log.info("The kernel starts in the existing sandbox %s, with its files.", name)
    return kernel


async def start_again(lost: SandboxedKernel, argv: Sequence[str], *, recreate: bool) -> bool:
    """Start a lost sandbox again, if its backend can do that. False if the kernel needs a new one:
    SandboxGone if that is a hosted one, unless the user wants it (``recreate``). A sandbox that
    another process took over has not ended, and its endpoints are in use: SessionRefused."""
    name, reason = lost.handle.name, lost.tunnel.failure
    if reason is not None and lost.taken_over:
        raise reason
    if lost.client.capabilities.restart:
        try:
            await lost.revive(with_interpreter(argv, lost.handle.spec))
        except (SandboxGone, SandboxNotFound) as error:
            reason = error
        else:
            lost.log.warning("Sandbox %s had ended (%s) and was started again.", name, reason)
            return True
    if lost.client.capabilities.hosted and not recreate:
        raise SandboxGone(
            f"{reason} A hosted sandbox is not replaced automatically: start a new kernel, or set "
            f"recreate."
        )
    lost.log.warning(
        "Sandbox %s is gone (%s). The kernel is restarted in a new one; files of the old one, "
        "if the backend still has them, are kept until `sandbox-kernel rm %s`.",
        *(name, reason, name),
    )
    return False


async def remove_kernel(kernel: SandboxedKernel) -> None:
    """End a kernel with its sandbox, or pause the sandbox (``pause_on_exit``)."""
    await kernel.leave()
    disown(kernel)
