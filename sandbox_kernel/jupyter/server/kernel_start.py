"""The start of kernels in a server: errors that can be read in a browser, and no kernel outside of
a sandbox where that is not wanted (``SandboxServer.only``)."""

from __future__ import annotations

import textwrap
from typing import Any

from tornado import web

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner

WIDTH = 76
"""Columns that JupyterLab's dialog shows at once: it breaks no lines."""


class NotStarted(web.HTTPError):
    """Why a kernel was not started, for the person who asked for it. Requests for sessions show
    the text of an error, requests for kernels only that of HTTP errors."""

    def __init__(self, text: str) -> None:
        super().__init__(500, text)
        self._text = text

    def __str__(self) -> str:
        return self._text


def in_lines(text: str) -> str:
    """A message as the dialog can show it. Long words stay whole: paths and commands to copy."""
    return "\n".join(
        textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


async def start_with_readable_errors(start: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``MappingKernelManager.start_kernel``."""
    try:
        return await start(*args, **kwargs)
    except SandboxError as error:
        raise NotStarted(in_lines(str(error))) from error


def create_only_sandboxes(create: Any, kernel_id: str, kernel_spec: Any, parent: Any) -> Any:
    """Around ``KernelProvisionerFactory.create_provisioner_instance``: no kernel manager of this
    process starts a kernel outside of a sandbox. The provisioner decides, not the kernelspec's
    name: notebooks and requests can name any kernelspec."""
    provisioner = create(kernel_id, kernel_spec, parent)
    if not isinstance(provisioner, SandboxProvisioner):
        raise SandboxError(
            f"The kernel {kernel_spec.display_name!r} was not started: it would run outside of "
            f"a sandbox (provisioner {type(provisioner).__name__}), and this server allows "
            f"none (SandboxServer.only). Choose another kernel, such as 'Python 3 (sandbox)'; "
            f"`sandbox-kernel install` makes more."
        )
    return provisioner
