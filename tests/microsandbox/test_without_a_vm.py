"""What of the backend can be shown where no microVM boots: its refusals, errors and readings."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("microsandbox")

from sandbox_kernel.errors import (
    SandboxNotFound,
    SandboxTimeout,
    SandboxUnavailable,
    SpecError,
    SpecRefused,
)
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.bootcheck import kvm_problem
from sandbox_kernel.sandboxes.microsandbox import MicrosandboxClient, images, machine, scripts
from sandbox_kernel.sandboxes.tiny_image import tiny_layout
from sandbox_kernel.spec import SandboxSpec


@pytest.fixture(scope="module")
def home() -> Iterator[str]:
    """The SDK's folder: a process has one for its life. Its name is short, for the sockets."""
    with tempfile.TemporaryDirectory(prefix="sk-") as folder:
        yield folder


@pytest.fixture(autouse=True)
def folders(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the user's is touched."""
    monkeypatch.setenv("MSB_HOME", home)
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def client() -> MicrosandboxClient:
    made = load_backend("microsandbox")
    assert isinstance(made, MicrosandboxClient)
    return made


async def create(client: MicrosandboxClient, **fields: Any) -> None:
    await client.create(SandboxSpec.from_mapping(fields))


# --- refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("processes", 100),
        ("open_files", 100),
        ("volume", "mine"),
        ("readable", ["/usr/share"]),
        ("python", "/usr/bin/python3"),
        ("secrets", ["token"]),
        ("cpus", 1.5),
    ],
)
async def test_what_a_vm_cannot_be_held_to_is_refused(
    client: MicrosandboxClient, field: str, value: Any
) -> None:
    """By its name and with a way out, before anything exists."""
    with pytest.raises(SpecRefused, match=rf"{field}=.*\. \S"):
        await create(client, image="python:3.12", **{field: value})
    assert await client.list() == []


async def test_an_image_must_be_named(client: MicrosandboxClient) -> None:
    """There is no default image that could be taken silently."""
    with pytest.raises(SpecError, match=r"needs an image.*image build"):
        await create(client)


async def test_a_path_that_is_no_layout(client: MicrosandboxClient, tmp_path: Path) -> None:
    """A folder without an OCI layout is not asked for at a registry."""
    with pytest.raises(SpecError, match="no folder with an OCI layout"):
        await create(client, image=str(tmp_path))


async def test_unknown_names(client: MicrosandboxClient) -> None:
    """Sandboxes and snapshots that are not there."""
    with pytest.raises(SandboxNotFound):
        await client.get("nobody")
    with pytest.raises(SandboxNotFound, match="snapshot"):
        await client.restore("nothing", SandboxSpec())
    await client.remove("nobody")
    await client.remove_snapshot("nothing")
    assert await client.snapshots() == []


# --- images


async def test_a_layout_is_loaded_once_for_each_content(tmp_path: Path) -> None:
    """Two folders with the same image have one name, which says what is in it."""

    async def load_twice() -> list[str]:
        layouts = [tiny_layout(tmp_path / name) for name in ("one", "two")]
        return [await images.load(layout) for layout in layouts]

    first, second = await load_twice()
    assert first == second
    assert first.startswith("localhost/sandbox-kernel/")


# --- machines that cannot boot a VM


async def _diagnose_and_create(client: MicrosandboxClient, image: str) -> tuple[Any, Any]:
    found = await client.diagnose()
    if found[-1].ok:
        pytest.skip("microVMs boot here")
    spec = SandboxSpec(name="hopeless", image=image, start_timeout=240)
    try:
        await client.create(spec)
    except (SandboxUnavailable, SandboxTimeout) as error:
        return found[-1], error
    raise AssertionError("a sandbox was made although no VM boots")


@pytest.mark.timeout(600)
async def test_a_machine_without_usable_kvm(client: MicrosandboxClient, tmp_path: Path) -> None:
    """``doctor`` and ``create`` say why, in words; nothing is left, neither record nor process."""
    image = str(tiny_layout(tmp_path / "tiny"))
    diagnosis, error = await _diagnose_and_create(client, image)
    assert diagnosis.ok is False
    assert diagnosis.fix
    if kvm_problem() is None:
        assert "does not boot" in diagnosis.what
        # On a busy machine, a VM that cannot run may take longer to fail than is waited for.
        assert "kvm" in diagnosis.what.lower() or "not up after" in diagnosis.what
    assert "hopeless" in str(error)
    assert any(words in str(error) for words in ("doctor", "/dev/kvm", "start_timeout"))
    assert await client.list() == []
    assert not list((machine.home() / "sandboxes").glob("sk-*"))


# --- readings


def _account(pid: int, status: int, version: int = 3) -> bytes:
    return struct.pack("<BBHIIIII", 0, version, 0, status, 0, 0, pid, 1).ljust(64, b"\0")


def test_the_signal_that_ended_a_command() -> None:
    """The latest account of a process counts; an exit code is no signal."""
    accounts = _account(7, 9) + _account(8, 15) + _account(7, 11) + _account(9, 3 << 8)
    assert scripts.exit_signal(accounts, 7) == 11
    assert scripts.exit_signal(accounts, 8) == 15
    assert scripts.exit_signal(accounts, 9) is None
    assert scripts.exit_signal(accounts, 10) is None


@pytest.mark.parametrize("accounts", [b"", b"x" * 63, os.urandom(6400), _account(7, 9, version=2)])
def test_accounts_are_the_word_of_the_sandbox(accounts: bytes) -> None:
    """Whatever they hold, the answer is a signal's number or nothing."""
    found = scripts.exit_signal(accounts, 7)
    assert found is None or 0 < found < 128


def test_a_network_that_is_not_closed_is_noticed() -> None:
    """A copy of a VM whose network the SDK opened would be refused."""
    closed = {"default_egress": "deny", "default_ingress": "deny", "rules": []}
    assert machine.network_is_off({"network": {"enabled": True, "ports": [], "policy": closed}})
    assert machine.network_is_off({"network": {"enabled": False}})
    for network in (
        {"enabled": True, "ports": []},
        {"enabled": True, "policy": {**closed, "default_egress": "allow"}},
        {"enabled": True, "policy": {**closed, "rules": [{"action": "allow"}]}},
        {"enabled": True, "policy": closed, "ports": [{"host": 1}]},
        None,
    ):
        assert not machine.network_is_off({"network": network})
    assert not machine.network_is_off(None)


def test_why_a_vm_ended() -> None:
    """From the SDK's log and the console, which are bounded when they are read."""
    logs = machine.folder("vm") / "logs"
    logs.mkdir(parents=True)
    assert "killed from outside" in machine.why_ended("vm")
    (logs / "runtime.log").write_text("T  ERROR relay: agent relay: handshake write failed\n")
    assert "killed from outside" in machine.why_ended("vm")
    (logs / "kernel.log").write_bytes(
        b"x" * 10**6 + b"\r\n[ 9.1] Out of memory: Killed process 12 (python3) total-vm:1kB\r\n"
    )
    assert machine.oom_kills("vm") == ["python3"]
    assert len(machine.console("vm")) < 300_000
    (logs / "runtime.log").write_text("INFO vm: sandbox idle, requesting guest shutdown idle=3\n")
    assert "lease" in machine.why_ended("vm")
    (logs / "runtime.log").write_text("T  ERROR krun: Received KVM_EXIT_INTERNAL_ERROR signal\n")
    assert "KVM_EXIT_INTERNAL_ERROR" in machine.why_not_started("vm")


async def test_a_creation_that_was_cut_short_is_swept(client: MicrosandboxClient) -> None:
    """The record of a creator that is no more goes; one that is being made stays."""
    for name, creator in (("dead", [2**22 + 1, 5]), ("alive", [os.getpid(), _start_time()])):
        record = Record("microsandbox", name, "1", SandboxSpec(name=name).to_dict())
        record.data = {"vm": f"sk-{name}-1", "creator": creator}
        Records().reserve(record)
    await client.sweep()
    assert await client.list() == ["alive"]


def _start_time() -> int:
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])
