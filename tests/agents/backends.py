"""Backends for the tests of what agents use: real jails, and an emulated service."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest

from sandbox_kernel.sandboxes.backends import load_backend
from tests.helpers.coroutines import finish
from tests.helpers.own_folders import own_folders

from ..emulators.running import started

HOSTED = "superserve"
BACKENDS = ("local", HOSTED)


@contextlib.contextmanager
def usable(backend: str) -> Iterator[str]:
    """The backend, with folders and (if it is hosted) a service of its own. In the end, no sandbox
    may be left."""
    with own_folders(), contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SANDBOX_KERNEL_LABEL", f"agents-{secrets.token_hex(4)}")
        if backend == HOSTED:
            service = stack.enter_context(started(HOSTED))
            for name, value in service.env.items():
                patch.setenv(name, value)
        yield backend
        assert sandboxes(backend) == []


def sandboxes(backend: str) -> list[str]:
    """The names of those that exist now."""
    client = load_backend(backend)
    try:
        return finish(client.list())
    finally:
        finish(client.close())
