"""Where a kernel's settings come from, and which of them wins.

From weakest to strongest: the kernelspec's ``metadata.kernel_provisioner.config``, traitlets
configuration, the environment (``SANDBOX_KERNEL_*``).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sandbox_kernel.errors import SpecError
from sandbox_kernel.spec import ENV_PREFIX, NOTEBOOK, SandboxSpec

DEFAULT_BACKEND = "local"
SPEC_FIELDS = tuple(field.name for field in fields(SandboxSpec))
OWN_HELP: dict[str, str] = {
    "backend": "which kind of sandbox; `sandbox-kernel doctor` lists them",
    "guest_transport": "how the kernel listens inside: ipc, or tcp for kernels that need it",
    "keep_on_exit": "leave the sandbox to its lease when this process ends without a shutdown",
    "pause_on_exit": "pause the sandbox instead of deleting it when its kernel is shut down",
    "idle_pause_seconds": "pause the sandbox when its kernel has been idle for so long (0: never)",
    "recreate": "make a new hosted sandbox if a kernel is restarted whose sandbox is gone",
    "warm_start": "fork ipykernel from an interpreter that has its imports done",
    "pool_size": "how many sandboxes wait ready for the next kernels (0: none)",
    "pool_idle_seconds": "the pool is emptied when no kernel has been started for so long",
    "persist": "save the files of a named workspace, or with the notebook, and bring them back",
    "upload": "what the sandbox gets of the notebook's folder, at each start: none, folder, globs",
    "mirror": "write saved files back to the notebook's folder after every save",
    "mirror_delete": "with mirror: files that it made, and that were deleted since, go to a trash "
    "folder",
}
OWN_FIELDS = tuple(OWN_HELP)
_WORKSPACE = ENV_PREFIX + "WORKSPACE"
"""Names a workspace, or the notebook whose workspace is meant."""


@dataclass(frozen=True)
class KernelConfiguration:
    """All that the provisioner and the launcher need to know about the sandbox to be made."""

    spec: SandboxSpec
    backend: str = DEFAULT_BACKEND
    guest_transport: str = "ipc"
    """How the kernel's sockets look inside the sandbox: ``ipc``, or ``tcp`` for kernels that
    know nothing else."""
    keep_on_exit: bool = False
    """Leave the sandbox running when this process ends without shutting the kernel down."""
    pause_on_exit: bool = False
    """Pause the sandbox instead of deleting it, when its kernel is shut down or this process ends.
    A kernel that is started later with the same ``name`` goes on in it."""
    idle_pause_seconds: float = 0.0
    """Pause the sandbox when its kernel has been idle for so long; the next cell resumes it."""
    recreate: bool = False
    """Restarting a kernel whose hosted sandbox is gone makes a new one."""
    warm_start: bool = True
    """Fork ipykernel from an interpreter that has its imports done; False: always start afresh."""
    pool_size: int = 0
    """How many sandboxes are kept ready for the next kernels of this kind."""
    pool_idle_seconds: float = 600.0
    persist: bool = True
    """Save the kernel's files in its workspace, if it has one, and bring them back."""
    upload: str | tuple[str, ...] = "none"
    """``none``, ``folder`` or globs: what of the notebook's folder is brought into the sandbox;
    when there is a save, as far as it has changed since."""
    mirror: bool = False
    """Write what was saved back to the notebook's folder."""
    mirror_delete: bool = False
    """With ``mirror``: what it made there, and the sandbox has deleted, goes to a trash folder."""
    named: bool = False
    """The user has chosen the sandbox's name."""
    notebook: str = ""
    """Path of the notebook whose workspace it is, if the environment says that."""


def check_keys(values: Mapping[str, Any], where: str) -> None:
    """SpecError for a key that is not known."""
    known = (*OWN_FIELDS, *SPEC_FIELDS)
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            raise SpecError(f"{where} has an unknown key {key!r}. {hint}")


_NO_SETTINGS = (
    *("DATA_DIR", "RUNTIME_DIR", "STORE", "LABEL", "NO_CGROUP", "BOOT_TIMEOUT", "LIVE_BUDGET"),
    *("RIG", "RIG_SECONDS", "VOLUME", "NO_DISK_IMAGE"),
    *("ID", "COMMAND", "PACKAGES", "WARM_FD", "SAVED_PYTHONPATH"),  # in sandboxes
)
"""Variables of ours that are no settings of a kernel."""
_TESTS = "TEST_"


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of the environment that looks like one of ours and is none: a
    limit with a slip in its name would otherwise be no limit."""
    known = (*(key.upper() for key in (*OWN_FIELDS, *SPEC_FIELDS)), *_NO_SETTINGS)
    found = []
    for variable in environ:
        name = variable.removeprefix(ENV_PREFIX)
        if name in (variable, *known) or name.startswith(_TESTS) or not environ[variable]:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {ENV_PREFIX}{close[0]}?" if close else "Unset it."
        found.append(f"The environment has {variable}, which means nothing. {hint}")
    return found


def read_configuration(
    *layers: Mapping[str, Any],
    default_name: str,
    environ: Mapping[str, str] | None = None,
    where: str = "the kernel's configuration",
) -> KernelConfiguration:
    """Combine the layers, weakest first, then the environment."""
    environ = os.environ if environ is None else environ
    if unknown := unknown_variables(environ):
        raise SpecError(" ".join(unknown))
    values: dict[str, Any] = {"name": default_name}
    for layer in layers:
        check_keys(layer, where)
        values.update({key: value for key, value in layer.items() if value is not None})
    notebook = environ.get(_WORKSPACE, "")
    if notebook.endswith(NOTEBOOK):
        environ = {key: value for key, value in environ.items() if key != _WORKSPACE}
        values.pop("workspace", None)
    else:
        notebook = ""
    for key in OWN_FIELDS:
        if environ.get(ENV_PREFIX + key.upper()):
            values[key] = environ[ENV_PREFIX + key.upper()]
    own = {key: values.pop(key) for key in OWN_FIELDS if key in values}
    transport = own.get("guest_transport", "ipc")
    if transport not in ("ipc", "tcp"):
        raise SpecError(f"{where}: guest_transport is 'ipc' or 'tcp', not {transport!r}.")
    return KernelConfiguration(
        spec=SandboxSpec.from_mapping(values, where=where).override_from_env(environ),
        backend=str(own.get("backend", DEFAULT_BACKEND)),
        guest_transport=transport,
        keep_on_exit=_boolean("keep_on_exit", own.get("keep_on_exit", False), where),
        pause_on_exit=_boolean("pause_on_exit", own.get("pause_on_exit", False), where),
        idle_pause_seconds=_number("idle_pause_seconds", own.get("idle_pause_seconds", 0), where),
        recreate=_boolean("recreate", own.get("recreate", False), where),
        warm_start=_boolean("warm_start", own.get("warm_start", True), where),
        pool_size=int(_number("pool_size", own.get("pool_size", 0), where)),
        pool_idle_seconds=_number("pool_idle_seconds", own.get("pool_idle_seconds", 600), where),
        persist=_boolean("persist", own.get("persist", True), where),
        upload=_upload(own.get("upload", "none"), where),
        mirror=_boolean("mirror", own.get("mirror", False), where),
        mirror_delete=_boolean("mirror_delete", own.get("mirror_delete", False), where),
        named=values["name"] != default_name or bool(environ.get(ENV_PREFIX + "NAME")),
        notebook=os.path.abspath(notebook) if notebook else "",
    )


def _upload(value: Any, where: str) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(glob, str) for glob in value):
        return tuple(value)
    raise SpecError(f"{where}: upload is 'none', 'folder' or a list of globs, not {value!r}.")


def _number(key: str, value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < 1e9 or isinstance(value, bool):
        raise SpecError(f"{where}: {key} takes a number that is not negative, not {value!r}.")
    return number


def _boolean(key: str, value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise SpecError(f"{where}: {key} is true or false, not {value!r}.")
