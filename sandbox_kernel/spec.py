"""Every setting: SandboxSpec has those of the sandbox, KernelConfiguration those of the kernel.

To add a setting, add a field here; ``settings.py`` says what follows from it. A setting has the
same name everywhere: as a keyword argument, in a kernelspec's
``metadata.kernel_provisioner.config``, in traitlets configuration, as ``SANDBOX_KERNEL_<NAME>`` in
the environment and as ``--name`` on the command line. Reading never guesses: an unknown key or a
wrong value is a SpecError that names it.
"""

from __future__ import annotations

import re
import secrets as _secrets
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any

from sandbox_kernel.audit.trail import KEEPS
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SpecError
from sandbox_kernel.secret_declarations import SecretDeclaration, read_secrets
from sandbox_kernel.settings import (
    BOOLEAN,
    FOLDER,
    ITSELF,
    OBJECT,
    PAIRS,
    PATHS,
    PROGRAM,
    TEXT,
    WORDS,
    Setting,
    ValueKind,
    changed_fields,
    choice,
    number,
    read_fields,
    setting,
    settings_of,
)
from sandbox_kernel.suggestions import check_keys

DEFAULT_BACKEND = "local"
LEAST_MEMORY_MIB = 128
"""With less, a kernel, the agent and its spare interpreter do not fit."""
MAX_ENV = 128 * 1024
"""Bytes of all environment variables of a spec together; Linux gives a process little more."""
NOTEBOOK = ".ipynb"
"""How the path of a notebook ends. Where a workspace's name may stand, so may such a path."""
FILES = ("copy", "mount-ro", "mount")
"""Values of ``files`` with which the sandbox sees the notebook's folder."""
NOTEBOOK_SETTINGS = ("egress", "memory_mib", "cpus", "processes", "disk_mib", "files")
"""Settings that a notebook's own metadata can narrow."""
FORMER_VOLUME = "workspace"
"""What ``volume`` was called in earlier specs, records and launchers."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_name(name: str, what: str = "A sandbox name") -> str:
    """The name itself, or SpecError. Names become file and host names, so they are strict."""
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{what} has 1 to 63 characters of a-z 0-9 . _ - and starts with a letter or digit; "
            f"{name!r} does not fit."
        )
    return name


def _name(what: str) -> ValueKind:
    return ValueKind(lambda value: check_name(value, what) if TEXT.read(value) else None, "NAME")


def _environment(value: Any) -> dict[str, str]:
    found: dict[str, str] = PAIRS.read(value)
    for name, item in found.items():
        if not _ENV_NAME.fullmatch(name) or "\0" in item:
            raise ValueError(f"has an entry that is not an environment variable: {name!r}")
    if sum(len(name) + len(item) for name, item in found.items()) > MAX_ENV // 2:
        raise ValueError(f"holds more than {MAX_ENV // 2} characters; put the data in a file")
    return found


def _upload(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(glob, str) for glob in value):
        return value[0] if value in (["none"], ["folder"]) else tuple(value)
    raise ValueError(f"is 'none', 'folder' or a list of globs, not {value!r}")


def _notebook_settings(value: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = WORDS.read(value)
    if wrong := sorted(set(names) - set(NOTEBOOK_SETTINGS)):
        raise ValueError(f"takes {', '.join(NOTEBOOK_SETTINGS)}, not {wrong[0]!r}")
    return names


_enforced = partial(setting, needs=ITSELF)
_for_notebooks = partial(setting, only_for="provisioner")
_MIB, _COUNT = number(int, "MIB"), number(int, "N")
_SECONDS, _SECONDS_OR_0 = number(float, "SECONDS"), number(float, "SECONDS", least=0)


@dataclass(frozen=True)
class SandboxSpec:
    """A request for a sandbox. Values are read and validated when it is made.

    ``None`` means "the backend's default". A backend refuses (SpecRefused) what it cannot
    enforce; it never ignores a field.
    """

    name: str = setting(
        lambda: f"sandbox-{_secrets.token_hex(4)}",
        "name of the sandbox (default: a random one)",
        _name("A sandbox name"),
    )
    image: str | None = _enforced(
        None,
        "image, template or snapshot that the sandbox is made from",
        TEXT._replace(metavar="IMAGE"),
    )
    memory_mib: int | None = _enforced(
        None,
        "memory for the whole sandbox, in MiB",
        number(int, "MIB", least=LEAST_MEMORY_MIB, why=" to run a kernel"),
    )
    cpus: float | None = _enforced(
        None, "CPUs for the whole sandbox; fractions are allowed", number(float, "N")
    )
    processes: int | None = _enforced(None, "most processes and threads at once", _COUNT)
    open_files: int | None = _enforced(None, "most open files of one process", _COUNT)
    disk_mib: int | None = _enforced(
        None, "most that the workspace and home folders may hold, in MiB", _MIB
    )
    volume: str | None = _enforced(
        None,
        "keep the files of /workspace under this name, for the next sandbox with it",
        _name("A volume name"),
        only_for="launcher",
    )
    folder: str | None = _enforced(
        None, "host folder that is shown live as /workspace", FOLDER, only_for="launcher"
    )
    """Without what private_names.py lists. Kernels of notebooks have ``files`` instead."""
    folder_writable: bool = setting(
        False, "with folder: the sandbox may change the files in it", BOOLEAN, only_for="launcher"
    )
    env: Mapping[str, str] = setting(
        dict,
        "environment variables for everything that runs in the sandbox, NAME=VALUE",
        PAIRS._replace(read=_environment),
    )
    readable: tuple[str, ...] = _enforced(
        (), "host paths that the sandbox may read, at the same path", PATHS
    )
    python: str | None = _enforced(
        None,
        "host interpreter whose environment the sandbox shows (default: this one)",
        PROGRAM,
    )
    secrets: tuple[SecretDeclaration, ...] = _enforced(
        (),
        "secrets that the sandbox may use without seeing them, NAME@HOST, or objects as JSON",
        ValueKind(read_secrets, "SECRET", several=True),
    )
    """Also taken: whatever ``read_secrets`` reads. Declared by name; never the values."""
    egress: EgressPolicy = _enforced(  # noqa: RUF009  (it makes a field)
        EgressPolicy,
        "hosts that the sandbox may reach, or rules as JSON; none means no network",
        ValueKind(EgressPolicy.read, "RULE", several=True),
    )
    """Also taken: whatever ``EgressPolicy.read`` reads, such as a list of host names."""
    options: Mapping[str, Any] = _enforced(
        dict,
        "settings that only the chosen backend knows, as JSON; see its page in the docs",
        OBJECT,
    )
    labels: Mapping[str, str] = setting(
        dict, "free labels for your own book-keeping, NAME=VALUE", PAIRS
    )
    lease_seconds: float = setting(
        3600.0, "end the sandbox when nobody has been attached to it for this long", _SECONDS
    )
    delete_after_seconds: float | None = _enforced(
        None, "delete a hosted sandbox that has been paused for this long", _SECONDS
    )
    start_timeout: float = setting(60.0, "seconds that starting the sandbox may take", _SECONDS)
    audit: str = setting(
        "all", "what is recorded of the sandbox: all, egress alone, or none", choice(*KEEPS)
    )
    audit_command: str | None = setting(
        None,
        "program on this host that gets a copy of each recorded event, as JSON lines on its stdin",
        TEXT._replace(metavar="COMMAND"),
    )
    """The operator's: words as a shell splits them. Never read from a notebook."""
    workspace: InitVar[str | None] = None
    """The former name of ``volume``, as a keyword argument only."""

    def __post_init__(self, workspace: str | None) -> None:
        if workspace is not None:
            object.__setattr__(self, "volume", workspace)
        read_fields(self)
        self._check_folder()

    def _check_folder(self) -> None:
        if self.folder is None:
            return
        if self.volume is not None:
            raise SpecError("folder and volume are both shown as /workspace; leave one out.")
        if self.folder_writable and self.disk_mib is not None:
            raise SpecError(
                "disk_mib cannot be held where the sandbox writes to a folder of the host. Leave "
                "it out, or show the folder read-only (files=mount-ro)."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without what is at its default; ``from_mapping`` reads it back."""
        return {**changed_fields(self), "name": self.name}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, where: str = "the spec") -> SandboxSpec:
        """Read a spec from configuration. ``where`` names the source in error messages."""
        given = {"volume" if key == FORMER_VOLUME else key: v for key, v in values.items()}
        check_keys(given, settings_of(cls), where)
        try:
            return cls(**given)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None


@dataclass(frozen=True)
class KernelConfiguration:
    """Everything that the provisioner and the launcher need to know about a new kernel."""

    spec: SandboxSpec
    backend: str = setting(
        DEFAULT_BACKEND,
        "kind of sandbox; `sandbox-kernel doctor` lists them",
        TEXT._replace(metavar="BACKEND"),
    )
    workspace: str | None = _for_notebooks(
        None,
        "name of the saved workspace of all its kernels (default: one per notebook)",
        _name("A workspace name"),
    )
    guest_transport: str = setting(
        "ipc",
        "how the kernel listens inside: ipc, or tcp for kernels that need it",
        choice("ipc", "tcp"),
    )
    keep_on_exit: bool = _for_notebooks(
        False, "leave the sandbox to its lease when this process ends without a shutdown", BOOLEAN
    )
    pause_on_exit: bool = setting(
        False,
        "pause the sandbox instead of deleting it when its kernel is shut down",
        BOOLEAN,
        needs="pause",
    )
    """A kernel that is started later with the same ``name`` continues in it."""
    idle_pause_seconds: float = setting(
        0.0,
        "pause the sandbox when its kernel has been idle for this long (0: never)",
        _SECONDS_OR_0,
        needs="pause",
    )
    recreate: bool = setting(
        False, "make a new hosted sandbox if a kernel is restarted whose sandbox is gone", BOOLEAN
    )
    warm_start: bool = setting(
        True,
        "start ipykernel from a spare that has already started, or an interpreter with its imports",
        BOOLEAN,
    )
    warm_spares: bool = setting(
        True,
        "have a spare sandbox for the next kernel, for a while after one was started",
        BOOLEAN,
    )
    """Only of backends on this machine (``SandboxClient.makes_spares``)."""
    pool_size: int = _for_notebooks(
        0, "how many sandboxes wait ready for the next kernels (0: none)", number(int, "N", least=0)
    )
    pool_idle_seconds: float = setting(
        600.0, "empty the pool when no kernel has been started for this long", _SECONDS_OR_0
    )
    persist: bool = _for_notebooks(
        True,
        "save the files of a named workspace, or with the notebook, and bring them back",
        BOOLEAN,
    )
    files: str = setting(
        "none",
        "what the sandbox sees of the notebook's folder: nothing, a copy, or the folder itself",
        choice("none", *FILES),
    )
    upload: str | tuple[str, ...] = _for_notebooks(
        "none",
        "what the sandbox gets of the notebook's folder, at each start: none, folder, globs",
        ValueKind(_upload, "WHAT", several=True),
    )
    mirror: bool = _for_notebooks(
        False, "write saved files back to the notebook's folder after every save", BOOLEAN
    )
    mirror_delete: bool = _for_notebooks(
        False,
        "with mirror: move files that it made, and that were deleted since, to a trash folder",
        BOOLEAN,
    )
    notebook_may_widen: tuple[str, ...] = _for_notebooks(
        (),
        "settings of which a notebook's own metadata may ask for more than the kernel is given",
        WORDS._replace(read=_notebook_settings),
    )
    named: bool = False
    """The user has chosen the sandbox's name."""
    notebook: str = ""
    """Path of the notebook whose workspace it is, if the environment names one."""

    def __post_init__(self) -> None:
        read_fields(self)
        if self.files != "none":
            self._check_files()

    def _check_files(self) -> None:
        given = {"upload": self.upload != "none", "mirror": self.mirror}
        former = [name for name, is_given in given.items() if is_given]
        if former:
            raise SpecError(
                f"files={self.files} says already what the sandbox gets of the notebook's folder. "
                f"Leave {' and '.join(former)} out, or files."
            )
        if self.files == "copy" and not self.persist:
            raise SpecError(
                "files=copy brings results back by saving them, so persist=false must be left "
                "out. To bring files in only, leave files out and set upload=folder."
            )
        if self.mounts and (self.workspace or self.notebook):
            raise SpecError(
                f"With files={self.files} the folder itself is the workspace, and nothing is saved "
                f"elsewhere. Leave workspace out, or choose files=copy."
            )
        if self.mounts and self.spec.folder is None:
            # What the spec refuses is known before there is a folder.
            replace(self.spec, folder="/", folder_writable=self.files == "mount")

    @property
    def mounts(self) -> bool:
        """Whether ``files`` asks for the folder itself."""
        return self.files in ("mount-ro", "mount")

    def to_dict(self) -> dict[str, Any]:
        """The settings that are not at their default, as plain JSON types, with the backend."""
        return {"backend": self.backend, **changed_fields(self.spec), **changed_fields(self)}


SETTINGS: Mapping[str, Setting] = {**settings_of(KernelConfiguration), **settings_of(SandboxSpec)}
"""All settings, by name."""
