"""An image that has Python and nothing else, and no network: the host provides ipykernel.

Such an image is in the rig only (``make test-microvm``).
"""

from __future__ import annotations

import logging
import os

import pytest

from tests.helpers.coroutines import finish
from tests.helpers.waiting import wait_until

from .conftest import Backend
from .kernels import execute, kernel, sandboxed

PUT = "lacks ipykernel; it is put there"
LOOK = """
import os, subprocess, sys, ipykernel
print(ipykernel.__file__)
print(sys.path.index(os.path.dirname(os.path.dirname(ipykernel.__file__))) == len(sys.path) - 1)
child = "import importlib.util as u; print(u.find_spec('ipykernel'))"
print(subprocess.run(["python3", "-c", child], capture_output=True, text=True).stdout.strip())
"""


def test_an_image_without_ipykernel(
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It gets a working kernel, from packages in a folder of their own, which the kernel finds
    last and its child processes do not find. When the sandbox is started again, nothing is sent."""
    image = os.path.join(os.environ["SANDBOX_KERNEL_RIG"], "images", "bare")
    for name, value in backend.environment(image=image).items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO)
    with kernel() as (manager, client):
        path, last, seen_by_children = execute(client, LOOK)[1].splitlines()
        assert path.startswith("/opt/sandbox-kernel/packages-")
        assert last == "True"
        assert seen_by_children == "None"
        assert PUT in caplog.text
        caplog.clear()
        handle = sandboxed(manager).handle
        finish(handle.stop())
        wait_until(lambda: not manager.is_alive())
        manager.restart_kernel(now=True)
        client.wait_for_ready(timeout=1200)
        assert execute(client, "import ipykernel; print(ipykernel.__file__)")[1].strip() == path
        assert PUT not in caplog.text
        assert sandboxed(manager).handle.id == handle.id
