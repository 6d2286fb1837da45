"""Writing, listing and removing the kernelspecs of sandboxed kernels.

Called by ``sandbox-kernel install``, ``list`` and ``uninstall``. The spec that the wheel installs
(``kernelspecs/sandbox``) is the template of all others, so they agree in all but what the user
asks for.

There are two kinds. A *provisioner* spec carries the request in
``metadata.kernel_provisioner.config`` and serves every client that starts kernels through
jupyter_client. A *launcher* spec serves clients that run ``argv`` themselves and know nothing of
provisioners, such as VS Code: its ``argv`` is ``sandbox_kernel launch`` with the same request as
one JSON argument.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager

from sandbox_kernel.errors import SpecError
from sandbox_kernel.jupyter.configuration import read_configuration
from sandbox_kernel.sandboxes.backends import backend_names
from sandbox_kernel.spec import SandboxSpec, check_name

PROVISIONER = "sandbox"
_LAUNCH = ("-m", "sandbox_kernel", "launch")
_CONFIG_OPTION = "--config"


@dataclass(frozen=True)
class InstalledKernelspec:
    """One kernelspec of ours, as found on disk."""

    name: str
    display_name: str
    path: str
    config: Mapping[str, Any]
    """``backend`` and the keys of SandboxSpec, unvalidated: users edit these files."""
    launcher: bool

    @property
    def backend(self) -> str:
        return str(self.config.get("backend", "local"))


def default_name(backend: str) -> str:
    """The kernel's name when the user gives none."""
    return PROVISIONER if backend == "local" else f"{PROVISIONER}-{backend}"


def write_kernelspec(
    *,
    name: str | None = None,
    display_name: str | None = None,
    backend: str = "local",
    spec_config: Mapping[str, Any] | None = None,
    pausing: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
    language: str = "python",
    launcher: bool = False,
    user: bool = False,
    prefix: str | None = None,
) -> str:
    """Install a kernelspec and return its folder. A spec of ours with that name is replaced.

    ``spec_config`` has the keys of SandboxSpec and is validated before anything is written.
    ``pausing`` adds when the sandbox is paused (``KernelConfiguration``).
    ``argv`` is the kernel's command line in the sandbox, for kernels other than ipykernel, with
    their ``language``. The spec goes into this interpreter's environment unless ``prefix`` names
    another one or ``user`` asks for the user's own Jupyter folder.

    Raises SpecError for a wrong request and if another project's kernelspec has that name.
    """
    config = {**_checked_config(backend, spec_config or {}), **(pausing or {})}
    read_configuration(config, default_name="kernel", environ={}, where="the kernelspec")
    name = check_name(name or default_name(backend), "A kernel name")
    if user and prefix is not None:
        raise SpecError("A kernelspec goes to the user's folder or to a prefix, not to both.")
    if argv is not None and not any("{connection_file}" in word for word in argv):
        raise SpecError(
            f"The kernel's command line {list(argv)!r} has no '{{connection_file}}', so the "
            f"kernel would not know where to listen. Put it where the kernel expects that path."
        )

    manager = _manager()
    prefix = None if user else prefix or sys.prefix
    kernels = Path(manager.user_kernel_dir) if user else Path(str(prefix), "share/jupyter/kernels")
    _check_replaceable(name, (kernels / name).absolute())

    kernel = _template()
    if display_name or backend != "local" or argv is not None:
        kernel["display_name"] = display_name or _display_name(backend, language)
    if argv is not None:
        # What the template says of debugger, encryption and protocol is true of ipykernel only.
        kernel = {k: kernel[k] for k in ("display_name", "metadata")}
        kernel["metadata"] = {"kernel_provisioner": kernel["metadata"]["kernel_provisioner"]}
        kernel |= {"argv": list(argv), "language": language}
    if launcher:
        del kernel["metadata"]["kernel_provisioner"]
        command = [] if argv is None else ["--", *argv]
        kernel["argv"] = [sys.executable, *_LAUNCH, "-f", "{connection_file}"]
        kernel["argv"] += [_CONFIG_OPTION, _literal_json(config), *command]
    else:
        kernel["metadata"]["kernel_provisioner"]["config"] = config

    with tempfile.TemporaryDirectory(prefix="sandbox-kernel-") as staging:
        source = Path(staging) / name
        shutil.copytree(_resources(), source)
        (source / "kernel.json").write_text(json.dumps(kernel, indent=1) + "\n", encoding="utf-8")
        return manager.install_kernel_spec(str(source), name, user=user, prefix=prefix)


def list_kernelspecs() -> list[InstalledKernelspec]:
    """All kernelspecs of ours that Jupyter finds from here, by name."""
    found = _manager().find_kernel_specs()
    specs = (_read(name, Path(path)) for name, path in sorted(found.items()))
    return [spec for spec in specs if spec is not None]


def remove_kernelspec(name: str) -> str:
    """Remove a kernelspec of ours and return the folder that is gone.

    Raises SpecError, and removes nothing, if there is none or it belongs to another project.
    """
    manager = _manager()
    path = manager.find_kernel_specs().get(name)
    if path is None:
        ours = ", ".join(spec.name for spec in list_kernelspecs()) or "none"
        raise SpecError(f"There is no kernelspec {name!r}. Those of sandbox-kernel are: {ours}.")
    if _read(name, Path(path)) is None:
        raise SpecError(
            f"The kernelspec {name!r} in {path} is not one of sandbox-kernel's and was left "
            f"alone. Use 'jupyter kernelspec remove {name}' if you want it gone."
        )
    return manager.remove_kernel_spec(name)


def _manager() -> KernelSpecManager:
    # ipykernel's implied python3 is neither ours to list nor to remove.
    return KernelSpecManager(ensure_native_kernel=False)


def _resources() -> Path:
    """The template kernelspec with its logos: package data in an installed wheel, the folder
    ``kernelspecs/sandbox`` in a checkout."""
    packaged = Path(__file__).parent / "resources"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "kernelspecs" / "sandbox"


def _template() -> dict[str, Any]:
    kernel: dict[str, Any] = json.loads((_resources() / "kernel.json").read_text(encoding="utf-8"))
    return kernel


def _checked_config(backend: str, spec_config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config`` of kernel.json: plain JSON, without what is at its default."""
    if backend not in backend_names():
        raise SpecError(
            f"There is no sandbox backend {backend!r}; installed are: "
            f"{', '.join(backend_names()) or 'none'}."
        )
    spec = SandboxSpec.from_mapping(spec_config, where=f"the kernelspec for {backend!r}").to_dict()
    if not spec_config.get("name"):
        del spec["name"]  # each kernel gets a sandbox of its own, with a random name
    return {"backend": backend, **spec}


def _check_replaceable(name: str, path: Path) -> None:
    if path.exists() and _read(name, path) is None:
        raise SpecError(
            f"{path} holds a kernelspec that is not sandbox-kernel's, and was left alone. Choose "
            f"another name for the kernel, or remove that one first."
        )


def _display_name(backend: str, language: str) -> str:
    title = "Python 3" if language == "python" else language.capitalize()
    return f"{title} (sandbox)" if backend == "local" else f"{title} (sandbox: {backend})"


def _literal_json(config: Mapping[str, Any]) -> str:
    """JSON that survives as an ``argv`` entry: clients replace ``{word}`` there. JSON's own braces
    never precede a letter or digit; those inside strings are written as escapes."""
    return re.sub(r"\{(?=\w)", r"\\u007b", json.dumps(config))


def _read(name: str, path: Path) -> InstalledKernelspec | None:
    """The kernelspec in that folder if it is ours, else None (also for one that is broken)."""
    try:
        kernel = json.loads((path / "kernel.json").read_text(encoding="utf-8"))
        argv, metadata = kernel["argv"], kernel.get("metadata", {})
        provisioner = metadata.get("kernel_provisioner", {})
        launcher = tuple(argv[1:4]) == _LAUNCH
        if launcher:
            config = json.loads(argv[argv.index(_CONFIG_OPTION) + 1])
        elif provisioner.get("provisioner_name") == PROVISIONER:
            config = provisioner.get("config", {})
        else:
            return None
        return InstalledKernelspec(
            name, str(kernel["display_name"]), str(path), dict(config), launcher
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # Not readable as a kernelspec, so nothing shows that it is ours.
        return None
