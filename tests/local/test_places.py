"""One folder of records in two places: two containers on one volume, two hosts on one home."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox_kernel import host_identity
from sandbox_kernel.errors import SandboxElsewhere
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import creation_marker
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec
from tests.kernels.live import PATIENCE, jail_processes

ELSEWHERE = ["unshare", "--pid", "--uts", "--fork", "--mount", "--mount-proc"]
"""Another container: processes with other numbers, and another name."""

LIVE = """
import asyncio, socket, sys
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec
socket.sethostname("other-host")

async def main():
    client = LocalClient()
    handle = await client.create(SandboxSpec(name="theirs"))
    print("ready", flush=True)
    sys.stdin.readline()
    print((await handle.exec("echo", ["still here"], timeout=60)).stdout, end="", flush=True)
    await client.remove("theirs")

asyncio.run(main())
"""

pytestmark = pytest.mark.skipif(
    subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode != 0,
    reason="no namespaces can be made here",
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = Path(os.path.realpath(tempfile.mkdtemp(prefix="sk-")))
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(made / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", str(made / "run"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@contextmanager
def in_another_place() -> Iterator[subprocess.Popen[str]]:
    """A process in another container that shares our folders, with a sandbox named 'theirs'."""
    process = subprocess.Popen(
        [*ELSEWHERE, sys.executable, "-c", LIVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_sandbox_of_another_place_is_shown_and_left_alone(folder: Path) -> None:
    """A second container on the same volume starts and removes sandboxes of its own, sweeps, lists
    and tries to remove what the first has. The first one's sandbox lives on, with its record."""

    async def others() -> None:
        client = LocalClient()
        for _ in range(3):
            await client.create(SandboxSpec(name="ours"))
            await client.remove("ours")
        await client.sweep()
        assert await client.list() == ["theirs"]
        handle = await client.get("theirs")
        info = await handle.info()
        assert info.detail["place"] == "the host other-host"
        refused = "'theirs' belongs to the host other-host"
        for act in (handle.kill, handle.stop, lambda: client.remove("theirs")):
            with pytest.raises(SandboxElsewhere, match=refused):
                await act()
        with pytest.raises(SandboxElsewhere, match=refused):
            await handle.exec("true")

    with in_another_place() as process:
        asyncio.run(others())
        shown = subprocess.run(
            [sys.executable, "-I", "-m", "sandbox_kernel", "ps"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        assert "on the host other-host" in shown.stdout
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout is not None
        assert process.stdout.readline() == "still here\n"
        assert process.wait(PATIENCE) == 0
    assert jail_processes(folder) == []
    assert Records().list("local") == []


async def test_a_start_that_is_under_way_elsewhere_is_not_swept(folder: Path) -> None:
    """The process that makes a sandbox on another host is not to be seen here, and yet lives."""
    record = Record("local", "begun", "1" * 12, SandboxSpec(name="begun").to_dict())
    record.data["folders"] = {name: str(folder / name) for name in ("base", "workspace", "runtime")}
    creation_marker.begin(record)
    record.data["creator"] = [2**22 + 1, 1]  # no such process here
    record.place = {**host_identity.here(), "host": "other-host", "machine": "m", "boot": "b"}
    Records().reserve(record)
    await LocalClient().sweep()
    assert [found.name for found in Records().list("local")] == ["begun"]


def test_places() -> None:
    """The same boot and pid namespace is here, whatever the host is called by now; an earlier boot
    of this host has ended; all else is somebody else's. A record that does not say is ours."""
    here = host_identity.here()
    assert host_identity.where({}) == "here"
    assert host_identity.where(here) == "here"
    assert host_identity.where({**here, "host": "renamed"}) == "here"
    assert host_identity.where({**here, "boot": "another"}) == "before"
    assert host_identity.where({**here, "boot": "another", "host": "other"}) == "elsewhere"
    assert host_identity.where({**here, "pids": "pid:[1]"}) == "elsewhere"


def test_a_record_of_an_earlier_version_is_read(folder: Path) -> None:
    """It does not say where it was made, and counts as made here."""
    Records().reserve(Record("local", "old", "2" * 12, {"name": "old"}))
    path = folder / "data" / "records" / "local" / "old.json"
    values = json.loads(path.read_text())
    del values["place"]
    path.write_text(json.dumps(values))
    assert Records().load("local", "old").where == "here"


async def test_a_process_of_an_earlier_boot_is_not_taken_for_one_of_now(folder: Path) -> None:
    """After a reboot another process may have the number, and even the start time, that a record
    names. It is not signalled."""
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            start = Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()[19]
            record = Record("local", "before", "3" * 12, SandboxSpec(name="before").to_dict())
            for name in ("base", "workspace", "runtime"):
                record.data.setdefault("folders", {})[name] = str(folder / name)
            record.data["init"] = [bystander.pid, int(start)]
            record.place = {**host_identity.here(), "boot": "an earlier one"}
            Records().reserve(record)
            await LocalClient().remove("before")
            assert bystander.poll() is None
        finally:
            bystander.kill()
