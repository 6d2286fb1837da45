"""Where a kernel's settings come from, and which of them wins.

From weakest to strongest: the kernelspec's ``metadata.kernel_provisioner.config``, traitlets
configuration, the environment (``SANDBOX_KERNEL_*``). What a program has given itself, in the call
that starts the kernel, is stronger than all of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from sandbox_kernel.errors import SpecError
from sandbox_kernel.settings import ENV_PREFIX, settings_of, values_from_environment
from sandbox_kernel.spec import NOTEBOOK, SETTINGS, KernelConfiguration, SandboxSpec
from sandbox_kernel.suggestions import check_keys, closest

GIVEN = "given"
"""In a kernelspec's ``metadata.kernel_provisioner``: names of the settings in its ``config`` that a
program has given itself, so that the environment does not change them."""
_WORKSPACE = SETTINGS["workspace"].variable
"""Names a workspace, or the notebook whose workspace is meant."""
_OTHER_VARIABLES = (
    *("DATA_DIR", "RUNTIME_DIR", "STORE", "LABEL", "NO_CGROUP", "BOOT_TIMEOUT", "LIVE_BUDGET"),
    *("RIG", "RIG_SECONDS", "NO_DISK_IMAGE"),
    *("ID", "COMMAND", "PACKAGES", "WARM_FD", "SAVED_PYTHONPATH"),  # in sandboxes
)
"""Variables of ours that are no settings of a kernel."""
_TESTS = "TEST_"


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each unknown variable of ours: a misspelled limit would be no limit."""
    known = (*map(str.upper, SETTINGS), *_OTHER_VARIABLES)
    found = []
    for variable in environ:
        name = variable.removeprefix(ENV_PREFIX)
        if name in (variable, *known) or name.startswith(_TESTS) or not environ[variable]:
            continue
        close = closest(name, known)
        hint = f"Did you mean {ENV_PREFIX}{close}?" if close else "Unset it."
        found.append(f"The environment has {variable}, which means nothing. {hint}")
    return found


def environment_beside(given: Collection[str]) -> dict[str, str]:
    """The environment without the variables of these settings."""
    hidden = {SETTINGS[name].variable for name in given if name in SETTINGS}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def place_of(name: str, provisioner: Any) -> str:
    """Where a setting of the provisioner's kernels is set, or can be; for people."""
    one = SETTINGS[name]
    if os.environ.get(one.variable):
        return one.variable
    if getattr(provisioner, name) is not None:
        return f"c.SandboxProvisioner.{name}"
    kernel_name = str(getattr(provisioner.parent, "kernel_name", ""))
    return f"the kernelspec {kernel_name!r}" if kernel_name else one.variable


def read_configuration(
    *layers: Mapping[str, Any],
    default_name: str,
    environ: Mapping[str, str] | None = None,
    where: str = "the kernel's configuration",
    not_for: str = "",
) -> KernelConfiguration:
    """Combine the layers, weakest first, then the environment. Settings that are only for
    ``not_for`` (``launcher`` or ``provisioner``) are unknown here."""
    environ = os.environ if environ is None else environ
    if unknown := unknown_variables(environ):
        raise SpecError(" ".join(unknown))
    known = {key: one for key, one in SETTINGS.items() if not not_for or one.only_for != not_for}
    values: dict[str, Any] = {}
    for layer in layers:
        check_keys(layer, known, where)
        values.update({key: value for key, value in layer.items() if value is not None})
    notebook = environ.get(_WORKSPACE, "")
    if notebook.endswith(NOTEBOOK):
        environ = {key: value for key, value in environ.items() if key != _WORKSPACE}
        values.pop("workspace", None)
    else:
        notebook = ""
    values |= values_from_environment(known, environ)
    if values.get("persist") and str(values.get("files", "")).startswith("mount"):
        raise SpecError(
            f"{where}: with files={values['files']} the folder itself is the workspace, and "
            f"nothing is saved elsewhere. Leave persist out, or choose files=copy."
        )
    named = values.get("name", default_name) != default_name
    spec = {"name": default_name} | {k: values[k] for k in settings_of(SandboxSpec) if k in values}
    try:
        return KernelConfiguration(
            spec=SandboxSpec(**spec),
            **{key: value for key, value in values.items() if key not in spec},
            named=named,
            notebook=os.path.abspath(notebook) if notebook else "",
        )
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
