"""What the server tells of its kernels' ways out: ``GET /sandbox-kernel/api/egress``, and an event
when something is denied."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

from sandbox_kernel.jupyter.configuration import place_of
from sandbox_kernel.jupyter.denial_lines import denial_lines
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.server_kernels import ServerKernels

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.kernels.decision_log import Denial

DENIAL_EVENTS = "https://sandbox-kernel.example/events/egress_denied/v1"
_SCHEMA = Path(__file__).with_name("egress_denied.yaml")
_MOST_DECISIONS = 50


class EgressEvents:
    """Tells clients of what is denied, for one server."""

    def __init__(self, kernels: ServerKernels) -> None:
        self._kernels = kernels
        kernels.app.event_logger.register_event_schema(_SCHEMA)

    def watch(self, kernel_id: str, provisioner: SandboxProvisioner) -> None:
        """From now on, tell of this kernel."""
        kernel = provisioner.kernel
        if kernel is None or kernel.way_out is None:
            return
        add, tell = self._kernels.app.io_loop.add_callback, partial(self._tell, kernel_id)
        kernel.way_out.decisions.on_denied = lambda denial: add(tell, provisioner, denial)

    def _tell(self, kernel_id: str, provisioner: SandboxProvisioner, denial: Denial) -> None:
        sandbox = provisioner.sandbox_name or ""
        _, paths = self._kernels.with_paths().get(kernel_id, (None, []))
        [message] = denial_lines([denial], sandbox, place_of("egress", provisioner))
        self._kernels.app.event_logger.emit(
            schema_id=DENIAL_EVENTS,
            data={
                "kernel_id": kernel_id,
                "sandbox": sandbox,
                "notebook": self._kernels.on_host(paths[0]) if paths else "",
                "host": denial.host,
                **({} if denial.port is None else {"port": denial.port}),
                "reason": denial.why,
                "command": denial.command(sandbox),
                "message": message,
            },
        )


class EgressHandler(APIHandler):
    """``GET /sandbox-kernel/api/egress``: for each kernel in a sandbox, or with ``?kernel=ID`` for
    one, its rules and what was decided of late."""

    auth_resource = "sandbox_kernel"

    def initialize(self, kernels: list[ServerKernels]) -> None:
        self._kernels = kernels

    @web.authenticated
    @authorized
    def get(self) -> None:
        wanted = self.get_query_argument("kernel", None)
        found = [
            facts_of(kernel_id, provisioner, paths)
            for kernels in self._kernels
            for kernel_id, (provisioner, paths) in kernels.with_paths().items()
            if wanted in (None, kernel_id) and provisioner.kernel is not None
        ]
        if wanted is not None and not found:
            raise web.HTTPError(404, "There is no kernel of this id in a sandbox.")
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps({"kernels": found}))


def facts_of(kernel_id: str, provisioner: SandboxProvisioner, paths: list[str]) -> dict[str, Any]:
    """What the REST API tells of one kernel; ``paths`` are those of its notebooks."""
    kernel = provisioner.kernel
    assert kernel is not None
    handle, way_out = kernel.handle, kernel.way_out
    policy = handle.spec.egress if way_out is None else way_out.policy
    enforced_by = "gateway" if way_out is not None else "backend" if handle.spec.egress else None
    return {
        "kernel_id": kernel_id,
        "sandbox": handle.name,
        "backend": handle.backend,
        "notebooks": paths,
        "enforced_by": enforced_by,
        "egress": policy.to_json(),
        "changed": way_out is not None and way_out.changed,
        "set_in": place_of("egress", provisioner),
        "denied": [_plain(one, handle.name) for one in way_out.decisions.denied_lately()]
        if way_out is not None
        else [],
        "decisions": way_out.decisions.events()[-_MOST_DECISIONS:] if way_out is not None else [],
    }


def _plain(denial: Denial, sandbox: str) -> dict[str, Any]:
    return {**asdict(denial), "reason": denial.why, "command": denial.command(sandbox)}
