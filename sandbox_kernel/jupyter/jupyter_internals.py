"""Everything here that depends on internals of jupyter_client and jupyter_server.

No other module uses underscore names of these packages, or replaces their methods. The server
extension checks at its start which internals are there (``ServerInternals``): if some are missing,
a warning names them and the feature that is off, and everything else works.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from traitlets.utils.importstring import import_item

TESTED = "jupyter_server 2.15 to 2.21 and jupyter_client 8.6 to 8.10"


# --- the kernel manager of a provisioner, in any program


def discard_unsent_requests(manager: Any) -> None:
    """Drop the shutdown_request that a dead kernel did not read; the next one would obey it."""
    control = getattr(manager, "_control_socket", None)
    if control is not None:
        control.linger = 0


def adopt_kernel(
    manager: Any,
    provisioner: Any,
    connection: Mapping[str, Any],
    launch_arguments: Mapping[str, Any],
) -> None:
    """Let a new manager go on with a kernel that runs already, and that its provisioner has."""
    manager.provisioner = provisioner
    manager._launch_args = dict(launch_arguments)  # for restarts
    manager._attempted_start = True
    manager.load_connection_info(connection)
    manager.write_connection_file()


def kernelspec_of(values: Mapping[str, Any]) -> KernelSpec:
    """A kernelspec that is on no disk. Older versions of Jupyter do not know all of its fields."""
    known = KernelSpec.class_trait_names()
    return KernelSpec(**{"resource_dir": "", **{k: v for k, v in values.items() if k in known}})


def use_kernelspec(manager: Any, kernelspec: Mapping[str, Any]) -> None:
    """Let a manager use this kernelspec, whatever is on disk under its kernel's name."""
    manager._kernel_spec = kernelspec_of(kernelspec)


def never_shut_down(manager: Any) -> None:
    """Let a manager's shutdown only let go of its kernel, which is another process's."""

    async def let_go(*args: Any, **kwargs: Any) -> None:
        manager.stop_restarter()
        manager._close_control_socket()
        manager.cleanup_connection_file()

    manager.shutdown_kernel = let_go


def shut_down_again(manager: Any) -> None:
    """Undo ``never_shut_down``."""
    del manager.shutdown_kernel


def wants_encryption(manager: Any, requested: Any) -> bool:
    """Whether the manager's policy asks for CurveZMQ keys (since jupyter_client 8.10)."""
    policy_of = getattr(manager, "_transport_encryption_policy", None)
    if policy_of is None:
        return False
    policy = policy_of(requested) if requested is not None else policy_of()
    supports = getattr(manager, "_kernel_supports_curve_encryption", lambda: False)
    return bool(policy == "required" or (policy == "auto" and supports()))


# --- the server


def wrap_method(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method: ``around`` gets the replaced one as its first argument."""
    setattr(owner, name, functools.partial(around, getattr(owner, name)))


def is_stopping(serverapp: Any) -> bool:
    """Whether the server has begun to stop."""
    return bool(getattr(serverapp, "_stopping", False))


@dataclass(frozen=True)
class Feature:
    """What the extension does with internals, and what happens without them."""

    needs: Mapping[str, int | None]
    """Names that objects of the server's must have (``owner.name``), in the order in which
    ``wrap`` replaces them; those with a number must be callable with that many arguments."""
    without: str


ADOPTION = Feature(
    {
        "kernel_manager._kernels": None,
        "kernel_manager._kernel_connections": None,
        "kernel_manager._finish_kernel_start": 1,
        "kernel_manager.track_message_type": 1,
        "kernel_manager_class._launch_args": None,
        "kernel_manager_class.post_start_kernel": 1,
    },
    "Kernels of an earlier server are not adopted; `sandbox-kernel ps` lists them.",
)
ACTIVITY = Feature(
    {"kernel_manager.start_watching_activity": 1, "kernel_manager.track_message_type": 1},
    "Kernels that have run no cell wait for the next server, too, and the sandbox of a kernel that "
    "the server gives up ends with its lease.",
)
CULLING = Feature(
    {"kernel_manager.cull_kernel_if_idle": 1, "kernel_manager.shutdown_kernel": 1},
    "Culling shuts idle kernels down and does not pause their sandboxes.",
)
SESSIONS = Feature(
    {"session_manager.save_session": 1, "session_manager.update_session": 1},
    "The next server adopts kernels without their sessions.",
)
START_ERRORS = Feature(
    {"kernel_manager.start_kernel": 0},
    "JupyterLab shows the errors of a kernel's start in long lines.",
)
LIVE_NOTEBOOKS = Feature(
    {"kernel_manager.start_kernel": 0, "kernel_manager.restart_kernel": 1},
    "A notebook of sandbox_kernel.Notebook gets a new kernel, not its live one.",
)
ONLY_SANDBOXES = Feature(
    {"provisioner_factory.create_provisioner_instance": 3},
    "The server cannot keep kernels outside of a sandbox from being started.",
)


class ServerInternals:
    """The internals of one running server. ``has`` says which features they allow."""

    def __init__(self, serverapp: Any, log: logging.Logger) -> None:
        self._manager = serverapp.kernel_manager
        self._log = log
        self._owners: dict[str, Any] = {
            "kernel_manager": self._manager,
            "kernel_manager_class": import_item(self._manager.kernel_manager_class),
            "session_manager": serverapp.session_manager,
            "provisioner_factory": KernelProvisionerFactory.instance(parent=self._manager),
        }

    def has(self, feature: Feature) -> bool:
        """Whether a feature is possible. If it is not, a warning says what is missing."""
        missing = []
        for need, arguments in feature.needs.items():
            owner, name = self._find(need)
            if not _fits(getattr(owner, name, None), arguments):
                missing.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
        if missing:
            self._log.warning(
                "%s The reason: %s is not there, or has changed, in jupyter_server %s with "
                "jupyter_client %s. sandbox-kernel is tested with %s.",
                *(feature.without, ", ".join(missing)),
                *(version("jupyter_server"), version("jupyter_client"), TESTED),
            )
        return not missing

    def wrap(self, feature: Feature, *around: Callable[..., Any]) -> bool:
        """Replace the methods that a feature needs, in their order. False if it is not possible."""
        if not self.has(feature):
            return False
        for need, call in zip(feature.needs, around, strict=False):
            wrap_method(*self._find(need), call)
        return True

    def _find(self, need: str) -> tuple[Any, str]:
        owner, _, name = need.partition(".")
        return self._owners[owner], name

    async def enter_kernel(
        self, kernel_id: str, manager: Any, launch_arguments: Mapping[str, Any]
    ) -> None:
        """Put the manager of a kernel that runs already where ``start_kernel`` would put it."""
        manager._launch_args = dict(launch_arguments)  # for restarts
        manager._attempted_start = True
        await manager.post_start_kernel()
        manager.ready.set_result(None)
        self._manager._kernels[kernel_id] = manager
        self._manager._kernel_connections[kernel_id] = 0
        await self._manager._finish_kernel_start(kernel_id)
        self._manager.initialize_culler()

    def hear_kernel(self, manager: Any, hear: Callable[[list[bytes]], None]) -> bool:
        """Call ``hear`` with each iopub message that the server gets. False if it cannot be."""
        stream = getattr(manager, "_activity_stream", None)
        usual = getattr(stream, "_recv_callback", None)
        if stream is None or not callable(usual):
            self._log.warning(
                "Kernel %s counts as used: its activity cannot be followed in jupyter_server %s. "
                "sandbox-kernel is tested with %s.",
                *(manager.kernel_id, version("jupyter_server"), TESTED),
            )
            return False

        def both(frames: list[bytes]) -> None:
            usual(frames)
            hear(frames)

        stream.on_recv(both)
        return True


def _fits(found: Any, arguments: int | None) -> bool:
    if arguments is None:
        return found is not None
    try:
        inspect.signature(found).bind(*range(arguments))
    except (TypeError, ValueError):
        return False  # also if it is not callable
    return True


def set_protocol_version(manager: Any, protocol: str) -> None:
    """Tell connections a kernel's protocol version: a busy kernel does not answer requests."""
    known: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
    known.set_result({"protocol_version": protocol} if protocol else {})
    manager._kernel_info_future = known
