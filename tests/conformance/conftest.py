"""What any backend must do, as one suite with a row a backend.

    pytest tests/conformance                       all backends that are usable here
    pytest tests/conformance --backend NAME        this one, and it is an error if it is not usable
    pytest tests/conformance --backend NAME --backend-spec '{"image": "python:3.12"}'
    pytest tests/conformance -m live               hosted services whose API key is set, for real

A hosted service is emulated (tests/emulators), unless ``-m live`` asks for the real one: that costs
money, so a run makes a bounded number of sandboxes there, and deletes all that carry its label.

A test that is a coroutine function runs on the background loop, where the handles live; a plain
one is a Jupyter client, which has a loop of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.backends import backend_names, load_backend
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.sandboxes.capabilities import Capabilities
from sandbox_kernel.spec import SandboxSpec
from tests.helpers.coroutines import finish, run_coroutine
from tests.helpers.own_folders import own_folders
from tests.helpers.waiting import SLOWNESS

from ..emulators.running import Running, started
from .backends import Row, row

__all__ = ["run_coroutine"]
collect_ignore = [] if os.environ.get("SANDBOX_KERNEL_RIG") else ["test_bare_image.py"]
SCALE = 1 if SLOWNESS <= 1 else 10
"""By how much less data the tests send where sending takes longer."""
LIVE = "live "
BUDGET = int(os.environ.get("SANDBOX_KERNEL_LIVE_BUDGET", "80"))
"""Most sandboxes that a run makes at a hosted service."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        names = metafunc.config.getoption("--backend", None) or backend_names()
        live = [
            pytest.param(LIVE + name, marks=pytest.mark.live)
            for name in names
            if row(name).key and os.environ.get(row(name).key)
        ]
        metafunc.parametrize("backend", [*names, *live], indirect=True, scope="package")


@dataclass(frozen=True)
class Backend:
    """The backend under test."""

    client: SandboxClient
    row: Row
    prefix: str
    emulator: Running | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self.client.capabilities

    def spec(self, **fields: Any) -> SandboxSpec:
        """A spec for a sandbox of this test run."""
        fields.setdefault("name", f"{self.prefix}-{secrets.token_hex(3)}")
        return SandboxSpec.from_mapping({**self.row.spec, **fields})

    @contextlib.asynccontextmanager
    async def sandbox(self, **fields: Any) -> Any:
        """A sandbox of a test's own, removed afterwards."""
        handle = await self.client.create(self.spec(**fields))
        try:
            yield handle
        finally:
            await self.client.remove(handle.name)

    async def names(self) -> set[str]:
        """The sandboxes of this test run that exist now."""
        return {name for name in await self.client.list() if name.startswith(self.prefix)}

    def environment(self, **fields: Any) -> dict[str, str]:
        """Variables that make the kernelspec ``sandbox`` use this backend."""
        settings = {"backend": self.row.name, **self.row.spec, **fields}
        return {
            f"SANDBOX_KERNEL_{key.upper()}": value if isinstance(value, str) else json.dumps(value)
            for key, value in settings.items()
        }


@pytest.fixture(scope="package", autouse=True)
def apart() -> Iterator[None]:
    """Keep sandbox-kernel's own files of this run apart from the user's."""
    with own_folders():
        yield


@contextlib.contextmanager
def service(found: Row, live: bool) -> Iterator[Running | None]:
    """The service of a hosted backend: its emulator, or itself with a label of this run's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_KERNEL_LABEL", f"conformance-{secrets.token_hex(4)}")
        if live or not found.emulator:
            yield None
            return
        with started(found.emulator) as running:
            for name, value in running.env.items():
                patch.setenv(name, value)
            yield running


def on_a_budget(client: SandboxClient) -> None:
    """The client of a real service makes only so many sandboxes in this run."""
    made = 0
    create = client.create

    async def counted(spec: SandboxSpec) -> SandboxHandle:
        nonlocal made
        made += 1
        if made > BUDGET:
            pytest.fail(f"The run would make more than {BUDGET} sandboxes; see BUDGET.")
        return await create(spec)

    client.create = counted  # type: ignore[method-assign]


@pytest.fixture(scope="package")
def backend(request: pytest.FixtureRequest, apart: None) -> Iterator[Backend]:
    """Each backend in turn. When all tests are done, none of their sandboxes may be left."""
    live = request.param.startswith(LIVE)
    name = request.param.removeprefix(LIVE)
    named = request.config.getoption("--backend", None) is not None
    found = row(name)
    with service(found, live) as emulator:
        try:
            client = load_backend(name)
            problems = [f"{d.what}: {d.fix}" for d in finish(client.diagnose()) if d.ok is False]
        except SandboxError as error:
            problems = [str(error)]
        if problems:
            message = f"The backend {name!r} cannot be used here. {' '.join(problems)}"
            if named or found.emulator:
                pytest.fail(message)
            short = message.splitlines()[0][:120]  # it is printed for every test
            pytest.skip(f"{short} ... (sandbox-kernel doctor {name})")
        extra = request.config.getoption("--backend-spec", None) or {}
        found = replace(found, spec={**found.spec, **extra})
        made = Backend(client, found, f"conformance-{secrets.token_hex(4)}", emulator)
        if live:
            on_a_budget(client)
        yield made
        left = finish(made.names())
        for leftover in finish(client.list()) if live else left:
            finish(client.remove(leftover))
        finish(client.close())
        assert not left, f"The tests left sandboxes behind: {sorted(left)}"


@pytest.fixture(scope="package")
def sandbox(backend: Backend) -> Iterator[SandboxHandle]:
    """One sandbox for all tests that leave it as they found it."""
    handle = finish(backend.client.create(backend.spec(env={"FROM_SPEC": "for all commands"})))
    yield handle
    finish(backend.client.remove(handle.name))
