"""The store on S3, through the real s3fs client, against a local server that misbehaves."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from sandbox_kernel.errors import SandboxUnavailable, StoreError
from sandbox_kernel.workspace.exports import export
from sandbox_kernel.workspace.garbage import collect, verify
from sandbox_kernel.workspace.store import Store
from tests.workspace.conftest import NewGuest
from tests.workspace.faultyproxy import FaultyProxy
from tests.workspace.guests import snapshot

READ_TIMEOUT = 1.5


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """An S3 server behind a proxy, and s3fs set up to use it."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    proxy = FaultyProxy(port, seed=7, stall=2 * READ_TIMEOUT)
    settings = {
        "endpoint_url": proxy.url,
        "key": "testing",
        "secret": "testing",
        "config_kwargs": {"read_timeout": READ_TIMEOUT, "retries": {"max_attempts": 1}},
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield proxy
    proxy.close()
    server.stop()


@pytest.fixture
def url(proxy: FaultyProxy) -> str:
    bucket = f"bucket-{secrets.token_hex(4)}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/workspaces"


def test_s3(url: str, new_guest: NewGuest, tmp_path: object) -> None:
    """All that works in a folder works there: history, bringing in, export, garbage."""
    guest, other = new_guest("one"), new_guest("two")
    store = Store.open(url)
    for number in range(3):
        (guest.folder / "f").write_bytes(os.urandom(200_000))
        (guest.folder / f"n{number}").write_text("x")
        guest.persist(store)
    fresh = Store.open(url)
    assert fresh.id == store.id
    other.hydrate(fresh)
    assert snapshot(other.folder) == snapshot(guest.folder)
    assert len(export(fresh, "work", f"{tmp_path}/target").written) == 4
    for save in fresh.saves("work")[:2]:
        fresh.remove("work", save.id)
    assert collect(fresh, grace=0).packs_deleted >= 1
    report = verify(Store.open(url))
    assert (report.saves, report.problems) == (1, [])
    assert fresh.rename("work", "moved")
    assert Store.open(url).names() == ["moved"]
    fresh.remove("moved")
    collect(fresh, grace=0)
    assert not fresh.packs.names()


def test_others_clean_up_on_s3(url: str, new_guest: NewGuest) -> None:
    """A process that lives on reads what another's gc has rewritten, and makes a store that was
    deleted again."""
    guest, other = new_guest("one"), new_guest("two")
    store = Store.open(url)
    for number in range(34):
        (guest.folder / f"f{number}").write_text(str(number))
        guest.persist(store)
    assert collect(Store.open(url), grace=0).packs_rewritten == 34
    other.hydrate(store)
    assert snapshot(other.folder) == snapshot(guest.folder)
    fsspec.filesystem("s3").rm(url, recursive=True)
    (guest.folder / "more").write_text("more")
    assert guest.persist(store).new
    other.hydrate(Store.open(url))
    assert snapshot(other.folder) == snapshot(guest.folder)


@pytest.mark.slow
def test_nothing_is_lost_on_a_bad_day(url: str, proxy: FaultyProxy, new_guest: NewGuest) -> None:
    """One call in six is answered with 500, never answered, or answered without anybody hearing
    it: every save that was reported is there, whole, and comes back."""
    guest, other = new_guest("one"), new_guest("two")
    proxy.rate = 0.17
    store = Store.open(url)
    made, trees = [], []
    for number in range(6):
        (guest.folder / "f").write_bytes(os.urandom(100_000))
        (guest.folder / f"n{number}").write_text("x")
        trees.append(snapshot(guest.folder))
        made.append(guest.persist(store).save.id)
    fresh = Store.open(url)
    other.hydrate(fresh)
    assert snapshot(other.folder) == trees[-1]
    assert [save.id for save in fresh.saves("work")] == made
    assert sum(proxy.faults.values()) >= 5, proxy.faults
    proxy.rate = 0.0
    assert verify(fresh).problems == []
    for save, tree in zip(made, trees, strict=True):
        other.hydrate(fresh, at=save)
        assert snapshot(other.folder) == tree


@pytest.mark.slow
def test_a_store_that_is_out_of_reach(
    url: str, proxy: FaultyProxy, new_guest: NewGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that cannot be stored fails with the reason, and the next one brings everything."""
    guest = new_guest("one")
    store = Store.open(url)
    (guest.folder / "f").write_text("1")
    monkeypatch.setattr("sandbox_kernel.workspace.blobs.ATTEMPTS", 2)
    proxy.rate = 1.0
    with pytest.raises(StoreError, match="failed to"):
        guest.persist(store)
    proxy.rate = 0.0
    assert guest.persist(store).new
    assert verify(store).problems == []


def test_any_file_system_of_fsspec(new_guest: NewGuest) -> None:
    """Not only S3: whatever fsspec knows."""
    guest = new_guest("one")
    (guest.folder / "f").write_text("1")
    url = f"memory://{secrets.token_hex(4)}/store"
    store = Store.open(url)
    guest.persist(store)
    (guest.folder / "f").unlink()
    guest.hydrate(Store.open(url))
    assert (guest.folder / "f").read_text() == "1"
    with pytest.raises(StoreError, match="nonsense"):
        Store.open("nonsense://somewhere")


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has not installed the extra is told which it is."""
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(SandboxUnavailable, match=r"sandbox-kernel\[s3\]"):
        Store.open("s3://bucket/x")
