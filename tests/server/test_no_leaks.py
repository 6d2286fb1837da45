"""A server that runs for months does not hold what has ended."""

from __future__ import annotations

import time

import pytest

from tests.helpers.waiting import wait_until

from .conftest import StartServer
from .object_census import PATH
from .object_census import __name__ as census
from .running import JupyterServer, Tab

NOTEBOOKS = 4
STORE = {"Store", "Packs", "Catalog", "Location", "Totals", "LocalBlobs"}
"""What is known of the files in the store: it is there for the next save."""


def use(server: JupyterServer, path: str) -> None:
    """A notebook: opened, run, saved, interrupted, restarted, reconnected to, and closed."""
    server.notebook(path)
    session = server.session(path)
    tab = Tab(server, session["kernel"]["id"])
    tab.run("open('data', 'w').write('x' * 1000)")
    server.notebook(path, ("1",))
    request = tab.begin("print('begun', flush=True)\nwhile True: pass")
    while "begun" not in tab.text(request):
        tab.read()
    server.request("POST", f"/api/kernels/{tab.kernel_id}/interrupt")
    assert tab.until_done(request)["ename"] == "KeyboardInterrupt"
    server.request("POST", f"/api/kernels/{tab.kernel_id}/restart")
    tab.close()
    tab.connect()
    tab.run("1")
    tab.close()
    server.request("DELETE", f"/api/sessions/{session['id']}")


@pytest.mark.slow
def test_nothing_is_held_of_kernels_that_have_ended(make_server: StartServer) -> None:
    """Somebody opens one notebook after the other in a server, works, and closes each. What the
    server's process holds for a kernel goes with the kernel: there is nothing in the end, neither
    an object of ours nor an entry in a collection, of which each notebook has left one."""
    server = make_server(
        f"--ServerApp.jpserver_extensions={census}=True",
        # Jupyter holds each connection for that long.
        "--MappingKernelManager.kernel_info_timeout=15",
    )
    server.start()
    before = server.get(PATH)
    for number in range(NOTEBOOKS):
        use(server, f"n{number}.ipynb")

    def count() -> dict[str, int]:
        time.sleep(1)  # it is much work
        found: dict[str, int] = server.get(PATH)
        return found

    assert count()["KernelOutput"] > 0  # they can be seen
    wait_until(lambda: "KernelOutput" not in count(), "the end of the connections")
    more = {name: n - before.get(name, 0) for name, n in count().items()}
    for name in [name for name in more if name.partition(".")[0] in STORE]:
        del more[name]
    assert {name: n for name, n in more.items() if n >= NOTEBOOKS} == {}
