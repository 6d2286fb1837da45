"""What a session's sandbox is to be, and what of that its serialized state keeps.

A state may lie in a database and come back from there, so it has no secret in it and gives no right
over the host: environment, secrets' sources, host folders and the like stay with the client. The
sandbox's name follows from the session's id, so a state can name no other sandbox than one that
was made for a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSessionState
from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
from pydantic import Field, field_validator

from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.sandboxes.base import Capabilities
from sandbox_kernel.spec import SandboxSpec

BACKEND_ID = "sandbox_kernel"
KEPT_IN_STATE = frozenset(
    {
        *("image", "memory_mib", "cpus", "processes", "open_files", "disk_mib", "volume"),
        *("egress", "labels", "lease_seconds", "delete_after_seconds", "start_timeout", "audit"),
    }
)
"""Settings that a session's state keeps. All others need the client's own options."""


class SandboxKernelClientOptions(BaseSandboxClientOptions):
    """Which backend, and any setting of SandboxSpec as a keyword: ``memory_mib=1024``."""

    type: Literal["sandbox_kernel"] = "sandbox_kernel"
    backend: str = "local"
    settings: dict[str, Any] = Field(default_factory=dict)
    """The settings, as plain JSON types."""
    exposed_ports: tuple[int, ...] = ()
    """Ports in the sandbox that lead out to this host's loopback, once they are asked for."""
    pause_on_exit: bool = False
    """Pause the sandbox when its session is closed, if it is not deleted: it goes on where it was
    when it is resumed."""

    def __init__(
        self,
        backend: str = "local",
        *,
        exposed_ports: tuple[int, ...] = (),
        pause_on_exit: bool = False,
        type: Literal["sandbox_kernel"] = "sandbox_kernel",  # noqa: A002  (the SDK's name)
        settings: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            type=type,
            backend=backend,
            settings={**(settings or {}), **more},
            exposed_ports=exposed_ports,
            pause_on_exit=pause_on_exit,
        )

    @field_validator("settings")
    @classmethod
    def _check(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if "name" in settings:
            raise ValueError("name is the session's own; leave it out")
        return _plain(SandboxSpec.from_mapping(settings, where="the options"))


class SandboxKernelSessionState(SandboxSessionState):
    """Enough to find a session's sandbox again, or to make another one like it."""

    type: Literal["sandbox_kernel"] = "sandbox_kernel"
    backend: str = "local"
    settings: dict[str, Any] = Field(default_factory=dict)
    withheld: tuple[str, ...] = ()
    """Names of settings that the sandbox was made with, and that a state does not keep."""
    pause_on_exit: bool = False

    @field_validator("settings")
    @classmethod
    def _only_kept(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if refused := sorted(set(settings) - KEPT_IN_STATE):
            raise ValueError(f"a session's state cannot set {', '.join(refused)}")
        return _plain(SandboxSpec.from_mapping(settings, where="the session's state"))

    @property
    def sandbox(self) -> str:
        """The sandbox's name."""
        return f"agent-{self.session_id.hex}"


def kept(options: SandboxKernelClientOptions) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a session's state keeps of the settings, and the names of the others."""
    settings = {key: value for key, value in options.settings.items() if key in KEPT_IN_STATE}
    return settings, tuple(sorted(set(options.settings) - set(settings)))


def spec_for(
    state: SandboxKernelSessionState,
    options: SandboxKernelClientOptions | None,
    capabilities: Capabilities,
) -> SandboxSpec:
    """The sandbox of a session, from the options of its client if it has some for this backend,
    else from its state. SpecRefused if the state withholds a setting that then nobody gives."""
    mine = options if options is not None and options.backend == state.backend else None
    settings: Mapping[str, Any] = mine.settings if mine is not None else state.settings
    if missing := [name for name in state.withheld if name not in settings]:
        raise SpecRefused(
            f"Sandbox {state.sandbox!r} is gone, and no other one was made for its session: it had "
            f"{', '.join(missing)}, which a session's state does not keep. Resume it with "
            f"SandboxKernelClient(options=...) that have it."
        )
    spec = SandboxSpec.from_mapping({**settings, "name": state.sandbox}, where="the options")
    readable = (*spec.readable, *granted_paths(state.manifest, state.backend, capabilities))
    return SandboxSpec.from_mapping({**spec.to_dict(), "readable": list(dict.fromkeys(readable))})


def granted_paths(manifest: Manifest, backend: str, capabilities: Capabilities) -> list[str]:
    """Host paths that the manifest's path grants show to the sandbox. ValueError for a grant that
    the backend cannot give."""
    shown = []
    for grant in manifest.extra_path_grants:
        if grant.host_path is None:
            continue
        if not capabilities.readable or not grant.read_only or grant.host_path != grant.path:
            how = "read-only and at the same path only" if capabilities.readable else "not at all"
            raise ValueError(
                f"The grant of {grant.path!r} cannot be given: the backend {backend!r} shows paths "
                f"of the host {how}. Copy the files with a LocalDir entry, or leave host_path out."
            )
        shown.append(grant.host_path)
    return shown


def _plain(spec: SandboxSpec) -> dict[str, Any]:
    return {key: value for key, value in spec.to_dict().items() if key != "name"}
