"""SandboxProvisioner: Jupyter's KernelManager drives a kernel in a sandbox through this.

KernelManager calls the methods in this order: ``pre_launch``, ``launch_kernel``, ``post_launch``;
then ``poll``, ``send_signal`` as needed; then ``shutdown_requested``, ``wait`` (or ``terminate``,
``kill``), ``cleanup``. A restart goes through the last group with ``restart=True`` and then
through the first again, on the same object: the sandbox stays, only the kernel process changes.

All real work happens on the background loop; these methods may run on any loop of any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

from jupyter_client.connect import KernelConnectionInfo
from traitlets import Any as AnyTrait

from sandbox_kernel.errors import SandboxError, SandboxGone, SpecError
from sandbox_kernel.jupyter import (
    kernel_command,
    kernel_factory,
    kernel_workspace,
    missing_file_hints,
    network_hints,
    pool,
    teardown,
)
from sandbox_kernel.jupyter.bring_files import bring_files
from sandbox_kernel.jupyter.companions import set_up_companions
from sandbox_kernel.jupyter.configuration import (
    GIVEN,
    environment_beside,
    place_of,
    read_configuration,
)
from sandbox_kernel.jupyter.connections import (
    addresses,
    endpoint_folder,
    guest_connection,
    set_up_manager,
)
from sandbox_kernel.jupyter.death_message import obituary
from sandbox_kernel.jupyter.denial_lines import log_denials
from sandbox_kernel.jupyter.file_plan import plan_files
from sandbox_kernel.jupyter.jupyter_internals import discard_unsent_requests
from sandbox_kernel.jupyter.observers import observers
from sandbox_kernel.jupyter.process_exit import exit_on_sigterm, own
from sandbox_kernel.jupyter.provisioned_kernel import ProvisionedKernel, call
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes import unsaved_files
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.spec import SETTINGS, KernelConfiguration
from sandbox_kernel.suggestions import check_keys
from sandbox_kernel.tunnel.background import carry_through, run

EXIT_WAIT = 0.5
"""Seconds that ``poll`` waits for a kernel that is being ended."""

_SETTINGS = {name: one for name, one in SETTINGS.items() if one.only_for != "launcher"}


class SandboxProvisioner(ProvisionedKernel):
    """Runs kernels in sandboxes. Entry point ``sandbox`` of jupyter_client.kernel_provisioners."""

    # One configurable trait for each setting; spec.py says what is a good value.
    locals().update(
        {
            name: AnyTrait(None, allow_none=True, help=setting.help).tag(config=True)
            for name, setting in _SETTINGS.items()
        }
    )

    def __init__(self, **kwargs: Any) -> None:
        own = set(self.class_trait_names()) - set(_SETTINGS)
        base = {key: kwargs.pop(key) for key in list(kwargs) if key in own | {"parent", "config"}}
        # The rest is the kernelspec's config. As arguments they would override traitlets' config.
        self._kernelspec_config = kwargs
        check_keys(kwargs, _SETTINGS, f"The kernelspec of kernel {base.get('kernel_id', '')}")
        super().__init__(**base)
        self.cwd: str | None = None
        """The host folder that the kernel was started for, if Jupyter named one."""
        self._ending = False
        """Somebody has asked this kernel to end."""
        self._folder: str | None = None
        """The folder of the local sockets, if it is our own."""
        self.takes_dead = False
        """``load_provisioner_info`` also takes over a kernel that has ended, for its output."""

    def configuration(self) -> KernelConfiguration:
        """The settings in force for this kernel."""
        configured = {key: getattr(self, key) for key in _SETTINGS}
        kept = self.kernel_spec.metadata if self.kernel_spec else {}
        given = kept.get("kernel_provisioner", {}).get(GIVEN, ())
        return read_configuration(
            self._kernelspec_config,
            {key: value for key, value in configured.items() if value is not None},
            default_name=f"kernel-{(self.kernel_id or secrets.token_hex(4))[:8].lower()}"
            f"-{secrets.token_hex(2)}",
            environ=environment_beside(given),
            not_for="launcher",
        )

    @property
    def obituary(self) -> str:
        """Why the kernel died and what happens next, for its user; empty if it did not die."""
        if self.kernel is None:
            return ""
        recreate, saved = self.configuration().recreate, self.saved_workspace is not None
        return obituary(self.kernel, recreate=recreate, saved=saved)

    # --- the process, after subprocess.Popen

    @property
    def has_process(self) -> bool:
        return self._has_process

    @property
    def pid(self) -> int | None:
        """Pid of the kernel inside the sandbox."""
        return self.kernel.pid if self.kernel else None

    async def poll(self) -> int | None:
        """While the kernel is being ended, this waits for its exit for a moment: a manager that
        finds the kernel running looks again only after 0.1 s."""
        kernel = self.kernel
        if kernel is None or not self._has_process:
            return 0
        if kernel.exit_code is None and self._ending:
            await run(kernel.exited_within(EXIT_WAIT))
        return kernel.exit_code

    async def wait(self) -> int | None:
        if self.kernel is None or not self._has_process:
            return 0
        code = await run(self.kernel.wait())
        self._has_process = False
        return code

    async def send_signal(self, signum: int) -> None:
        if self.kernel is not None:
            await run(self.kernel.send_signal(signum))

    async def kill(self, restart: bool = False) -> None:
        if self.kernel is not None and self.kernel.tunnel.paused and not restart:
            # To end, it need not be resumed, which costs money.
            return await run(call(self.kernel.give_up))
        await self._end_process(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        await self._end_process(signal.SIGTERM)

    async def _end_process(self, signum: int) -> None:
        """Signal the kernel; if its agent does not do that in time, end it from outside. Never
        raises: an error would end the manager's shutdown, but not the kernel."""
        kernel = self.kernel
        if kernel is None:
            return
        self._ending = True
        try:
            await run(kernel.send_signal(signum))
        except (SandboxError, OSError) as error:
            if kernel.client.capabilities.hosted and self.saved_workspace is not None:
                # The link may be down, and the sandbox has the only copy of its files.
                self.log.warning("%s Kernel %s counts as dead.", error, self.kernel_id)
                return await run(call(kernel.give_up))
            self.log.warning("%s Kernel %s is ended from outside.", error, self.kernel_id)
            await run(kernel.end_by_force())

    async def shutdown_requested(self, restart: bool = False) -> None:
        if self.kernel is None:
            return
        self._ending = True
        self.kernel.expect_exit()
        if self.kernel.exit_code is not None:
            discard_unsent_requests(self.parent)

    # --- starting

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        extra_arguments = kwargs.pop("extra_arguments", [])
        encryption = kwargs.pop("transport_encryption", None)
        manager = self.parent
        exit_on_sigterm()
        if manager is None:
            command = [*self.kernel_spec.argv, *extra_arguments]
        else:
            self._folder = set_up_manager(manager, encryption) or self._folder
            session_name = kwargs.get("env", {}).get("JPY_SESSION_NAME", "")
            manager.write_connection_file(jupyter_session=session_name)
            self.connection_info = manager.get_connection_info()
            command = manager.format_kernel_cmd(extra_arguments=extra_arguments)
        return await super().pre_launch(cmd=command, **kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        if not self.connection_info:
            raise SpecError("SandboxProvisioner needs a KernelManager, or load_provisioner_info.")
        self._ending = False
        self.cwd = str(kwargs["cwd"]) if kwargs.get("cwd") else None
        argv = kernel_command.guest_command(cmd, getattr(self.parent, "connection_file", ""))
        try:
            new = await self._launch_or_replace(argv, kwargs.get("env", {}))
        except SandboxError as error:
            for observer in observers if self._has_run else ():
                observer.not_restarted(self, error)
            raise
        if new:
            self.log.info("Kernel %s runs in sandbox %s", self.kernel_id, self.sandbox_name)
        self._has_process = self._has_run = True
        try:
            for observer in observers:
                await observer.launched(self)
        except BaseException:
            if new:  # for its manager it was never started, so nobody would end it
                await self.cleanup()
            raise
        return self.connection_info

    async def _launch_or_replace(self, argv: list[str], env: dict[str, str]) -> bool:
        """Launch the kernel in its sandbox, or in a new one if that is lost. Whether it is new."""
        try:
            return await self._launch_once(argv, env)
        except SandboxGone:
            if self.kernel is None or self.kernel.tunnel.failure is None:
                raise
            return await self._launch_once(argv, env)  # its end was noticed only now

    async def _launch_once(self, argv: list[str], env: dict[str, str]) -> bool:
        if self.kernel is not None and self.kernel.tunnel.failure is not None:
            await self._replace_lost_sandbox(self.kernel, argv)
        new = self.kernel is None
        try:
            await run(self._launch(argv, env, self.configuration()))
        except BaseException:
            if new:  # a kernel that cannot be restarted keeps its sandbox, and the files in it
                await (self._end_sandbox() if self._has_run else self.cleanup())
            raise
        return new

    async def _replace_lost_sandbox(self, lost: SandboxedKernel, argv: list[str]) -> None:
        recreate, reason = self.configuration().recreate, lost.tunnel.failure
        if await run(kernel_factory.start_again(lost, argv, recreate=recreate)):
            return
        self.kernel = None
        await run(lost.detach())
        if (workspace := self.saved_workspace) is not None:
            await run(teardown.note_lost(lost, workspace, str(reason)))

    async def _launch(
        self, argv: list[str], env: dict[str, str], configuration: KernelConfiguration
    ) -> None:
        with pool.starting_a_kernel():
            argv = kernel_command.with_interpreter(argv, configuration.spec)
            await self._launch_now(argv, env, configuration)

    async def _launch_now(
        self, argv: list[str], env: dict[str, str], configuration: KernelConfiguration
    ) -> None:
        kernel = self.kernel or await self._create(argv, env, configuration)
        kernel.on_exit = partial(self._exited, kernel)
        kernel.listen(addresses(self.connection_info), self._folder)
        for observer in observers:
            await observer.launching(self, kernel)
        saved = self.saved_workspace  # the notebook is noted even if its files are not saved
        kernel.belongs_to((saved and saved.notebook) or kernel_workspace.notebook_in(env))
        names = self.kernel_spec.env if self.kernel_spec else ()
        await kernel.launch(
            argv,
            env=kernel_command.guest_environment(env, names, configuration.spec),
            cwd=kernel.handle.workdir,
            connection=guest_connection(self.connection_info),
            transport=configuration.guest_transport,
            warm=configuration.warm_start,
        )
        hint = None if observers else partial(self._hint, kernel, self._sees_folder(configuration))
        if not observers:
            log_denials(kernel, place_of("egress", self))
        await set_up_companions(kernel, configuration, self.connection_info, hint=hint)
        await self.note_files(kernel.notebook)

    def _hint(self, kernel: SandboxedKernel, sees_folder: bool, error: Mapping[str, Any]) -> str:
        """What the log says after an error of a cell, if anything."""
        handle, found = kernel.handle, ""
        if not sees_folder:
            folder = kernel_workspace.folder_of(self.cwd)
            found = missing_file_hints.hint(error, folder, handle.workdir, "")
        if not found and not handle.spec.egress:
            text, variable = network_hints.text_of(error), _SETTINGS["egress"].variable
            found = network_hints.hint(text, handle.backend, variable)
        return found

    @staticmethod
    def _sees_folder(configuration: KernelConfiguration) -> bool:
        return configuration.files != "none" or configuration.upload != "none"

    async def expect(self) -> None:
        """Have a spare for a kernel like this one, without starting it, if this process keeps
        spares unasked. For a provisioner whose manager has never started a kernel."""
        manager, configuration = self.parent, self.configuration()
        assert manager is not None
        argv = kernel_command.guest_command(manager.format_kernel_cmd(), manager.connection_file)
        argv = kernel_command.with_interpreter(argv, configuration.spec)
        await run(call(partial(kernel_factory.expect_kernel, configuration, argv, self.log)))

    async def _create(
        self, argv: list[str], env: dict[str, str], configuration: KernelConfiguration
    ) -> SandboxedKernel:
        """Make the sandbox, with the files of the kernel's workspace."""
        configuration, said = await self._narrowed(configuration, env)
        plan = plan_files(configuration, env, self.cwd, self._kernel_name, argv)
        plan = replace(plan, notices=[*said, *plan.notices])
        if plan.workspace is not None:
            await teardown.save_first(plan.workspace, self.log)
        configuration = plan.configuration
        self.kernel = kernel = await kernel_factory.create_kernel(configuration, argv, self.log)
        workspace, notices = await bring_files(kernel, plan)
        self.notices += notices
        # Not earlier: files that could not be brought in must not be saved as the latest.
        self.saved_workspace = workspace
        self._save_in_time(kernel)
        return kernel

    @staticmethod
    async def _narrowed(
        configuration: KernelConfiguration, env: Mapping[str, str]
    ) -> tuple[KernelConfiguration, list[str]]:
        """As the notebook's own metadata says, and what its user should know of that."""
        notebook = configuration.notebook or kernel_workspace.notebook_in(env)
        if not notebook:
            return configuration, []
        from sandbox_kernel.jupyter.notebook_settings import with_notebook_settings  # start-up time

        return await asyncio.to_thread(with_notebook_settings, configuration, notebook)

    def _save_in_time(self, kernel: SandboxedKernel) -> None:
        """Save the kernel's files before it is paused, and when the process exits."""
        kernel.before_pause = self.save_or_tell
        if self.saved_workspace is not None:
            kernel.ending = self._at_exit

    def _exited(self, kernel: SandboxedKernel) -> None:
        """On the background loop."""
        if kernel is self.kernel and kernel.unasked:
            for observer in observers:
                observer.died(self)

    def get_stable_start_time(self, recommended: float = 10.0) -> float:
        with contextlib.suppress(SpecError):
            return max(recommended, self.configuration().spec.start_timeout)
        return recommended

    # --- ending

    async def cleanup(self, restart: bool = False) -> None:
        if restart:
            return
        there = self.kernel is not None or self._has_run
        self._has_run = False
        try:
            await self._end_sandbox()
        finally:
            for observer in list(observers) if there else ():
                await observer.ended(self)
            if self._folder is not None:
                self._folder = None
                if self.parent is not None:
                    # The manager may start another kernel, which gets endpoints of its own.
                    self.parent.transport = "tcp"
                    self.parent.ip = "127.0.0.1"

    async def _end_sandbox(self) -> None:
        """The kernel may be launched again, in another sandbox."""
        self._has_process = False
        kernel, self.kernel = self.kernel, None
        workspace, self.saved_workspace = self.saved_workspace, None
        if kernel is not None:
            # Also if the caller is cancelled: nobody else would end the sandbox.
            kept = await carry_through(self._end(kernel, workspace))
            if kept is not None:
                for observer in observers:
                    await observer.kept(self, kept)

    async def _end(
        self, kernel: SandboxedKernel, workspace: kernel_workspace.KernelWorkspace | None
    ) -> unsaved_files.Unsaved | None:
        """On the background loop. Logs errors: they would only end the manager's shutdown. If the
        sandbox could not be removed, the process tries again when it exits."""
        ending = asyncio.current_task()
        assert ending is not None
        kernel.ending = lambda limit: asyncio.wait([ending])  # a process that exits waits for it
        own(kernel)
        try:
            return await teardown.end(kernel, workspace)
        except (SandboxError, OSError) as error:
            self.log.error("Sandbox %s could not be removed: %s", kernel.handle.name, error)
            return None
        finally:
            kernel.ending = None

    async def _at_exit(self, limit: float) -> None:
        kernel, self.kernel = self.kernel, None
        if kernel is not None:
            await teardown.end(kernel, self.saved_workspace, limit)

    # --- other processes

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Everything that another process needs to go on with this kernel, as JSON types."""
        if self.kernel is None:
            raise SandboxError(f"Kernel {self.kernel_id} has no sandbox yet; start it first.")
        info = await super().get_provisioner_info()
        key = self.connection_info.get("key")
        info["connection_info"] = {
            **self.connection_info,
            **({"key": key.decode()} if isinstance(key, bytes) else {}),
        }
        return {
            **info,
            "backend": self.kernel.handle.backend,
            "sandbox": self.kernel.handle.name,
            "sandbox_id": self.kernel.handle.id,
            "folder": self._folder,
            "saved_workspace": asdict(self.saved_workspace) if self.saved_workspace else None,
        }

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take the kernel over: its variables are there, and clients that know its connection
        file find it again. A process that still had it loses it."""
        await super().load_provisioner_info(provisioner_info)
        if self.kernel is not None:
            raise SandboxError(f"Kernel {self.kernel_id} runs already in {self.sandbox_name}.")
        self._folder = provisioner_info["folder"]
        self.kernel = await run(self._attach(provisioner_info))
        found, name = provisioner_info.get("saved_workspace"), self._kernel_name
        self.saved_workspace = kernel_workspace.from_dict(found, name) if found else None
        if self.saved_workspace is not None:
            self.kernel.belongs_to(self.saved_workspace.notebook)
        self._save_in_time(self.kernel)
        handle = self.kernel.handle
        await run(asyncio.to_thread(unsaved_files.clear, handle.backend, handle.name))
        self._has_process = self._has_run = True

    async def go_on_with(self, kernel: SandboxedKernel, connection: Mapping[str, Any]) -> None:
        """Have a kernel that this process made as a copy of another, at endpoints of its own. It is
        saved nowhere. If this fails, the caller still has the kernel."""
        self._folder = endpoint_folder()
        place = {"transport": "ipc", "ip": f"{self._folder}/c"}
        self.connection_info = cast(KernelConnectionInfo, {**connection, **place})
        kernel.on_exit = partial(self._exited, kernel)
        await run(self._listen(kernel))
        own(kernel)
        self.kernel = kernel
        self._has_process = self._has_run = True

    async def _listen(self, kernel: SandboxedKernel) -> None:
        kernel.listen(addresses(self.connection_info), self._folder)
        await set_up_companions(kernel, self.configuration(), self.connection_info)

    async def _attach(self, info: dict[str, Any]) -> SandboxedKernel:
        kernel = await SandboxedKernel.attach(
            *(load_backend(info["backend"]), info["sandbox"], self.log),
            sandbox_id=str(info.get("sandbox_id", "")),
            key=str(info["connection_info"].get("key", "")),
        )
        kernel.on_exit = partial(self._exited, kernel)
        try:
            if kernel.exit_code is not None and not self.takes_dead:
                sandbox = kernel.handle.name
                raise SandboxGone(f"The kernel in sandbox {sandbox!r} has ended: {kernel.death}.")
            await self._listen(kernel)
        except BaseException:
            await kernel.detach()
            raise
        return kernel
