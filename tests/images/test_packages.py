"""Kernels by an interpreter that has no ipykernel: the host provides it, once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import re
import shutil
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from jupyter_client import BlockingKernelClient

from sandbox_kernel.errors import KernelLaunchFailed, SandboxError
from sandbox_kernel.guest.warm import PACKAGES_VARIABLE
from sandbox_kernel.images import wheels
from sandbox_kernel.images.target import Target
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes import missing_packages
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel.background import submit
from tests.kernels.live import run_cell

from .inputs import make_wheel
from .venvs import VenvClient, VenvHandle

pytestmark = pytest.mark.timeout(600)  # packages are put together once, which takes a while
T = TypeVar("T")
LOG = logging.getLogger("sandbox_kernel")
ARGV = ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return submit(coroutine).result(500)


@pytest.fixture(scope="session")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of this interpreter, without any package."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages on the host, and what was pushed: it takes long, so it is done once for all."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(autouse=True)
def places(shared: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Where packages may go in a sandbox: not to where they would on a real one, which is this
    machine's own here. And no index can be reached: what there is must do."""
    found = (str(shared / "opt"), "~/.sandbox-kernel")
    monkeypatch.setattr(missing_packages, "FOLDERS", found)
    monkeypatch.setattr(wheels, "data_dir", lambda: shared)
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return found


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new sandbox, and a cache on the host in which ipykernel is one small file."""
    monkeypatch.setattr(missing_packages, "FOLDERS", (str(tmp_path / "opt"), "~/.sandbox-kernel"))
    monkeypatch.setattr(
        missing_packages, "packages_for", lambda target, **_: tmp_path / "ipykernel"
    )
    info = tmp_path / "ipykernel" / "ipykernel-9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: ipykernel\nVersion: 9.0\nRequires-Dist: tornado>=6.2\n")
    return str(tmp_path / "opt")


@dataclass
class Started:
    """A kernel, and a client of its."""

    kernel: SandboxedKernel
    client: BlockingKernelClient
    folder: Path

    @property
    def handle(self) -> VenvHandle:
        assert isinstance(self.kernel.handle, VenvHandle)
        return self.kernel.handle

    @property
    def packages(self) -> str:
        """Where the packages are in the sandbox."""
        return run(missing_packages.provide(self.handle, LOG))[PACKAGES_VARIABLE]

    def launch(self, *, warm: bool, env: dict[str, str] | None = None) -> None:
        async def launch() -> None:
            options = {"cwd": str(self.folder), "warm": warm, "connection": CONNECTION}
            await self.kernel.launch(ARGV, env=env or {}, **options)  # type: ignore[arg-type]
            self.kernel.listen({c: f"{self.folder}/c-{n}" for n, c in enumerate(CHANNELS, 1)})

        run(launch())
        self.client.start_channels(hb=False)
        while True:
            self.client.kernel_info()
            self.client.get_shell_msg(timeout=300)
            with contextlib.suppress(queue.Empty):
                self.client.get_iopub_msg(timeout=1)
                break  # the subscription is in force

    def value(self, expression: str) -> Any:
        return json.loads(
            run_cell(self.client, f"import json; print(json.dumps({expression}))").text()
        )


CONNECTION = {"key": "secret", "signature_scheme": "hmac-sha256"}


@pytest.fixture
def started(venv: Path, data: Path) -> Iterator[Started]:
    """A sandbox whose agent runs, by an interpreter without packages. The kernel is yet to be
    launched."""
    client = VenvClient(str(venv / "bin" / "python3"))
    folder = data.parent
    spec = SandboxSpec(name="one", start_timeout=300, env={"PYTHONPATH": str(folder / "users")})
    kernel = run(SandboxedKernel.create(client, spec, LOG, warm_argv=ARGV))
    user = BlockingKernelClient(transport="ipc", ip=str(folder / "c"))
    ports = {f"{c}_port": n for n, c in enumerate(CHANNELS, 1)}
    connection: Any = {**ports, **CONNECTION, "transport": "ipc", "ip": str(folder / "c")}
    user.load_connection_info(connection)
    yield Started(kernel, user, folder)
    user.stop_channels()
    run(kernel.remove())


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "plain"])
def test_a_kernel_without_ipykernel_in_the_image(
    started: Started, warm: bool, places: tuple[str, ...]
) -> None:
    """Offline, the packages of this environment are lent: last on the path, in no environment,
    unknown to child processes."""
    started.launch(warm=warm)
    target = started.packages
    assert started.value("__import__('sys').path[-1]") == target
    assert started.value("__import__('ipykernel').__file__").startswith(f"{places[0]}/packages-")
    environment = started.value("dict(__import__('os').environ)")
    assert target not in json.dumps(environment)
    assert [name for name in environment if name.startswith("SANDBOX_KERNEL")] == []
    assert environment["PYTHONPATH"] == str(started.folder / "users")
    child = "import importlib.util; print(importlib.util.find_spec('ipykernel'))"
    ran = f"__import__('subprocess').run([__import__('sys').executable, '-c', {child!r}], "
    assert started.value(ran + "capture_output=True, text=True).stdout") == "None\n"


def test_a_launch_with_its_own_pythonpath(started: Started, tmp_path: Path) -> None:
    """A kernelspec may set PYTHONPATH; the packages are there all the same, behind it."""
    started.launch(warm=True, env={"PYTHONPATH": str(tmp_path)})
    path = started.value("__import__('sys').path")
    assert path.index(str(tmp_path)) < path.index(started.packages) == len(path) - 1


def test_a_sandbox_that_was_stopped_has_its_packages(started: Started) -> None:
    """Packages are pushed when a sandbox first starts, and not when it is started again."""
    before = len(started.handle.uploads)
    run(started.handle.stop())
    run(started.kernel.revive(ARGV))
    started.launch(warm=True)
    assert started.value("1 + 1") == 2
    assert len(started.handle.uploads) == before


async def test_packages_are_pushed_once(venv: Path, tiny: str) -> None:
    """A second start finds them; but a push that was cut off is done again."""
    client = VenvClient(str(venv / "bin" / "python3"))
    handle = await client.create(SandboxSpec(name="two"))
    try:
        first = await missing_packages.provide(handle, LOG)
        assert await missing_packages.provide(handle, LOG) == first
        target = first[PACKAGES_VARIABLE]
        assert target.startswith(f"{tiny}/packages-")
        assert handle.uploads == [target]
        os.unlink(f"{target}/.complete")
        assert await missing_packages.provide(handle, LOG) == first
        assert handle.uploads == [target, target]
    finally:
        await client.remove("two")


def provide(python: str | Path, **env: str) -> dict[str, str]:
    """Provide packages for an interpreter, without a kernel."""

    async def call() -> dict[str, str]:
        client = VenvClient(str(python))
        handle = await client.create(SandboxSpec(name="two", env=env))
        try:
            return await missing_packages.provide(handle, LOG)
        finally:
            await client.remove("two")

    return asyncio.run(call())


def test_an_image_with_ipykernel_is_left_alone() -> None:
    """Nothing is pushed where nothing is missing, and it is not even imported to find out."""
    assert provide(sys.executable) == {}


def test_a_folder_that_can_be_written_to_is_found(venv: Path, tiny: str) -> None:
    """The home folder does where /opt does not."""
    Path(tiny).write_text("not a folder")
    target = provide(venv / "bin/python3")[PACKAGES_VARIABLE]
    assert re.fullmatch(r"/.*/home/\.sandbox-kernel/packages-[0-9a-f]{16}", target)


def test_other_versions_in_the_image_are_noted(
    venv: Path, tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The image's packages go first, so that one which is too old is worth a warning."""
    (tmp_path / "old" / "tornado-4.0.dist-info").mkdir(parents=True)
    provide(venv / "bin/python3", PYTHONPATH=str(tmp_path / "old"))
    assert any("has tornado 4.0, but ipykernel needs tornado" in m for m in caplog.messages)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "cannot be run .* has no Python there, or is made for another machine"),
        ("exit 127", "exit code 127 .* has no Python there"),
        ("echo nonsense", "exit code 0 and said: 'nonsense'"),
        ("ANSWER {}", "makes no sense"),
        ("ANSWER []", "makes no sense"),
        ("ANSWER " + "[" * 100_000, "makes no sense|said"),
        ("ANSWER name=pypy", "it is pypy, for which there are no packages"),
        ("ANSWER is64=false", "32 bits"),
        ("ANSWER version=[3,8]", r"Python 3\.8 is too old"),
        ("ANSWER version=[99999999999,8,9]", "makes no sense"),
        ('ANSWER machine="m68k"', "no wheels for the machine 'm68k'"),
        ("ANSWER libc=null", "neither glibc nor musl"),
        ('ANSWER libc="glibc 2.5"', r"glibc 2\.5 is too old"),
        ('ANSWER libc="glibc 2.999"', "not a version"),
        ('ANSWER writable="/../../etc"', "no place to go"),
        ('ANSWER version=[3,9] libc="glibc 2.30"', "cannot be reached .* do not fit either"),
    ],
)
def test_interpreters_that_cannot_be_helped(
    script: str | None, message: str, tmp_path: Path
) -> None:
    """Each reason why an image cannot run kernels is told; whatever it says of itself is only
    taken in if it makes sense."""
    python = tmp_path / "python3"
    if script is not None:
        facts: Any = {
            **{"has": False, "name": "cpython", "version": [3, 11], "is64": True},
            **{"threaded": False, "machine": "x86_64", "libc": "glibc 2.36"},
            **{"complete": [], "writable": str(tmp_path), "installed": []},
        }
        kind, _, rest = script.partition(" ")
        for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', rest):
            facts[name] = value if value == "pypy" else json.loads(value)
        answer = json.dumps(facts) if "=" in rest else rest
        if kind == "ANSWER":
            (tmp_path / "answer").write_text(f"\nsandbox-kernel-probe:{answer}\n")
            script = f"cat {tmp_path}/answer"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    with pytest.raises(KernelLaunchFailed, match=message) as failed:
        provide(python)
    assert "sandbox 'two'" in str(failed.value)


def test_packages_from_the_index_are_cached(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fetched once needs no index a second time, and another Python gets its own."""
    monkeypatch.setattr(wheels, "data_dir", lambda: data)
    folder = tmp_path / "wheels"
    make_wheel(folder, "native", tag="cp310-abi3-musllinux_1_1_aarch64")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    target = Target((3, 12), "aarch64", "musl", (1, 2))
    first = wheels.packages_for(target, ["native"])
    shutil.rmtree(folder)
    assert wheels.packages_for(target, ["native"]) == first
    assert (first / "native" / "__init__.py").is_file()
    with pytest.raises(SandboxError, match="no wheels"):
        wheels.packages_for(Target((3, 12), "aarch64", "glibc", (2, 36)), ["native"])
    assert [path.name for path in (data / "packages").iterdir()] == [first.name]
