"""The start of kernels in a server: errors that can be read in a browser, and no kernel outside of
a sandbox where that is not wanted (``SandboxServer.only``)."""

from __future__ import annotations

import textwrap
from typing import Any

from jupyter_client.provisioning.factory import KernelProvisionerFactory
from tornado import web

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner

WIDTH = 76
"""Columns that JupyterLab's dialog shows at once: it breaks no lines."""


class NotStarted(web.HTTPError):
    """Why a kernel was not started, for the person who asked for it. One request (a session) takes
    what an error says, another (a kernel) only what HTTP errors say."""

    def __init__(self, text: str) -> None:
        super().__init__(500, text)
        self._text = text

    def __str__(self) -> str:
        return self._text


def in_lines(text: str) -> str:
    """A message as the dialog can show it. Lines that it has stay, and so do long words: paths and
    commands that somebody may want to copy."""
    return "\n".join(
        textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def break_start_errors(manager: Any) -> None:
    """Of a MappingKernelManager: whoever starts a kernel gets our errors in lines."""
    start = manager.start_kernel

    async def start_kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            return await start(*args, **kwargs)
        except SandboxError as error:
            raise NotStarted(in_lines(str(error))) from error

    manager.start_kernel = start_kernel


def allow_only_sandboxes(manager: Any) -> None:
    """From now on no kernel manager of this process starts a kernel that is not in a sandbox. What
    counts is who would start it, not its name: notebooks and requests can name any kernelspec."""
    factory = KernelProvisionerFactory.instance(parent=manager)
    create = factory.create_provisioner_instance

    def create_provisioner_instance(kernel_id: str, kernel_spec: Any, parent: Any) -> Any:
        provisioner = create(kernel_id, kernel_spec, parent)
        if not isinstance(provisioner, SandboxProvisioner):
            raise SandboxError(
                f"The kernel {kernel_spec.display_name!r} was not started: it would run outside of "
                f"a sandbox (provisioner {type(provisioner).__name__}), and this server allows "
                f"none (SandboxServer.only). Choose another kernel, as 'Python 3 (sandbox)'; "
                f"`sandbox-kernel install` makes more."
            )
        return provisioner

    setattr(factory, "create_provisioner_instance", create_provisioner_instance)  # noqa: B010
