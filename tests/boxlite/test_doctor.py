"""Whether microVMs can boot here, found out by booting one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes import bootcheck
from sandbox_kernel.sandboxes.base import Diagnosis
from sandbox_kernel.sandboxes.bootcheck import boot_check, kvm_problem
from sandbox_kernel.sandboxes.boxlite import BoxliteClient


def test_no_kvm(tmp_path: Path) -> None:
    """No device, something that is none, and one that this user may not open."""
    missing = kvm_problem(tmp_path / "kvm")
    assert missing is not None
    assert missing.ok is False
    assert "there is no" in missing.what
    assert "modprobe" in missing.fix
    (tmp_path / "kvm").touch()
    assert "no device" in str(kvm_problem(tmp_path / "kvm"))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be somebody else")
def test_no_permission() -> None:
    """The fix names the group."""
    device = Path("/dev/kmsg")  # any device that others may not write
    if device.stat().st_mode & 0o002:
        pytest.skip("everybody may write it here")
    pid = os.fork()
    if not pid:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        found = kvm_problem(device)
        os._exit(0 if found is not None and "usermod" in found.fix else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def check(outcomes: list[BaseException | None], version: str = "1", **more: bool) -> Diagnosis:
    """A boot check whose boots end as given; each is used once."""

    async def boot() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    return asyncio.run(boot_check("some-backend", version, boot, timeout=5, **more))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that can be opened stands for /dev/kvm: nothing is booted in these tests."""
    monkeypatch.setattr(bootcheck, "KVM", Path("/dev/null"))
    monkeypatch.setattr(bootcheck, "kvm_problem", lambda: None)


@pytest.mark.usefixtures("device")
def test_the_outcome_is_remembered() -> None:
    """For this kernel, this version of the package and this device; a failure, for an hour."""
    boots: list[BaseException | None] = [RuntimeError("KVM said no"), None, None]
    failed = check(boots)
    assert failed.ok is False
    assert "KVM said no" in failed.what
    assert check(boots) == failed
    assert len(boots) == 2
    assert check(boots, version="2").ok is True
    assert check(boots, version="2").ok is True
    assert len(boots) == 1


@pytest.mark.usefixtures("device")
def test_an_old_failure_is_tried_again(own_dirs: Path) -> None:
    """The machine may have been changed meanwhile in a way that does not show."""
    check([RuntimeError("no")])
    path = own_dirs / "data" / "bootchecks" / "some-backend.json"
    kept = json.loads(path.read_text())
    kept["time"] -= bootcheck.FAILURE_KEPT + 1
    path.write_text(json.dumps(kept))
    assert check([None]).ok is True


@pytest.mark.slow
async def test_doctor_boots_a_real_vm() -> None:
    """On a machine where VMs boot it says so; on any other one, exactly why they do not, what to
    do, and that it is BoxLite's VM and nothing else that was tried."""
    pytest.importorskip("boxlite")
    client = BoxliteClient()
    found = [*await client.diagnose()]
    assert found
    last = found[-1]
    if last.ok:
        assert "boots" in last.what
        return
    assert "kvm" in last.what
    assert last.fix
    if "does not boot" in last.what:
        assert any(word in last.what for word in ("KVM_EXIT", "timed out", "krun"))
        assert "nested virtualization" in last.fix
    assert [*await client.diagnose()] == found  # this time without booting
    assert await client.list() == []
