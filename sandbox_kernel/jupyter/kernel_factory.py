"""Makes and ends the kernels of this process, for the provisioner and the launcher.

Everything here runs on the background loop.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from sandbox_kernel.errors import SandboxExists, SandboxGone, SandboxNotFound
from sandbox_kernel.jupyter.kernel_command import show_program, with_interpreter
from sandbox_kernel.jupyter.pool import pool_for
from sandbox_kernel.jupyter.process_exit import disown, making_a_sandbox, own
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.sandboxes.unattended import user_of
from sandbox_kernel.spec import KernelConfiguration, SandboxSpec


async def create_kernel(
    configuration: KernelConfiguration, argv: Sequence[str], log: Log
) -> SandboxedKernel:
    """A new sandbox for a kernel with this command line, or one from the pool."""
    client = load_backend(configuration.backend)
    spec = configuration.spec
    client.capabilities.check_kernel(configuration, client.backend)
    if client.capabilities.python:
        spec = show_program(spec, argv)
    warm_argv = tuple(argv) if configuration.warm_start else ()

    async def make(one: SandboxSpec) -> SandboxedKernel:
        kernel = None
        if configuration.pause_on_exit and configuration.named:
            kernel = await _paused_earlier(client, one.name, log)
        kernel = kernel or await SandboxedKernel.create(
            client, one, log, warm_argv=warm_argv, keep_unused=configuration.keep_on_exit
        )
        kernel.pause_on_exit = configuration.pause_on_exit
        own(kernel)
        return kernel

    pool = None
    if configuration.pool_size and not configuration.named:
        plan = {**spec.to_dict(), "name": ""}
        pool = pool_for(
            [configuration.backend, plan, list(warm_argv)],
            configuration.pool_size,
            configuration.pool_idle_seconds,
            lambda: make(replace(spec, name="")),
            remove_kernel,
        )
    with making_a_sandbox():
        taken = None if pool is None else await pool.take()
        kernel = taken or await make(spec)
    kernel.log = log
    if configuration.keep_on_exit:
        disown(kernel)
    return kernel


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
