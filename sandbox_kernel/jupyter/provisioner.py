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
import os
import secrets
import signal
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import Any as AnyTrait
from traitlets import TraitType, default

from sandbox_kernel.errors import (
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SpecError,
)
from sandbox_kernel.jupyter import bringing, hosting, keeping, lifecycle, workspaces
from sandbox_kernel.jupyter.configuration import (
    OWN_FIELDS,
    OWN_HELP,
    SPEC_FIELDS,
    KernelConfiguration,
    check_keys,
    read_configuration,
)
from sandbox_kernel.jupyter.idle import accompany
from sandbox_kernel.jupyter.telling import heard, obituary
from sandbox_kernel.kernels import Log, SandboxedKernel
from sandbox_kernel.sandboxes import unsaved
from sandbox_kernel.spec import FIELD_HELP
from sandbox_kernel.tunnel.background import carry_through, run
from sandbox_kernel.tunnel.endpoints import PRIORITY

if TYPE_CHECKING:
    from sandbox_kernel.workspace import SaveReport


def _setting(name: str) -> TraitType[Any, Any]:
    """A configurable trait; SandboxSpec says what is a good value."""
    return AnyTrait(None, allow_none=True, help={**FIELD_HELP, **OWN_HELP}[name]).tag(config=True)


class SandboxProvisioner(KernelProvisionerBase):
    """Runs kernels in sandboxes. Entry point ``sandbox`` of jupyter_client.kernel_provisioners."""

    backend = _setting("backend")
    guest_transport = _setting("guest_transport")
    keep_on_exit = _setting("keep_on_exit")
    pause_on_exit = _setting("pause_on_exit")
    idle_pause_seconds = _setting("idle_pause_seconds")
    recreate = _setting("recreate")
    warm_start = _setting("warm_start")
    pool_size = _setting("pool_size")
    pool_idle_seconds = _setting("pool_idle_seconds")
    persist = _setting("persist")
    upload = _setting("upload")
    mirror = _setting("mirror")
    mirror_delete = _setting("mirror_delete")
    name = _setting("name")
    image = _setting("image")
    memory_mib = _setting("memory_mib")
    cpus = _setting("cpus")
    processes = _setting("processes")
    open_files = _setting("open_files")
    disk_mib = _setting("disk_mib")
    workspace = _setting("workspace")
    env = _setting("env")
    readable = _setting("readable")
    python = _setting("python")
    secrets = _setting("secrets")
    egress = _setting("egress")
    options = _setting("options")
    labels = _setting("labels")
    lease_seconds = _setting("lease_seconds")
    delete_after_seconds = _setting("delete_after_seconds")
    start_timeout = _setting("start_timeout")

    def __init__(self, **kwargs: Any) -> None:
        own = set(self.class_trait_names()) - {*SPEC_FIELDS, *OWN_FIELDS}
        base = {key: kwargs.pop(key) for key in list(kwargs) if key in own | {"parent", "config"}}
        # What is left is the kernelspec's config: weaker than traitlets configuration, which
        # arguments of a Configurable would override.
        self._kernelspec_config = kwargs
        check_keys(kwargs, f"The kernelspec of kernel {base.get('kernel_id', '')}")
        super().__init__(**base)
        self._kernel: SandboxedKernel | None = None
        self.saved_workspace: workspaces.KernelWorkspace | None = None
        """Where the kernel's files are saved, once it has been launched; None: nowhere."""
        self._unsaved = ""
        """Why the files are not saved, if the last save before a pause or a farewell failed."""
        self.notices: list[str] = []
        """What the user should be told; who does so takes it from here."""
        self._has_process = False
        self._has_run = False
        """A kernel was launched, also if it could not be restarted since."""
        self._folder: str | None = None

    def configuration(self) -> KernelConfiguration:
        """The settings in force for this kernel."""
        configured = {key: getattr(self, key) for key in (*OWN_FIELDS, *SPEC_FIELDS)}
        return read_configuration(
            self._kernelspec_config,
            {key: value for key, value in configured.items() if value is not None},
            default_name=f"kernel-{(self.kernel_id or secrets.token_hex(4))[:8].lower()}"
            f"-{secrets.token_hex(2)}",
        )

    @property
    def sandbox_name(self) -> str | None:
        """Name of the sandbox, once there is one."""
        return self._kernel.handle.name if self._kernel else None

    @property
    def kernel(self) -> SandboxedKernel | None:
        """The kernel with its sandbox, once there is one. Its coroutines are for the background
        loop."""
        return self._kernel

    @property
    def death(self) -> str:
        """Why the kernel ended, in words; empty while it runs."""
        return self._kernel.death if self._kernel else ""

    @property
    def obituary(self) -> str:
        """Why the kernel died, and what becomes of it, for its user; empty if it did not."""
        if self._kernel is None:
            return ""
        recreate, saved = self.configuration().recreate, self.saved_workspace is not None
        return obituary(self._kernel, recreate=recreate, saved=saved)

    def _exited(self, kernel: SandboxedKernel) -> None:
        """On the background loop."""
        if kernel is self._kernel and kernel.unasked:
            for observer in lifecycle.observers:
                observer.died(self)

    @default("log")
    def _log_that_is_read(self) -> Log:
        return heard(self._log_default())

    # --- the process, after subprocess.Popen

    @property
    def has_process(self) -> bool:
        return self._has_process

    @property
    def pid(self) -> int | None:
        """Pid of the kernel inside the sandbox."""
        return self._kernel.pid if self._kernel else None

    async def poll(self) -> int | None:
        if self._kernel is None or not self._has_process:
            return 0
        return self._kernel.exit_code

    async def wait(self) -> int | None:
        if self._kernel is None or not self._has_process:
            return 0
        code = await run(self._kernel.wait())
        self._has_process = False
        return code

    async def send_signal(self, signum: int) -> None:
        if self._kernel is not None:
            await run(self._kernel.send_signal(signum))

    async def kill(self, restart: bool = False) -> None:
        if self._kernel is None:
            return
        if self._kernel.tunnel.paused and not restart:
            # It need not be resumed, which costs money, only to end.
            return await run(self._give_up(self._kernel))
        await self._end_process(signal.SIGKILL)

    @staticmethod
    async def _give_up(kernel: SandboxedKernel) -> None:
        kernel.give_up()

    async def terminate(self, restart: bool = False) -> None:
        await self._end_process(signal.SIGTERM)

    async def _end_process(self, signum: int) -> None:
        """Signal the kernel or, if its agent does not do that in time, end it from outside.
        Never raises: an error here would be the end of the shutdown, but not of the kernel."""
        kernel = self._kernel
        if kernel is None:
            return
        try:
            await run(kernel.send_signal(signum))
        except (SandboxError, OSError) as error:
            if kernel.client.capabilities.hosted and self.saved_workspace is not None:
                # The link may be down, and the sandbox has the only copy of its files.
                self.log.warning("%s The kernel is taken for dead.", error)
                return await run(self._give_up(kernel))
            self.log.warning("%s The kernel is ended from outside.", error)
            await run(kernel.end_by_force())

    async def shutdown_requested(self, restart: bool = False) -> None:
        if self._kernel is None:
            return
        self._kernel.expect_exit()
        control = getattr(self.parent, "_control_socket", None)
        if self._kernel.exit_code is not None and control is not None:
            # A dead kernel does not read the manager's shutdown_request. The manager closes this
            # socket next; if it lingered, the kernel that is started then would obey.
            control.linger = 0

    # --- starting

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        extra_arguments = kwargs.pop("extra_arguments", [])
        encryption = kwargs.pop("transport_encryption", None)
        manager = self.parent
        hosting.end_in_order()
        if manager is None:
            command = [*self.kernel_spec.argv, *extra_arguments]
        else:
            self._choose_endpoints(manager)
            self._choose_keys(manager, encryption)
            session_name = kwargs.get("env", {}).get("JPY_SESSION_NAME", "")
            manager.write_connection_file(jupyter_session=session_name)
            self.connection_info = manager.get_connection_info()
            command = manager.format_kernel_cmd(extra_arguments=extra_arguments)
        return await super().pre_launch(cmd=command, **kwargs)

    def _choose_endpoints(self, manager: Any) -> None:
        """IPC sockets in a folder of our own, unless the user has named TCP ports."""
        ports = [getattr(manager, f"{channel}_port") for channel in PRIORITY]
        if manager.transport == "tcp" and not any(ports):
            self._folder = hosting.endpoint_folder()
            manager.transport = "ipc"
            manager.ip = os.path.join(self._folder, "c")

    def _choose_keys(self, manager: Any, encryption: Any) -> None:
        """CurveZMQ keys, if the manager's policy asks for them (jupyter_client 8.10 on)."""
        policy_of = getattr(manager, "_transport_encryption_policy", None)
        if policy_of is None:
            return
        policy = policy_of(encryption) if encryption is not None else policy_of()
        wanted = policy == "required" or (
            policy == "auto" and manager._kernel_supports_curve_encryption()
        )
        if wanted and manager.curve_publickey is None:
            manager.curve_publickey, manager.curve_secretkey = zmq.curve_keypair()

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        if not self.connection_info:
            raise SpecError(
                "SandboxProvisioner needs a KernelManager as its parent, or load_provisioner_info."
            )
        cwd = str(kwargs["cwd"]) if kwargs.get("cwd") else None
        try:
            new = await self._launch_twice(
                cmd, partial(self._launch, cmd, kwargs.get("env", {}), cwd)
            )
        except SandboxError as error:
            for observer in lifecycle.observers if self._has_run else ():
                observer.not_restarted(self, error)
            raise
        if new:
            self.log.info("Kernel %s runs in sandbox %s", self.kernel_id, self.sandbox_name)
        self._has_process = self._has_run = True
        try:
            for observer in lifecycle.observers:
                await observer.launched(self)
        except BaseException:
            if new:  # for its manager it was never started, so nobody would end it
                await self.cleanup()
            raise
        return self.connection_info

    async def _launch_twice(
        self, cmd: list[str], launch: Callable[[KernelConfiguration], Coroutine[Any, Any, None]]
    ) -> bool:
        """For the second time if the sandbox had ended, which nobody had noticed until now."""
        try:
            return await self._launch_or_replace(cmd, launch)
        except SandboxGone:
            if self._kernel is None or self._kernel.tunnel.failure is None:
                raise
            return await self._launch_or_replace(cmd, launch)

    async def _launch_or_replace(
        self, cmd: list[str], launch: Callable[[KernelConfiguration], Coroutine[Any, Any, None]]
    ) -> bool:
        """Launch the kernel in its sandbox, or in one that takes the place of a lost one. Whether
        the sandbox is new."""
        if self._kernel is not None and self._kernel.tunnel.failure is not None:
            await self._replace_lost_sandbox(self._guest_command(cmd))
        new = self._kernel is None
        try:
            await run(launch(self.configuration()))
        except BaseException:
            if new:  # a kernel that cannot be restarted keeps its sandbox, and the files in it
                await (self._end_sandbox() if self._has_run else self.cleanup())
            raise
        return new

    async def _launch(
        self,
        cmd: list[str],
        env: dict[str, str],
        cwd: str | None,
        configuration: KernelConfiguration,
    ) -> None:
        argv = hosting.with_interpreter(self._guest_command(cmd), configuration.spec)
        if self._kernel is None:
            workspace = workspaces.workspace_of(configuration, env, cwd)
            configuration = replace(configuration, spec=replace(configuration.spec, workspace=None))
            if workspace is not None:
                if workspace.mirror:
                    hosting.check_out_of_reach(configuration, argv, workspace.folder)
                await keeping.save_first(workspace, self.log)
            self._kernel = await hosting.create_kernel(configuration, argv, self.log)
            workspace, told = await bringing.bring_files(
                self._kernel, workspace, configuration, cwd, self.log
            )
            self.notices += told
            # Not before: what could not be brought in must not be saved as the latest.
            self.saved_workspace = workspace
            self._watch_over(self._kernel)
        kernel = self._kernel
        kernel.on_exit = partial(self._exited, kernel)
        kernel.listen(hosting.addresses(self.connection_info), self._folder)
        for observer in lifecycle.observers:
            await observer.launching(self, kernel)
        await kernel.launch(
            argv,
            env=self._guest_env(env, configuration),
            cwd=kernel.handle.workdir,
            connection=hosting.guest_connection(self.connection_info),
            transport=configuration.guest_transport,
            warm=configuration.warm_start,
        )
        accompany(kernel, configuration, self.connection_info)
        self.note_files(workspaces.notebook_of(self.saved_workspace, env))

    def _guest_command(self, cmd: list[str]) -> list[str]:
        """The connection file has another path in the sandbox, which only the agent knows."""
        path = getattr(self.parent, "connection_file", None)
        if not path:
            return cmd
        known = {path, os.path.realpath(path), os.path.abspath(path)}
        return ["{connection_file}" if argument in known else argument for argument in cmd]

    def _guest_env(self, env: dict[str, str], configuration: KernelConfiguration) -> dict[str, str]:
        """Only what the kernelspec and the sandbox's spec name, and what hosting passes on."""
        names = [*(self.kernel_spec.env if self.kernel_spec else {}), *hosting.PASSED_ON]
        return {**{n: env[n] for n in names if n in env}, **configuration.spec.env}

    async def _replace_lost_sandbox(self, cmd: list[str]) -> None:
        """Restarting a kernel whose sandbox has ended: it is started again if the backend can do
        that, else the user gets a new one; and is told. One that was taken over has not ended, and
        its endpoints are in use."""
        lost = self._kernel
        assert lost is not None
        if lost.tunnel.failure is not None and lost.taken_over:
            raise lost.tunnel.failure
        name, reason = lost.handle.name, lost.tunnel.failure
        if lost.client.capabilities.restart:
            try:
                await run(lost.revive(hosting.with_interpreter(cmd, lost.handle.spec)))
            except (SandboxGone, SandboxNotFound) as error:
                reason = error
            else:
                self.log.warning("Sandbox %s had ended (%s) and was started again.", name, reason)
                return
        if lost.client.capabilities.hosted and not self.configuration().recreate:
            raise SandboxGone(
                f"{reason} A hosted sandbox is not made anew by itself: start a new kernel, or "
                f"set recreate."
            )
        self.log.warning(
            "Sandbox %s is gone (%s). The kernel is restarted in a new one; files of the old one, "
            "if the backend still has them, are kept until `sandbox-kernel rm %s`.",
            *(name, reason, name),
        )
        self._kernel = None
        await run(lost.detach())
        if self.saved_workspace is not None:
            await run(keeping.note_lost(lost, self.saved_workspace, self._kernel_name, str(reason)))

    # --- ending

    async def cleanup(self, restart: bool = False) -> None:
        if restart:
            return
        there = self._kernel is not None or self._has_run
        self._has_run = False
        try:
            await self._end_sandbox()
        finally:
            for observer in list(lifecycle.observers) if there else ():
                await observer.ended(self)
            if self._folder is not None:
                self._folder = None
                if self.parent is not None:
                    # The manager may start another kernel; it gets endpoints of its own.
                    self.parent.transport = "tcp"
                    self.parent.ip = "127.0.0.1"

    async def _end(
        self, kernel: SandboxedKernel, workspace: workspaces.KernelWorkspace | None
    ) -> unsaved.Unsaved | None:
        """On the background loop. An error would be the end of the manager's shutdown, and help
        nobody: it is told, and what could not be removed is tried again when the process exits."""
        ending = asyncio.current_task()
        assert ending is not None
        kernel.ending = lambda limit: asyncio.wait([ending])  # a process that exits waits for it
        hosting.own(kernel)
        try:
            return await keeping.end(kernel, workspace, self._kernel_name, self.log)
        except (SandboxError, OSError) as error:
            self.log.error("Sandbox %s could not be removed: %s", kernel.handle.name, error)
            return None
        finally:
            kernel.ending = None

    async def _end_sandbox(self) -> None:
        """The kernel may come back in another one."""
        self._has_process = False
        kernel, self._kernel = self._kernel, None
        workspace, self.saved_workspace = self.saved_workspace, None
        if kernel is not None:
            # Also if the caller is cancelled: nobody else would end the sandbox.
            kept = await carry_through(self._end(kernel, workspace))
            if kept is not None:
                for observer in lifecycle.observers:
                    await observer.kept(self, kept)

    async def detach(self) -> None:
        """Leave sandbox and kernel running for ``load_provisioner_info`` in another process."""
        kernel, self._kernel = self._kernel, None
        self._has_process = self._has_run = False
        if kernel is not None:
            hosting.disown(kernel)
            await run(kernel.detach())
            if self._unsaved and self.saved_workspace is not None:
                reason, handle = self._unsaved, kernel.handle
                unsaved.note(
                    keeping.make_note(
                        handle, self.saved_workspace, self._kernel_name, reason, kept=False
                    )
                )

    @property
    def _kernel_name(self) -> str:
        return str(getattr(self.parent, "kernel_name", ""))

    async def save(self, *, wake: bool = True) -> SaveReport:
        """Save the kernel's files in its workspace now. SandboxPaused if it is paused and is not
        to be woken for that."""
        if self._kernel is None or self.saved_workspace is None:
            raise SandboxError("This kernel has no workspace to save to, or is not there.")
        report = await workspaces.save(
            self._kernel, self.saved_workspace, self._kernel_name, self.log, wake=wake
        )
        self._unsaved = ""
        return report

    async def save_or_tell(self) -> bool:
        """Save the kernel's files if it has a workspace; a failure is told in the log. Whether
        they are saved. On any loop."""
        if self._kernel is None or self.saved_workspace is None:
            return False
        self._unsaved = await workspaces.last_save(
            self._kernel, self.saved_workspace, self._kernel_name, self.log
        )
        return not self._unsaved

    def note_files(self, notebook: str) -> None:
        """Put down in the sandbox's record which notebook it belongs to now, if any, and where its
        files are saved."""
        if self._kernel is not None:
            handle, facts = self._kernel.handle, {"notebook": notebook} if notebook else {}
            facts |= keeping.facts_of(handle, self.saved_workspace, self._kernel_name)
            if facts:
                self._kernel.note(**facts)

    def _watch_over(self, kernel: SandboxedKernel) -> None:
        """The kernel's files are saved before it is paused, and when the process exits."""
        kernel.before_pause = self.save_or_tell
        if self.saved_workspace is not None:
            kernel.ending = self._at_exit

    async def _at_exit(self, limit: float) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await keeping.end(
                kernel, self.saved_workspace, self._kernel_name, self.log, limit=limit
            )

    @property
    def can_pause(self) -> bool:
        return self._kernel is not None and self._kernel.client.capabilities.pause

    @property
    def paused(self) -> bool:
        return self._kernel is not None and self._kernel.tunnel.paused

    @property
    def at_rest(self) -> bool:
        """Paused, by us, after its files were saved."""
        return self._kernel is not None and self._kernel.at_rest

    async def pause(self) -> bool:
        """Freeze the sandbox with the kernel in it, until ``resume``, or until a client sends
        something; its files are saved first. False if a client sent something meanwhile: then it
        goes on. For backends that can."""
        return self._kernel is not None and await run(self._kernel.pause())

    async def resume(self) -> None:
        """Let a kernel that was paused go on. No error if it was not."""
        if self._kernel is not None:
            await run(self._resume(self._kernel))

    @staticmethod
    async def _resume(kernel: SandboxedKernel) -> None:
        kernel.resume()

    def get_stable_start_time(self, recommended: float = 10.0) -> float:
        with contextlib.suppress(SpecError):
            return max(recommended, self.configuration().spec.start_timeout)
        return recommended

    # --- other processes

    async def get_provisioner_info(self) -> dict[str, Any]:
        """All that another process needs to go on with this kernel, as JSON types."""
        if self._kernel is None:
            raise SandboxError("There is no sandbox yet; start the kernel first.")
        info = await super().get_provisioner_info()
        key = self.connection_info.get("key")
        info["connection_info"] = {
            **self.connection_info,
            **({"key": key.decode()} if isinstance(key, bytes) else {}),
        }
        return {
            **info,
            "backend": self._kernel.handle.backend,
            "sandbox": self._kernel.handle.name,
            "sandbox_id": self._kernel.handle.id,
            "folder": self._folder,
            "saved_workspace": asdict(self.saved_workspace) if self.saved_workspace else None,
        }

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take the kernel over: its variables are there, and clients that know its connection
        file find it again. A process that still had it loses it."""
        await super().load_provisioner_info(provisioner_info)
        if self._kernel is not None:
            raise SandboxError("This provisioner has a kernel already.")
        self._folder = provisioner_info["folder"]
        self._kernel = await run(self._attach(provisioner_info))
        self.saved_workspace = workspaces.from_dict(provisioner_info.get("saved_workspace"))
        self._watch_over(self._kernel)
        unsaved.clear(self._kernel.handle.backend, self._kernel.handle.name)
        self._has_process = self._has_run = True

    async def _attach(self, info: dict[str, Any]) -> SandboxedKernel:
        kernel = await hosting.attach_kernel(
            info["backend"],
            info["sandbox"],
            self.log,
            sandbox_id=str(info.get("sandbox_id", "")),
            key=str(info["connection_info"].get("key", "")),
        )
        kernel.on_exit = partial(self._exited, kernel)
        try:
            if kernel.exit_code is not None:
                raise SandboxGone(
                    f"The kernel in sandbox {info['sandbox']!r} has ended: {kernel.death}."
                )
            kernel.listen(hosting.addresses(self.connection_info), self._folder)
            accompany(kernel, self.configuration(), self.connection_info)
        except BaseException:
            await kernel.detach()
            raise
        return kernel
