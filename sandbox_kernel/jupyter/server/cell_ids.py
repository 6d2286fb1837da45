"""Which cell of the notebook a request is about, as the browser says it: JupyterLab puts the cell's
id into the metadata of what it sends. For the audit of kernels that have a gateway."""

from __future__ import annotations

from typing import Any

from jupyter_server.services.kernels.connection.base import deserialize_msg_from_ws_v1

from sandbox_kernel.jupyter.envelopes import json_object
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner


def note_cell_id(provisioner: Any, request: dict[str, Any], message: str | bytes) -> None:
    """``request`` is the header of an execute request, and ``message`` all of it, which the caller
    has found to be one."""
    kernel = provisioner.kernel if isinstance(provisioner, SandboxProvisioner) else None
    if kernel is None or kernel.cells is None:
        return
    if isinstance(message, bytes):
        metadata = json_object(deserialize_msg_from_ws_v1(message)[1][2])
    else:
        metadata = (json_object(message) or {}).get("metadata")
    cell_id = metadata.get("cellId") if isinstance(metadata, dict) else None
    if isinstance(cell_id, str) and isinstance(request.get("msg_id"), str):
        kernel.cells.name(request["msg_id"], cell_id)
