"""What is said about images before, and instead of, booting a VM."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandbox_kernel.errors import SandboxUnavailable, SpecError, SpecRefused
from sandbox_kernel.sandboxes.boxlite.backend import home
from sandbox_kernel.sandboxes.boxlite.image import find_image
from sandbox_kernel.sandboxes.tiny_image import tiny_layout
from sandbox_kernel.spec import SandboxSpec

LIMIT = 120.0


def test_no_image_says_how_to_make_one() -> None:
    """A microVM has no system of its own to show."""
    with pytest.raises(SpecError, match=r"sandbox-kernel image build --from debian -t NAME"):
        find_image(SandboxSpec(name="one"))


def test_a_folder_with_a_layout_is_an_image(tmp_path: Path) -> None:
    """And anything without a slash at its beginning is a name."""
    layout = tiny_layout(tmp_path / "tiny")
    options = find_image(SandboxSpec(image=str(layout)))
    assert options["rootfs_path"] == str(layout)
    assert options["env"] == []
    reference = "docker.io/library/python:3.12-slim"
    assert find_image(SandboxSpec(image=reference)) == {"image": reference}


def test_an_image_that_does_not_say_where_its_commands_are(tmp_path: Path) -> None:
    """BoxLite would not find them, so it is told the usual places."""
    layout = tiny_layout(tmp_path / "tiny")
    for blob in (layout / "blobs/sha256").iterdir():
        if b"PATH=/bin" in (content := blob.read_bytes()):
            blob.write_bytes(content.replace(b"PATH=/bin", b"OTHER=/x"))
    options = find_image(SandboxSpec(image=str(layout)))
    assert [name for name, _ in options["env"]] == ["PATH"]


def test_a_folder_without_a_layout_is_none(tmp_path: Path) -> None:
    """It is not taken for a registry's reference."""
    with pytest.raises(SpecError, match="oci-layout"):
        find_image(SandboxSpec(image=str(tmp_path)))


def test_an_image_for_another_machine(tmp_path: Path) -> None:
    """Is found out before a VM is made."""
    other = "aarch64" if os.uname().machine == "x86_64" else "x86_64"
    layout = tiny_layout(tmp_path / "tiny", other)
    with pytest.raises(SpecError, match=r"is for a\w+64, and this machine is a\w+64"):
        find_image(SandboxSpec(image=str(layout)))


def test_a_home_with_too_long_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix sockets would not fit."""
    monkeypatch.setenv("BOXLITE_HOME", "/tmp/" + "x" * 90)
    with pytest.raises(SandboxUnavailable, match="shorter"):
        home()


def test_the_tiny_image_is_reproducible(tmp_path: Path) -> None:
    """The same bytes each time, and its program runs."""
    first, second = tiny_layout(tmp_path / "a"), tiny_layout(tmp_path / "b")
    assert (first / "index.json").read_bytes() == (second / "index.json").read_bytes()
    assert tiny_layout(first) == first
    for blob in (first / "blobs" / "sha256").iterdir():
        if tarfile.is_tarfile(blob):
            with tarfile.open(blob) as layer:
                layer.extract("bin/true", tmp_path)
    true = tmp_path / "bin" / "true"
    assert subprocess.run([true], check=False, timeout=LIMIT).returncode == 0
    waiting = subprocess.Popen([true, "wait"])
    assert waiting.poll() is None
    waiting.kill()
    waiting.wait()


async def test_what_boxlite_cannot_size() -> None:
    """A VM has whole CPUs and a disk of whole GiB; nothing is rounded in silence."""
    pytest.importorskip("boxlite")
    from sandbox_kernel.sandboxes.boxlite.sdk_client import DirectClient

    client = DirectClient()
    with pytest.raises(SpecRefused, match=r"cpus=1\.5.*ask for 2"):
        await client.create(SandboxSpec(image="python:3", cpus=1.5))
    with pytest.raises(SpecRefused, match=r"disk_mib=1500.*ask for 2048"):
        await client.create(SandboxSpec(image="python:3", disk_mib=1500))


async def test_a_registry_that_cannot_be_reached() -> None:
    """The real SDK's error, in words that say what to do; no box and no record is left."""
    pytest.importorskip("boxlite")
    from sandbox_kernel.sandboxes.boxlite.sdk_client import DirectClient

    client = DirectClient()
    spec = SandboxSpec(name="far", image="registry.invalid/no-such:1", start_timeout=LIMIT)
    with pytest.raises(SandboxUnavailable, match=r"cannot be reached.*image build"):
        await client.create(spec)
    assert await client.list() == []
