"""A version of Jupyter Server whose internals have changed."""

from __future__ import annotations

import signal

import pytest

from sandbox_kernel.jupyter.jupyter_internals import CULLING, TESTED

from .changed_jupyter import __name__ as changed_jupyter
from .conftest import StartServer
from .running import Tab


@pytest.mark.slow
def test_one_feature_is_off(make_server: StartServer) -> None:
    """The log says once what is missing, which feature that costs and which versions have it.
    Kernels run, and the next server adopts them."""
    server = make_server(module=changed_jupyter)
    server.start()
    assert server.log.count(CULLING.without) == 1
    assert "AsyncMappingKernelManager.cull_kernel_if_idle is not there" in server.log
    assert TESTED in server.log
    tab = Tab(server, server.session("n.ipynb")["kernel"]["id"])
    assert tab.run("x = 41; print(x + 1)") == "42\n"
    tab.close()
    server.end(signal.SIGTERM)
    server.start()
    [session] = server.get("/api/sessions")
    assert Tab(server, session["kernel"]["id"]).run("print(x)") == "41\n"
