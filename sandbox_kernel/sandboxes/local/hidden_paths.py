"""What must stay hidden of the folders that a jail is shown.

Folders are shown for the programs and packages in them. A Python environment holds settings as
well, with passwords at times, and an environment or a source folder may be a project's folder,
with its ``.env`` and ``.git``. ``exposes`` says which folders are never shown, ``covers`` what is
covered in those that are, and ``shown_with`` how little of a folder a program needs.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandbox_kernel.errors import SpecError
from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.sandboxes.local.mounts import Cover

SYSTEM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32")
STORES = ("/nix/store", "/gnu/store")
SETTINGS = {
    "libraries": "ld.so.cache ld.so.conf ld.so.conf.d alternatives",
    "certificates": "ssl/certs ssl/openssl.cnf ssl/cert.pem ca-certificates ca-certificates.conf "
    "crypto-policies pki/ca-trust pki/java pki/tls/cert.pem pki/tls/certs pki/tls/openssl.cnf",
    "locale": "localtime timezone locale.alias locale.conf",
    "names": "nsswitch.conf host.conf gai.conf protocols services rpc networks mime.types magic*",
    "system": "debian_version *-release terminfo inputrc",
    "documents": "fonts papersize paperspecs texmf ghostscript groff xml sgml ImageMagick-*",
    "languages": "python3* perl java-* R octave* julia",
    "hardware": "OpenCL vulkan glvnd openmpi*",
}
"""Of a folder ``etc``, what programs need and what holds no secrets: no accounts, no keys, no names
of this host, and no pip.conf or the like, whose URLs may hold passwords."""

_IN_ENVIRONMENTS = (
    *("pip.conf", "pip.ini", "condarc", "conda-meta/state", "envs"),
    *("share/jupyter/runtime", "share/jupyter/lab/settings"),
)
_PROGRAM_FOLDERS = ("bin", "sbin")
# What an installation by ``./configure --prefix`` or an unpacked release consists of.
_OF_A_RELEASE = (
    *("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "include", "etc", "man", "doc"),
    *("docs", "LICENSE*", "README*", "COPYING*", "COPYRIGHT*", "NOTICE*", "VERSION*", "NEWS*"),
    *("CHANGE*", "AUTHORS*", "THIRDPARTY*", "release"),
)


def contains(folder: str, path: str) -> bool:
    """Whether ``path`` is ``folder`` or lies in it. Both are absolute and without links."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def private_places() -> dict[str, str]:
    """Folders that are never shown as a whole, and what they are."""
    home = os.path.expanduser("~")
    places = {
        "/": "the whole system",
        "/etc": "the system's settings",
        "/var": "the system's data",
        "/run": "the system's sockets",
        "/proc": "/proc",
        "/sys": "/sys",
        "/dev": "/dev",
        "/tmp": "the system's temporary files",  # noqa: S108
        "/var/tmp": "the system's temporary files",  # noqa: S108
        tempfile.gettempdir(): "the system's temporary files",
        home: "the home folder",
        os.environ.get("XDG_DATA_HOME") or f"{home}/.local/share": "the data of programs",
        os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config": "the settings of programs",
        str(data_dir()): "the sandboxes' own data (SANDBOX_KERNEL_DATA_DIR)",
        str(runtime_dir()): "the sandboxes' own sockets (SANDBOX_KERNEL_RUNTIME_DIR)",
    }
    with contextlib.suppress(KeyError):  # a user without an entry has only $HOME
        places[pwd.getpwuid(os.getuid()).pw_dir] = "the home folder"
    return places


def exposes(path: str) -> str | None:
    """What must stay hidden and lies in (or is) ``path``, in words; None if there is nothing."""
    real = os.path.realpath(path)
    for secret, words in private_places().items():
        if contains(real, os.path.realpath(secret)):
            return words
    return "a home folder" if os.path.dirname(real) == "/home" else None


def check_not_private(folder: str, refused: str) -> None:
    """SpecError, which begins with ``refused``, for a folder that no sandbox may get any of."""
    reason = exposes(folder) or _is_part_of(folder)
    if reason:
        raise SpecError(
            f"{refused} cannot be shown: it is, or holds, {reason}. Move the notebook to a folder "
            f"of its own, or set files=none."
        )


def _is_part_of(path: str) -> str | None:
    """What must stay hidden and ``path`` is a part of, in words; None if it is of nothing."""
    real = os.path.realpath(path)
    for place in ("/etc", "/proc", "/sys", "/dev", "/boot"):
        if contains(place, real):
            return f"a part of {place}"
    home = os.path.realpath(os.path.expanduser("~"))
    if home not in ("/", real) and contains(home, real):
        hidden = os.path.relpath(real, home).partition("/")[0]
        if hidden.startswith("."):
            return f"a part of {hidden} in the home folder"
    return None


ENVIRONMENT_MARKS = frozenset(("pyvenv.cfg", "conda-meta"))


def is_environment(folder: str) -> bool:
    """Whether this is the folder of a Python or conda environment."""
    return any(os.path.exists(os.path.join(folder, mark)) for mark in ENVIRONMENT_MARKS)


def shown_with(program: str) -> tuple[str, ...]:
    """What the jail must see for a program at this path that the system's folders do not hold.

    Its environment, or the release that it belongs to; if it is in neither, the program's file
    alone. SpecError if that is an environment which cannot be shown.
    """
    found: dict[str, None] = {}
    if os.path.isfile(program):
        for path in (program, os.path.realpath(program)):
            system = (*(f"/{name}" for name in SYSTEM_FOLDERS), *STORES)
            if not any(contains(folder, path) for folder in system):
                found.update(dict.fromkeys(_belonging(path)))
    return tuple(p for p in found if not any(p != other and contains(other, p) for other in found))


def _belonging(program: str) -> list[str]:
    """A program's environment, or its release without settings (npm's have tokens); else itself."""
    folder = os.path.dirname(program)
    prefix = os.path.dirname(folder)
    if os.path.basename(folder) not in _PROGRAM_FOLDERS:
        return [program]
    reason = exposes(prefix)
    if is_environment(prefix):
        if reason:
            raise SpecError(
                f"The kernel's program {program} was not made readable: the environment that it "
                f"belongs to, {prefix}, holds {reason}. Install it in a folder of its own, or name "
                f"what it needs in `readable`."
            )
        return [prefix]
    if reason or not _is_release(prefix):
        return [program]
    settings = _names(f"{prefix}/etc")
    kept = [f"etc/{name}" for name in settings if _is_setting(name)]
    if len(kept) == len(settings):
        return [prefix]
    names = [name for name in _names(prefix) if name != "etc"]
    return [os.path.join(prefix, name) for name in (*names, *kept)]


def _is_release(folder: str) -> bool:
    """Whether this clearly is an installed program and nothing else."""
    if os.path.dirname(folder) == "/opt":
        return True  # put there for everybody
    names = _names(folder)
    known = all(any(fnmatch.fnmatchcase(n, pattern) for pattern in _OF_A_RELEASE) for n in names)
    return known and bool({"lib", "lib64", "libexec", "share"} & set(names))


def covers(folder: str, at: str | None = None, *, is_prefix: bool) -> list[Cover]:
    """What to cover in a folder that is shown, as ``at`` if not under its own name.

    In every folder, what is hidden by its name; in one that programs are installed to also
    settings, and kernelspecs that have variables. Links are left: they lead to what is shown, or
    nowhere.
    """
    names = [name for name in _names(folder) if name.startswith(".")]
    if is_prefix:
        names += _IN_ENVIRONMENTS
        names += [f"etc/{name}" for name in _names(f"{folder}/etc") if not _is_setting(name)]
        names += _kernelspecs(folder)
    found = []
    for name in names:
        path, target = os.path.join(folder, name), os.path.join(at or folder, name)
        linked = os.path.realpath(path) != os.path.join(os.path.realpath(folder), name)
        if os.path.exists(path) and not linked:
            found.append(Cover(target, is_file=not os.path.isdir(path)))
    return found


def _is_setting(name: str) -> bool:
    patterns = " ".join(SETTINGS.values()).split()
    return any(fnmatch.fnmatchcase(name, pattern.partition("/")[0]) for pattern in patterns)


def _kernelspecs(folder: str) -> Iterator[str]:
    kernels = "share/jupyter/kernels"
    for name in _names(f"{folder}/{kernels}"):
        yield f"{kernels}/{name}/launch.json"
        if not _is_plain(f"{folder}/{kernels}/{name}/kernel.json"):
            yield f"{kernels}/{name}/kernel.json"


def _is_plain(path: str) -> bool:
    """Whether a kernelspec has no settings. ipykernel's must stay: programs start kernels by it."""
    try:
        kernel = json.loads(Path(path).read_text(encoding="utf-8"))
        settings = kernel.get("env") or "kernel_provisioner" in kernel.get("metadata", {})
        return not settings and "sandbox_kernel" not in kernel["argv"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []  # what this user cannot list, the jail cannot either
