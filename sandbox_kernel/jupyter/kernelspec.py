"""Writes, lists and removes the kernelspecs of sandboxed kernels.

For ``sandbox-kernel install``, ``list`` and ``uninstall``. The kernelspec that the wheel installs
(``kernelspecs/sandbox``) is the template of all others.

There are two kinds. A *provisioner* spec has the settings in
``metadata.kernel_provisioner.config``, for every client that starts kernels through jupyter_client.
A *launcher* spec is for clients that run ``argv`` themselves, such as VS Code: its ``argv`` is
``sandbox_kernel launch`` with the path of a file beside ``kernel.json`` that has the settings. (Not
the settings themselves: every user of a host can read its command lines.)
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager

from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.host_programs import ISOLATION, absolute, importable_in_isolation
from sandbox_kernel.jupyter.configuration import read_configuration
from sandbox_kernel.sandboxes.backends import backend_names, no_backend
from sandbox_kernel.spec import SETTINGS, check_name
from sandbox_kernel.suggestions import check_keys, did_you_mean

PROVISIONER = "sandbox"
LAUNCH_FILE = "launch.json"
"""The settings of a launcher spec, beside its kernel.json."""

_LAUNCH = ("-m", "sandbox_kernel", "launch")
_CONFIG_FILE_OPTION = "--config-file"
_CONFIG_OPTION = "--config"  # of earlier versions, which had the request in argv
_MOST_PARTS = 3


@dataclass(frozen=True)
class InstalledKernelspec:
    """One of our kernelspecs on disk."""

    name: str
    display_name: str
    path: str
    config: Mapping[str, Any]
    """Settings by name, unvalidated: users edit these files."""
    launcher: bool
    outdated: bool = False
    """An earlier version wrote it, and its ``argv`` imports from the notebook's folder."""

    @property
    def advice(self) -> str:
        """What to do about it if it is outdated."""
        return (
            f"An earlier version installed the kernel {self.name!r} in {self.path}; it runs code "
            f"of the notebook's folder on this host, outside the sandbox. Install it again: "
            f"`sandbox-kernel install {self.backend} --launcher --name {self.name} ...`"
        )

    @property
    def backend(self) -> str:
        return str(self.config.get("backend", "local"))


def write_kernelspec(
    *,
    name: str | None = None,
    display_name: str | None = None,
    backend: str = "local",
    config: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
    language: str = "python",
    launcher: bool = False,
    user: bool = False,
    prefix: str | None = None,
) -> str:
    """Install a kernelspec and return its folder. Replaces one of ours with that name.

    ``config`` has the settings of the sandbox and the kernel (``spec.py``).
    ``argv`` is the kernel's command line in the sandbox, for kernels other than ipykernel, with
    their ``language``. The spec goes into this interpreter's environment, the one at ``prefix``, or
    with ``user`` into the user's own Jupyter folder.

    SpecError for a wrong request, or if another project's kernelspec has that name.
    """
    config = _checked_config(backend, config or {}, "" if launcher else "launcher")
    default_name = PROVISIONER if backend == "local" else f"{PROVISIONER}-{backend}"
    name = check_name(name or default_name, "A kernel name")
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
    place = (kernels / name).absolute()
    if place.exists() and _read(name, place) is None:
        raise SpecError(
            f"{place} holds a kernelspec that is not sandbox-kernel's, and was left alone. Choose "
            f"another name for the kernel, or remove that one first."
        )

    kernel = template()
    kernel["display_name"] = _shown_as(display_name, name, language, config, launcher, kernels)
    if argv is not None:
        # Debugger, encryption and protocol in the template are ipykernel's.
        kernel = {k: kernel[k] for k in ("display_name", "metadata")}
        kernel["metadata"] = {"kernel_provisioner": kernel["metadata"]["kernel_provisioner"]}
        kernel |= {"argv": list(argv), "language": language}
    if launcher:
        del kernel["metadata"]["kernel_provisioner"]
        if not importable_in_isolation():
            raise SpecError(
                f"Nothing was installed: {sys.executable} finds sandbox-kernel by PYTHONPATH only, "
                f"which is not safe for a launcher: it may contain the notebook's folder. Install "
                f"the package for that interpreter, for example with pip."
            )
        command = [] if argv is None else ["--", *argv]
        kernel["argv"] = [sys.executable, *ISOLATION, *_LAUNCH, "-f", "{connection_file}"]
        # An empty element, as `$LD_LIBRARY_PATH:/more` makes it, is the notebook's folder.
        kernel["env"] = {"LD_LIBRARY_PATH": absolute(os.environ.get("LD_LIBRARY_PATH", ""))}
        kernel["argv"] += [_CONFIG_FILE_OPTION, str(place / LAUNCH_FILE), *command]
    else:
        kernel["metadata"]["kernel_provisioner"]["config"] = config

    with tempfile.TemporaryDirectory(prefix="sandbox-kernel-") as staging:
        source = Path(staging) / name
        shutil.copytree(_resources(), source)
        (source / "kernel.json").write_text(json.dumps(kernel, indent=1) + "\n", encoding="utf-8")
        if launcher:
            request = source / LAUNCH_FILE
            request.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            # If root installs into an environment, all of its users may read the file.
            request.chmod(0o644 if os.geteuid() == 0 and not user else 0o600)
        return manager.install_kernel_spec(str(source), name, user=user, prefix=prefix)


def list_kernelspecs() -> list[InstalledKernelspec]:
    """All kernelspecs of ours that Jupyter finds from here, by name."""
    found = _manager().find_kernel_specs()
    specs = (_read(name, Path(path)) for name, path in sorted(found.items()))
    return [spec for spec in specs if spec is not None]


def remove_kernelspec(name: str) -> str:
    """Remove one of our kernelspecs and return its former folder. SandboxError if there is none,
    SpecError if it belongs to another project."""
    manager = _manager()
    path = manager.find_kernel_specs().get(name)
    if path is None:
        hint = did_you_mean(name, [spec.name for spec in list_kernelspecs()])
        raise SandboxError(f"There is no kernelspec {name!r}. {hint}")
    if _read(name, Path(path)) is None:
        raise SpecError(
            f"The kernelspec {name!r} in {path} is not one of sandbox-kernel's and was left "
            f"alone. To remove it, use 'jupyter kernelspec remove {name}'."
        )
    return manager.remove_kernel_spec(name)


def _manager() -> KernelSpecManager:
    # The implied python3 is ipykernel's.
    return KernelSpecManager(ensure_native_kernel=False)


def _resources() -> Path:
    """The template kernelspec with its logos: package data, or a folder of the checkout."""
    packaged = Path(__file__).parent / "resources"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "kernelspecs" / "sandbox"


def template() -> dict[str, Any]:
    """The ``kernel.json`` that comes with the package."""
    kernel: dict[str, Any] = json.loads((_resources() / "kernel.json").read_text(encoding="utf-8"))
    return kernel


def _checked_config(backend: str, given: Mapping[str, Any], not_for: str) -> dict[str, Any]:
    """The ``config`` of kernel.json: plain JSON, without what is at its default."""
    if backend not in backend_names():
        raise no_backend(backend)
    where = f"the kernelspec for {backend!r}"
    check_keys(given, SETTINGS.keys() - {"backend"}, where)
    configuration = read_configuration(
        given, {"backend": backend}, default_name="kernel", environ={}, where=where, not_for=not_for
    )
    config = configuration.to_dict()
    if not given.get("name"):
        del config["name"]  # each kernel gets a sandbox of its own, with a random name
    return config


def _shown_as(
    wanted: str | None,
    name: str,
    language: str,
    config: Mapping[str, Any],
    launcher: bool,
    kernels: Path,
) -> str:
    """The kernel's title in Jupyter: ``wanted``, else one that says in what it differs. Titles are
    unique: a generated one gets the kernel's name, a taken ``wanted`` is refused."""
    places = {**_manager().find_kernel_specs()}
    if kernels.is_dir():
        places |= {path.name: str(path) for path in kernels.iterdir()}
    taken = {_title(Path(path)): other for other, path in places.items() if other != name}
    if wanted:
        if wanted in taken:
            raise SpecError(
                f"The kernel {taken[wanted]!r} is already shown as {wanted!r}, so nobody could "
                f"tell them apart. Choose another display name, or remove that kernel first."
            )
        return wanted
    title = "Python 3" if language == "python" else language.capitalize()
    backend = config["backend"]
    kind = "sandbox" if backend == "local" else f"sandbox: {backend}"
    parts = [words for key, value in config.items() if (words := _difference(key, value))]
    parts += ["launcher"] if launcher else []
    if len(parts) > _MOST_PARTS:
        parts = [name]
    shown = f"{title} ({', '.join([kind, *parts])})"
    return f"{title} ({', '.join([kind, *parts, name])})" if shown in taken else shown


def _title(path: Path) -> str:
    try:
        return str(json.loads((path / "kernel.json").read_text(encoding="utf-8"))["display_name"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""  # Jupyter does not show it either


def _difference(key: str, value: Any) -> str:
    """A setting in a few words; empty if nobody chooses a kernel by it."""
    if key == "memory_mib":
        return f"{value} MiB"
    if key == "cpus":
        return f"{value:g} {'CPU' if value == 1 else 'CPUs'}"
    if key == "python":
        return Path(value).parent.parent.name  # the environment
    if key in ("image", "workspace"):
        return f"{key} {value}"
    if key == "upload":
        return "" if value == "none" else "upload"
    return {"mirror": "mirror", "egress": "network"}.get(key, "") if value else ""


def _read(name: str, path: Path) -> InstalledKernelspec | None:
    """The kernelspec in that folder if it is ours and readable, else None."""
    try:
        kernel = json.loads((path / "kernel.json").read_text(encoding="utf-8"))
        argv, metadata = kernel["argv"], kernel.get("metadata", {})
        provisioner = metadata.get("kernel_provisioner", {})
        launcher = tuple(argv[argv.index("-m") :][:3]) == _LAUNCH if "-m" in argv else False
        outdated = launcher and "-P" not in argv[: argv.index("-m")]
        if launcher and _CONFIG_FILE_OPTION in argv:
            config = json.loads((path / LAUNCH_FILE).read_text(encoding="utf-8"))
        elif launcher:
            config = json.loads(argv[argv.index(_CONFIG_OPTION) + 1])
        elif provisioner.get("provisioner_name") == PROVISIONER:
            config = provisioner.get("config", {})
        else:
            return None
        title = str(kernel["display_name"])
        return InstalledKernelspec(name, title, str(path), dict(config), launcher, outdated)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
