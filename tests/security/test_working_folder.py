"""A notebook's folder is hostile, too: no process of ours on the host obeys the files in it.

Clients start kernels in the notebook's folder, and what lies there may come from the notebook's
author or, mirrored, from a cell. Python imports from the folder that it is started in when it is
run by ``-m`` or ``-c``, and from empty and relative elements of PYTHONPATH; relative elements of
PATH find programs there, and those of LD_LIBRARY_PATH libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import socket
import struct
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

import sandbox_kernel
from sandbox_kernel.audit.shipping import Shipper
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SandboxUnavailable, SpecError
from sandbox_kernel.gateway import conda_channels, npm_registry, pip_index
from sandbox_kernel.gateway.secret_sources import find_value
from sandbox_kernel.host_processes import ProcessId
from sandbox_kernel.images import debian, wheels
from sandbox_kernel.images.target import Target
from sandbox_kernel.jupyter import kernel_command
from sandbox_kernel.jupyter.kernelspec import list_kernelspecs, write_kernelspec
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.kernels.spare_plan import SparePlan
from sandbox_kernel.kernels.spare_shelf import Shelf, end_holders
from sandbox_kernel.sandboxes.broker import startup as broker
from sandbox_kernel.sandboxes.local import LocalClient, bubblewrap, environment, guest_copy
from sandbox_kernel.secret_declarations import read_secrets
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.workspace.ended_sandboxes import Leftovers, save_leftovers
from sandbox_kernel.workspace.store import Store
from tests.helpers.waiting import wait_until

from .hosts import why_not

MODULES = (
    *("json", "sitecustomize", "usercustomize", "runpy", "site", "os", "asyncio", "logging"),
    *("argparse", "socket", "subprocess", "compileall", "importlib/__init__", "typing"),
    *("sandbox_kernel/__init__", "pip/__init__", "pip/__main__", "jupyter_client/__init__"),
)
PROGRAMS = (
    *("bwrap", "mmdebstrap", "debootstrap", "apt-get", "python3", "unshare", "npm", "conda"),
    "printf",
)


class Folder:
    """A notebook's folder with traps that leave their names in a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notebooks"
        self.path.mkdir()
        self._sprung = folder / "sprung"

    def trap(self, *modules: str) -> None:
        for name in modules:
            path = self.path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"open({str(self._sprung)!r}, 'a').write({name!r} + ' ')\n")

    def trap_programs(self, *names: str) -> None:
        for name in names:
            path = self.path / name
            path.write_text(f"#!/bin/sh\necho {name} >> '{self._sprung}'\nexit 1\n")
            path.chmod(0o755)

    def sprung(self) -> list[str]:
        return self._sprung.read_text().split() if self._sprung.exists() else []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """All traps are laid, this process is in the folder, and its variables lead there, too."""
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", str(tmp_path / "run"))
    made = Folder(tmp_path)
    made.trap(*MODULES)
    made.trap_programs(*PROGRAMS)
    monkeypatch.chdir(made.path)
    # As `export PYTHONPATH=$PYTHONPATH:/more` makes it of nothing, and as people write it.
    monkeypatch.setenv("PYTHONPATH", ":.:../notebooks")
    monkeypatch.setenv("PATH", f".::{os.environ['PATH']}")
    for name in ("libc.so.6", "libm.so.6", "libdl.so.2", "libz.so.1"):
        (made.path / name).write_text("no program starts that finds this one")
    monkeypatch.setenv("LD_LIBRARY_PATH", ":/nowhere")
    yield made
    assert made.sprung() == []


def start_broker() -> None:
    place = broker.Place("local", "sandbox_kernel.sandboxes.local:LocalClient")
    with place._start() as sock:
        pid, *_ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    process = ProcessId.of(pid)
    assert process is not None
    assert process.kill(30)


def start_jail(**spec: Any) -> None:
    async def main() -> None:
        client = LocalClient()
        await client.create(SandboxSpec(name="trapped", lease_seconds=60, **spec))
        await client.remove("trapped")

    if why_not():
        pytest.skip(str(why_not()))
    asyncio.run(main())


def start_holder() -> None:
    if why_not():
        pytest.skip(str(why_not()))
    plan = SparePlan.of("local", SandboxSpec(), ())
    shelf = Shelf.of(plan)
    shelf.ask_for_one(plan)
    try:
        wait_until(lambda: shelf.offered, "a spare sandbox")
    finally:
        end_holders()


def find_maker() -> None:
    try:
        debian._maker()
        debian._source()
    except SandboxUnavailable:
        pass  # this system has none, and the folder's was not taken for one


def compile_guest() -> None:
    guest_copy._compiled.cache_clear()
    guest_copy.compiled_guest(sys.executable, (3, 9), "/shown")


def compile_packages() -> None:
    made = Path("packages")
    made.mkdir()
    (made / "module.py").write_text("")
    wheels._finish(made, Target(sys.version_info[:2], "x86_64", "glibc", (2, 36)), lean=False)


def save_what_was_left() -> None:
    left = Path("../left").absolute()
    left.mkdir()
    (left / "file").write_text("text")
    store = Store.open(str(left.parent / "store"))
    where = Leftovers(str(left))
    save_leftovers(store, "work", where, backend="local", sandbox="gone")
    latest = store.latest("work")
    assert latest is not None
    assert latest.files == 1


def ask_package_managers() -> None:
    """For the presets of egress rules."""
    assert pip_index._run()[0] is not None
    for manager in (npm_registry, conda_channels):
        with contextlib.suppress(SpecError):  # it is not installed here, and the folder's is not it
            manager.read()


def ask_for_a_secret() -> None:
    [secret] = read_secrets([{"name": "A", "from": "command:printf 12345678", "hosts": ["a.test"]}])
    assert asyncio.run(find_value(secret)).reveal() == "12345678"


def ship_the_audit() -> None:
    shipper = Shipper("printf ready")
    shipper.put({"kind": "created"})
    shipper.close()


def start_jail_with_ways_out() -> None:
    start_jail(egress=EgressPolicy.of("a.test"))


WAYS: dict[str, Callable[[], object]] = {
    "the broker": start_broker,
    "a jail": start_jail,
    "a holder of spares": start_holder,
    "bubblewrap": functools.partial(bubblewrap.find),
    "a question to an interpreter": lambda: environment.describe(sys.executable),
    "compiling the guest": compile_guest,
    "pip": lambda: wheels._pip("cache", "dir").check_returncode(),
    "compiling packages": compile_packages,
    "a maker of images": find_maker,
    "a jail with ways out": start_jail_with_ways_out,
    "the package managers": ask_package_managers,
    "a secret's command": ask_for_a_secret,
    "what the audit is sent to": ship_the_audit,
    "saving what a sandbox left": save_what_was_left,
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_we_start_obeys_the_folder(folder: Folder, way: str) -> None:
    """Each way in which this package starts a process on the host, from a folder full of traps."""
    WAYS[way]()


def test_a_launcher_kernelspec_does_not_obey_the_folder(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client starts the kernel in the notebook's folder, where a json.py lies: that used to run
    on the host, before there was any sandbox. The kernel itself works."""
    if why_not():
        pytest.skip(str(why_not()))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    write_kernelspec(name="launched", launcher=True, prefix=str(tmp_path))
    manager = KernelManager(kernel_name="launched")
    manager.start_kernel(cwd=str(folder.path))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        found = []
        client.execute_interactive(
            "import os; print(os.getcwd())",
            timeout=60,
            output_hook=lambda message: found.append(message["content"].get("text", "")),
        )
        assert "".join(found).strip() == "/workspace"
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


@pytest.mark.parametrize("where", ["named", "linked", "a sandbox's own"])
def test_an_interpreter_that_a_sandbox_can_write_is_not_run(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreters are run on the host to describe them. One in the folder that a cell's files are
    mirrored to, or in a sandbox's own folder, is refused before that: a .pth file in its
    environment would be the host's next program. A hidden environment is out of the mirror's
    reach."""
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("SANDBOX_KERNEL_WORKSPACE", "work")
    monkeypatch.setenv("SANDBOX_KERNEL_MIRROR", "true")
    made = Folder(tmp_path)
    top = tmp_path / "data" / "workspaces" / "w" if where == "a sandbox's own" else made.path
    for name in ("venv", ".venv"):
        venv.create(top / name, symlinks=True)
        [site] = (top / name).glob("lib/python3*/site-packages")
        (site / "trap.pth").write_text(f"import sys; open({str(made.path / name)!r} + '-ran', 'w')")
    python = top / "venv" / "bin" / "python"
    if where == "linked":
        python = tmp_path / "elsewhere" / "python"
        python.parent.mkdir()
        python.symlink_to(top / "venv" / "bin" / "python")
    monkeypatch.setenv("SANDBOX_KERNEL_PYTHON", str(python))
    with pytest.raises(SpecError, match=r"where sandboxes write|mirror would let code"):
        KernelManager(kernel_name="sandbox").start_kernel(cwd=str(made.path))
    assert not (made.path / "venv-ran").exists()
    if where == "named":
        monkeypatch.setenv("SANDBOX_KERNEL_PYTHON", str(top / ".venv" / "bin" / "python"))
        configuration = SandboxProvisioner(kernel_id="x").configuration()
        kernel_command.check_out_of_reach(configuration, ["python"], str(made.path))


def test_every_module_that_starts_processes_is_known_here() -> None:
    """A new place that starts a process on the host belongs into ``WAYS`` above."""
    root = Path(sandbox_kernel.__file__).parent
    starts = re.compile(
        r"subprocess\.(run|Popen|check_\w+|call)\(|run_program\(|create_subprocess|posix_spawn\("
        r"|os\.exec"
    )
    inside = re.compile(r"guest/|sandboxes/missing_packages")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if starts.search(path.read_text())
    }
    assert {name for name in found if not inside.match(name)} == {
        "audit/shipping.py",  # what audit_command names, found as a shell would
        "gateway/conda_channels.py",
        "gateway/npm_registry.py",
        "gateway/pip_index.py",
        "gateway/secret_sources.py",  # what the kernel's own configuration names
        "images/debian.py",
        "images/wheels.py",
        "host_programs.py",
        "kernels/spare_shelf.py",
        "sandboxes/broker/startup.py",
        "sandboxes/local/bubblewrap.py",
        "sandboxes/local/environment.py",
        "sandboxes/local/jail_start.py",
        "sandboxes/local/guest_copy.py",
        "sandboxes/local/low_ports.py",
        "sandboxes/local/systemd_scope.py",  # busctl, found as bubblewrap is
        "sandboxes/microsandbox/machine.py",  # a program of the SDK's, by its absolute path, in /
        "workspace/ended_sandboxes.py",
    }


def test_the_command_as_a_module_imports_nothing_more_from_the_folder(tmp_path: Path) -> None:
    """What earlier versions wrote into kernelspecs cannot be made safe after the fact, but what
    is imported after our first line comes from the installed packages."""
    made = Folder(tmp_path)
    made.trap("argparse", "logging")
    command = [sys.executable, "-m", "sandbox_kernel", "list", "--json"]
    ran = subprocess.run(command, cwd=made.path, capture_output=True, timeout=60, check=True)
    assert isinstance(json.loads(ran.stdout), list)
    assert made.sprung() == []


def test_kernelspecs_of_earlier_versions_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``list`` and ``doctor`` say which must be installed again, and how."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    old = Path(write_kernelspec(name="old-launcher", launcher=True, prefix=str(tmp_path)))
    kernel = json.loads((old / "kernel.json").read_text())
    start = [sys.executable, "-m", "sandbox_kernel", "launch", "-f", "{connection_file}"]
    kernel["argv"] = [*start, "--config", '{"backend": "local"}']
    (old / "kernel.json").write_text(json.dumps(kernel))
    write_kernelspec(name="new-launcher", launcher=True, prefix=str(tmp_path))
    outdated = {spec.name: spec.outdated for spec in list_kernelspecs()}
    assert (outdated["old-launcher"], outdated["new-launcher"]) == (True, False)
    ran = subprocess.run(
        [sys.executable, "-m", "sandbox_kernel", "list"], capture_output=True, text=True, timeout=60
    )
    assert "install local --launcher --name old-launcher" in ran.stderr
    assert "new-launcher" not in ran.stderr
