"""A server keeps a spare sandbox for the kernelspecs in use, without being asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.unattended import is_spare
from sandbox_kernel.spec import SETTINGS
from tests.helpers.waiting import wait_until
from tests.kernels.conftest import install_kernelspec
from tests.kernels.live import jail_processes

from .conftest import StartServer
from .running import JupyterServer, Tab

ARGV = ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]


@pytest.fixture(autouse=True)
def _wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTINGS["warm_spares"].variable)


def records() -> list[Record]:
    return Records().list("local")


def spares() -> list[str]:
    return [record.name for record in records() if is_spare(record)]


def in_use() -> set[str]:
    return {record.name for record in records() if record.kernel.get("running")}


def spare(but: str = "") -> str:
    """The only spare that there is in a while, other than that one."""
    wait_until(lambda: len(spares()) == 1 and spares() != [but], "a spare")
    return spares()[0]


def start(server: JupyterServer, kernel: str = "sandbox") -> tuple[Tab, str]:
    """A kernel that works, and its sandbox."""
    before = in_use()
    model = server.request("POST", "/api/kernels", {"name": kernel})
    tab = Tab(server, model["id"])
    assert tab.run("print(6 * 7)") == "42\n"
    (name,) = in_use() - before
    return tab, name


def command(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "sandbox_kernel", *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_each_kernel_takes_the_spare_and_another_is_made(server: JupyterServer) -> None:
    """The second and the third kernel run in sandboxes that were there before them."""
    start(server)
    first = spare()
    assert start(server)[1] == first
    second = spare(but=first)
    assert start(server)[1] == second


def test_spares_are_listed_and_can_be_removed(server: JupyterServer) -> None:
    """One that is removed is not replaced, until the next kernel starts."""
    start(server)
    name = spare()
    listed: dict[str, dict[str, Any]] = {
        one["name"]: one for one in json.loads(command("ps", "--json"))
    }
    assert listed[name]["spare"]
    assert not listed[name]["kernel"]
    assert [one["spare"] for one in listed.values()].count(True) == 1
    assert "spare" in next(line for line in command("ps").splitlines() if line.startswith(name))
    command("rm", name)
    assert spares() == []
    assert start(server)[1] != name
    assert "is lost" not in server.log
    spare(but=name)


def test_another_kernelspec_does_not_get_it(server: JupyterServer, folder: Path) -> None:
    """Each has a spare of its own."""
    install_kernelspec(folder, "small", ARGV, memory_mib=512)
    start(server)
    name = spare()
    assert start(server, "small")[1] != name
    wait_until(lambda: len(spares()) == 2, "a spare for each")
    assert name in spares()


def test_what_has_changed_since_gets_a_new_sandbox(server: JupyterServer, folder: Path) -> None:
    """A file that the sandbox shows was replaced: the spare would show the old one."""
    shown = folder / "shown.txt"
    shown.write_text("old")
    install_kernelspec(folder, "shows", ARGV, readable=[str(shown)])
    start(server, "shows")
    stale = spare()
    (folder / "new.txt").write_text("new")
    os.replace(folder / "new.txt", shown)
    tab, name = start(server, "shows")
    assert name != stale
    assert tab.run(f"print(open({str(shown)!r}).read())") == "new\n"
    wait_until(lambda: stale not in spares(), "its removal")


def test_a_changed_kernelspec_gets_a_new_sandbox(server: JupyterServer, folder: Path) -> None:
    """The spare was made for the settings that it had before."""
    install_kernelspec(folder, "mine", ARGV, env={"GREETING": "old"})
    start(server, "mine")
    stale = spare()
    file = folder / "share" / "kernels" / "mine" / "kernel.json"
    file.write_text(file.read_text().replace("old", "new"))
    tab, name = start(server, "mine")
    assert name != stale
    assert tab.run("import os; print(os.environ['GREETING'])") == "new\n"


def test_files_of_the_notebook_come_in_when_the_spare_is_taken(
    make_server: StartServer, folder: Path
) -> None:
    """What the notebook's folder holds by then, not what it held when the spare was made."""
    server = make_server("--SandboxProvisioner.upload=folder")
    server.start()
    (folder / "root" / "data.txt").write_text("old")
    server.notebook("a.ipynb")
    Tab(server, server.session("a.ipynb")["kernel"]["id"]).run("1")
    name = spare()
    (folder / "root" / "data.txt").write_text("new")
    server.notebook("b.ipynb")
    tab = Tab(server, server.session("b.ipynb")["kernel"]["id"])
    assert tab.run("print(open('data.txt').read())") == "new\n"
    assert name not in spares()
    assert name in [record.name for record in records()]


@pytest.mark.parametrize("how", [signal.SIGTERM, "/api/shutdown", signal.SIGKILL])
def test_no_spare_is_left_when_the_server_ends(
    server: JupyterServer, folder: Path, how: signal.Signals | str
) -> None:
    """Also if the server leaves its kernels running, and also if it is killed: then in a moment."""
    start(server)
    name = spare()
    assert server.process is not None
    if isinstance(how, str):
        server.request("POST", how)
    else:
        server.process.send_signal(how)
    server.process.wait()
    if how == signal.SIGKILL:
        ended = f"{folder}/data/sandboxes/{name}/"
        wait_until(lambda: not any(name in line for line in jail_processes(folder)), ended)
    else:
        assert spares() == []


def test_a_new_server_has_spares_for_what_was_used_last(
    make_server: StartServer, folder: Path
) -> None:
    """The first notebook of the day, too. Not for kernelspecs that are not the same any more."""
    for name in ("mine", "other", "gone"):
        install_kernelspec(folder, name, ARGV, env={"NAME": name})
    server = make_server()
    server.start()
    for name in ("mine", "other", "gone"):
        tab, _ = start(server, name)
        server.request("DELETE", f"/api/kernels/{tab.kernel_id}")
    remembered = folder / "data" / "used-kernelspecs.json"
    wait_until(lambda: len(json.loads(remembered.read_text())) == 3, "all that was used")
    server.end()
    assert records() == []
    kernels = folder / "share" / "kernels"
    other = kernels / "other" / "kernel.json"
    other.write_text(other.read_text().replace("other", "changed"))
    (kernels / "gone" / "kernel.json").unlink()
    (kernels / "gone").rmdir()
    server.start()
    ready = spare()
    tab, used = start(server, "mine")
    assert used == ready
    assert tab.run("import os; print(os.environ['NAME'])") == "mine\n"
    spare(but=ready)


@pytest.mark.parametrize(
    "option", ["--SandboxServer.warm=False", "--SandboxServer.warm_least_memory=1.0"]
)
def test_no_spares_if_they_are_not_wanted_or_memory_is_short(
    make_server: StartServer, option: str
) -> None:
    """A second kernelspec's kernel shows that the time for a spare has come and gone."""
    server = make_server(option)
    server.start()
    start(server)
    if "memory" in option:
        wait_until(lambda: "No spare sandbox is kept" in server.log, "a look at the memory")
    start(server)
    assert spares() == []
    assert len(records()) == 2


def test_as_many_spares_as_wanted(make_server: StartServer) -> None:
    """``SandboxServer.warm`` may be a number."""
    server = make_server("--SandboxServer.warm=2")
    server.start()
    start(server)
    wait_until(lambda: len(spares()) == 2, "two spares")
