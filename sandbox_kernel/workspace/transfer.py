"""Persist and hydrate: the calls that the server extension, the provisioner and agents make."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.tunnel.tunnel import Tunnel
from sandbox_kernel.workspace.reports import (
    HydrateReport,
    Limits,
    OnProgress,
    SaveReport,
    UploadPolicy,
)
from sandbox_kernel.workspace.store import Store


class Attached(Protocol):
    """A sandbox with an agent attached, such as a ``SandboxedKernel``."""

    handle: SandboxHandle
    tunnel: Tunnel


async def persist(
    sandbox: Attached,
    store: Store,
    name: str,
    *,
    notebook: str = "",
    kernel: str = "",
    limits: Limits | None = None,
    progress: OnProgress | None = None,
) -> SaveReport:
    """Save the files of a sandbox's working folder as the next save of workspace ``name``.

    May be awaited on any loop. Costs what has changed since the last save. Cancelling the awaiting
    task cancels the transfer; the store is then as it was. ``notebook`` and ``kernel`` are only
    noted in the save. If nothing has changed, no save is made (``SaveReport.new``).

    Raises QuotaExceeded (with the biggest files), WorkspaceRefused (the sandbox sent what cannot
    be), StoreError (the store cannot be written), or what the tunnel raises.
    """
    raise NotImplementedError


async def hydrate(
    sandbox: Attached,
    store: Store,
    name: str,
    *,
    at: str = "",
    exact: bool = True,
    progress: OnProgress | None = None,
) -> HydrateReport:
    """Bring a save of workspace ``name`` (the latest, or ``at``: an id or the start of one) into
    the sandbox's working folder. Sends only what the sandbox lacks.

    ``exact`` also deletes files that are not in the save (but not those that saves ignore). A
    workspace without any save is no error: the report's ``save`` is None, and nothing is done.
    """
    raise NotImplementedError


async def upload(
    sandbox: Attached,
    store: Store,
    name: str,
    folder: str | Path,
    policy: UploadPolicy,
    *,
    notebook: str = "",
    limits: Limits | None = None,
    progress: OnProgress | None = None,
) -> HydrateReport | None:
    """First opening: what ``policy`` lets through of a host folder becomes the first save of the
    workspace (kind ``import``) and is brought into the sandbox. None if the policy is ``none``."""
    raise NotImplementedError
