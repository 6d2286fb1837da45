"""Internals of Jupyter's packages: what is there is used, and what is missing costs one feature."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from jupyter_server.services.sessions.sessionmanager import SessionManager

from sandbox_kernel.jupyter import jupyter_internals
from sandbox_kernel.jupyter.jupyter_internals import (
    ACTIVITY,
    ADOPTION,
    CULLING,
    ONLY_SANDBOXES,
    SESSIONS,
    START_ERRORS,
    Feature,
    ServerInternals,
)

FEATURES = (ACTIVITY, ADOPTION, CULLING, ONLY_SANDBOXES, SESSIONS, START_ERRORS)
LOG = logging.getLogger("test")


@pytest.fixture
def app() -> Any:
    """What the extension sees of a server."""
    manager = AsyncMappingKernelManager()  # type: ignore[no-untyped-call]
    sessions = SessionManager(kernel_manager=manager)  # type: ignore[no-untyped-call]
    return SimpleNamespace(kernel_manager=manager, session_manager=sessions)


def test_the_oldest_versions_are_those_of_the_project() -> None:
    """The warning names the lower bounds of pyproject.toml, which `make test-oldest` installs."""
    bounds = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    named = re.findall(r"(\w+) ([\d.]+) to", jupyter_internals.TESTED)
    assert [name for name, _ in named] == ["jupyter_server", "jupyter_client"]
    for name, oldest in named:
        assert f'"{name}>={oldest}"' in bounds


@pytest.mark.parametrize("feature", FEATURES)
def test_installed_versions(app: Any, feature: Feature, caplog: pytest.LogCaptureFixture) -> None:
    """The versions that are installed here have all internals, with the right signatures."""
    assert ServerInternals(app, LOG).has(feature)
    assert not caplog.records


@pytest.mark.parametrize(
    ("owner", "name", "feature"),
    [
        ("kernel_manager", "_finish_kernel_start", ADOPTION),
        ("kernel_manager", "start_watching_activity", ACTIVITY),
        ("kernel_manager", "cull_kernel_if_idle", CULLING),
        ("session_manager", "update_session", SESSIONS),
    ],
)
@pytest.mark.parametrize("change", ["missing", "not callable", "other arguments"])
def test_a_changed_version(
    app: Any, owner: str, name: str, feature: Feature, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One name is missing, or has become something else. Its feature is off, nothing is replaced,
    the log says what is missing and which versions work, and the other features stay."""
    changed = {"missing": None, "not callable": 7, "other arguments": lambda: None}[change]
    setattr(getattr(app, owner), name, changed)
    internals = ServerInternals(app, LOG)
    calls = [lambda usual, *args: None] * len(feature.needs)
    assert not internals.wrap(feature, *calls)
    assert getattr(getattr(app, owner), name) is changed
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(feature.without)
    assert f"{type(getattr(app, owner)).__name__}.{name} is not there" in warning
    assert jupyter_internals.TESTED in warning
    assert all(internals.has(other) for other in FEATURES if other is not feature)


def test_an_attribute_of_the_kernel_managers_class(
    app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels have managers of their own, of which there is none yet when a server starts: their
    class is looked at."""
    feature = Feature({"kernel_manager_class._no_such_name": None}, "Nothing works.")
    assert not ServerInternals(app, LOG).has(feature)
    assert "ServerKernelManager._no_such_name" in caplog.text


def test_a_kernel_that_cannot_be_heard(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without the stream that the server listens to, a kernel counts as used."""
    manager = SimpleNamespace(kernel_id="k-1", _activity_stream=None)
    assert not ServerInternals(app, LOG).hear_kernel(manager, lambda frames: None)
    assert "Kernel k-1 counts as used" in caplog.text


async def test_a_wrapped_method(app: Any) -> None:
    """It gets the replaced method, and the arguments."""

    async def around(usual: Any, kernel_id: str) -> str:
        return f"around {await usual(kernel_id)}"

    async def cull(kernel_id: str) -> str:
        return kernel_id

    app.kernel_manager.cull_kernel_if_idle = cull
    assert ServerInternals(app, LOG).wrap(CULLING, around, around)
    assert await app.kernel_manager.cull_kernel_if_idle("k") == "around k"


def test_encryption_is_not_asked_of_old_managers() -> None:
    """Managers before jupyter_client 8.10 have no policy for it."""
    assert not jupyter_internals.wants_encryption(object(), None)
    wants = jupyter_internals.wants_encryption
    for policy, supported, expected in (
        ("required", False, True),
        ("auto", True, True),
        ("auto", False, False),
        ("disabled", True, False),
    ):
        manager = SimpleNamespace(
            _transport_encryption_policy=lambda *asked, policy=policy: policy,
            _kernel_supports_curve_encryption=lambda supported=supported: supported,
        )
        assert wants(manager, None) is expected
