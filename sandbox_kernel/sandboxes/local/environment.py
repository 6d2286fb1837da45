"""A Python environment of the host, and what the jail sees of it.

``describe`` asks an interpreter where its parts are. ``PythonEnvironment.binds`` shows them to the
jail, read-only and at the same paths; a home folder never, even if the environment lies in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.errors import SpecError
from sandbox_kernel.host_programs import run_program
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.sandboxes.local.hidden_paths import contains, covers, exposes
from sandbox_kernel.sandboxes.local.mounts import Bind, Cover, Mount, Symlink, follow_links

_DESCRIBE_TIMEOUT = 20.0
_MINIMUM_VERSION = (3, 9)

# Runs in the interpreter that is asked about.
_QUESTION = """
import glob, importlib.util, json, os, site, sys, sysconfig

def unique(paths):
    return list(dict.fromkeys(os.path.normpath(p) for p in paths if p))

sites = unique([*site.getsitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))])
user = site.getusersitepackages() if site.ENABLE_USER_SITE else None
folders = sites + ([user] if user else [])
pth = [f for d in folders for f in sorted(glob.glob(os.path.join(glob.escape(d), "*.pth")))]
named = []
for file in pth:
    with open(file, encoding="utf-8", errors="surrogateescape") as lines:
        named += [os.path.join(os.path.dirname(file), line.strip()) for line in lines
                  if line.strip() and not line.startswith(("#", "import ", "import\\t"))]
editable = []
for name, module in list(sys.modules.items()):
    if name.startswith("__editable__"):
        places = list(getattr(module, "MAPPING", {}).values())
        places += [p for group in getattr(module, "NAMESPACES", {}).values() for p in group]
        for place in places:
            editable += [place] if os.path.exists(place) else glob.glob(glob.escape(place) + ".*")
wheels = []
if importlib.util.find_spec("pip") is None:
    for folder in (sysconfig.get_config_var("WHEEL_PKG_DIR"),
                   os.path.join(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")):
        wheels += glob.glob(os.path.join(glob.escape(folder), "pip-*.whl")) if folder else []
print()
print(json.dumps({
    "executable": sys.executable,
    "prefix": sys.prefix, "base_prefix": sys.base_prefix, "version": sys.version_info[:2],
    "stdlib": unique([sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]),
    "sites": sites, "user": user, "system_site": sys.prefix != sys.base_prefix
        and any(s.startswith(sys.base_prefix + os.sep) for s in site.getsitepackages()
                if not s.startswith(sys.prefix + os.sep)),
    "path": unique(os.path.abspath(p) for p in sys.path[1:] if os.path.exists(p)),
    "editable": unique(editable), "pth": pth, "named": unique(named), "wheels": wheels,
}))
"""


@dataclass(frozen=True)
class PythonEnvironment:
    """Where an interpreter's parts are on the host. Get it from ``describe``."""

    executable: str
    """As it was asked for, links not resolved: the path decides which environment it is."""
    base_executable: str
    """The real file of the interpreter that runs in the end."""
    prefix: str
    base_prefix: str
    version: tuple[int, int]
    site_packages: tuple[str, ...]
    user_site: str | None
    extra_paths: tuple[str, ...]
    """Other folders and zip files on sys.path, which .pth files and editable installs name."""
    editable_paths: tuple[str, ...]
    """Files and folders that an editable install imports from without sys.path."""
    system_site: bool
    """Whether a virtual environment sees the packages of its base interpreter."""
    pip_wheel: str | None
    """ensurepip's wheel, if the environment has no pip and there is a wheel."""

    @property
    def is_venv(self) -> bool:
        return self.prefix != self.base_prefix

    def path_entries(self) -> list[str]:
        """Folders of its commands, for the jail's PATH, behind those of the overlay."""
        folders = (
            os.path.dirname(self.executable),
            os.path.join(self.prefix, "bin"),
            os.path.dirname(self.base_executable),
        )
        return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]

    def variables(self) -> dict[str, str]:
        """Variables for the jail through which Jupyter's tools find the data files of this
        environment's packages, although sys.prefix is the overlay's."""
        return {
            "JUPYTER_PATH": os.path.join(self.prefix, "share", "jupyter"),
            "JUPYTER_CONFIG_PATH": os.path.join(self.prefix, "etc", "jupyter"),
        }

    def binds(self) -> list[Mount]:
        """All of it at the same paths, read-only, without what ``hidden_paths.covers`` names.

        Every symbolic link on the way to a folder is recreated, so each path leads where it leads
        on the host. SpecError if an interpreter's own folder would show the home folder.
        """
        for folder in (self.prefix, self.base_prefix):
            reason = exposes(folder)
            if reason:
                raise SpecError(
                    f"The interpreter {self.executable} cannot be shown in the jail: its folder "
                    f"{folder} holds {reason}. Make a virtual environment in a folder of its own "
                    f"and name its interpreter as `python`."
                )
        needed: dict[str, None] = {}
        links: dict[str, Symlink] = {}
        binds: dict[str, Bind] = {}
        for path in (
            *(self.base_prefix, self.prefix, *self.site_packages, self.user_site),
            *(*self.extra_paths, *self.editable_paths, self.pip_wheel),
            *(self.base_executable, self.executable),
        ):
            way, real = follow_links(path) if path else ([], "")
            if os.path.exists(real):
                links.update((link.target, link) for link in way)
                needed[real] = None
                if not _is_in(binds, real):
                    binds[real] = Bind(real, real)
        hidden: dict[str, Cover] = {}
        shown = dict.fromkeys((*self.extra_paths, *self.editable_paths), False)
        shown.update({self.base_prefix: True, self.prefix: True})
        for folder, is_prefix in shown.items():
            for cover in covers(os.path.realpath(folder), is_prefix=is_prefix):
                if cover.target not in needed:
                    hidden[cover.target] = cover
        # An environment in a hidden folder of a project, for example.
        on_top = [path for path in needed if _is_in(hidden, path)]
        # A link inside a shown folder is there already.
        missing = [
            link
            for target, link in links.items()
            if not _is_in(on_top if _is_in(hidden, target) else binds, target)
        ]
        binds.update((path, Bind(path, path)) for path in on_top)
        return [*missing, *binds.values(), *hidden.values()]


def _is_in(folders: Iterable[str], path: str) -> bool:
    return any(contains(folder, path) for folder in folders)


def on_the_way(python: str) -> list[str]:
    """The paths that decide which interpreter runs: its own, links on the way, the real one."""
    links, real = follow_links(python)
    return [os.path.normpath(python), *(link.target for link in links), real]


def describe(python: str) -> PythonEnvironment:
    """What there is to know about the environment of an interpreter on the host.

    Runs the interpreter once (at most 20 s) and keeps the answer on disk until the interpreter,
    its pyvenv.cfg, a site-packages folder or a .pth file changes. Raises SpecError if it does not
    run, is too old, or is a sandbox's.
    """
    if not os.path.isabs(python):
        raise SpecError(f"python takes an absolute path, not {python!r}.")
    own = os.path.realpath(data_dir())
    if any(contains(own, path) for path in on_the_way(python)):
        raise SpecError(
            f"python={python!r} was not run: it lies in {own}, where sandboxes write. Name an "
            f"interpreter of the host's."
        )
    cache = _cache_path(python)
    answer = _read_cache(cache, python)
    if answer is None:
        # Taken before the question, so that a change in between makes the answer stale.
        interpreter = _stamp(os.path.realpath(python))
        answer = _ask(python)
        watched = [*answer["sites"], *filter(None, [answer["user"]]), *answer["pth"]]
        watched.append(os.path.join(answer["prefix"], "pyvenv.cfg"))
        answer["stamps"] = {path: _stamp(path) for path in watched}
        answer["stamps"][os.path.realpath(python)] = interpreter
        answer["present"] = {path: os.path.exists(path) for path in answer["named"]}
        # What a launcher (a pyenv shim) runs is its own affair, and may change without a trace.
        if os.path.realpath(answer["executable"]) == os.path.realpath(python):
            write_atomically(cache, json.dumps(answer), lasting=False)
    return _environment(python, answer)


def _ask(python: str) -> dict[str, Any]:
    # PYTHONPATH and the like are this process's own, not the environment's.
    kept = ("PYTHONUSERBASE", "PYTHONNOUSERSITE")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") or k in kept}
    try:
        ran = run_program([python, "-c", _QUESTION], _DESCRIBE_TIMEOUT, env=env, cwd="/")
        if ran.returncode:
            raise ValueError(ran.stderr.strip()[-500:] or ran.returncode)
        answer = json.loads(ran.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise SpecError(
            f"python={python!r} cannot be used for a sandbox, because it does not run as a Python "
            f"interpreter: {error}"
        ) from error
    if not isinstance(answer, dict):
        raise SpecError(f"python={python!r} does not answer as a Python interpreter does.")
    if tuple(answer["version"]) < _MINIMUM_VERSION:
        raise SpecError(
            f"python={python!r} is Python {'.'.join(map(str, answer['version']))}; a sandbox "
            f"needs {'.'.join(map(str, _MINIMUM_VERSION))} or later."
        )
    return answer


def _environment(python: str, answer: dict[str, Any]) -> PythonEnvironment:
    prefix, base_prefix = answer["prefix"], answer["base_prefix"]
    sites = tuple(path for path in answer["sites"] if os.path.isdir(path))
    user = answer["user"] if answer["user"] and os.path.isdir(answer["user"]) else None
    known = (prefix, base_prefix, *answer["stdlib"], *sites, *([user] if user else []))

    def others(paths: list[str]) -> tuple[str, ...]:
        """Those that lie elsewhere, without what would show the home folder or more."""
        apart = (path for path in paths if not _is_in(known, path))
        return tuple(path for path in apart if os.path.exists(path) and not exposes(path))

    return PythonEnvironment(
        executable=python,
        base_executable=_base_executable(python, answer),
        prefix=prefix,
        base_prefix=base_prefix,
        version=(answer["version"][0], answer["version"][1]),
        site_packages=sites,
        user_site=user,
        extra_paths=others(answer["path"]),
        editable_paths=others(answer["editable"]),
        system_site=answer["system_site"],
        pip_wheel=answer["wheels"][-1] if answer["wheels"] else None,
    )


def _base_executable(python: str, answer: dict[str, Any]) -> str:
    """The interpreter's real file. In a virtual environment with a copied interpreter it is the one
    that the copy was made from."""
    real: str = os.path.realpath(answer["executable"])
    prefix, base_prefix = answer["prefix"], answer["base_prefix"]
    if prefix == base_prefix or not contains(os.path.realpath(prefix), real):
        return real
    major, minor = answer["version"]
    for folder in (_venv_home(prefix), os.path.join(base_prefix, "bin")):
        for name in (f"python{major}.{minor}", f"python{major}", "python"):
            if folder and os.access(os.path.join(folder, name), os.X_OK):
                return os.path.realpath(os.path.join(folder, name))
    raise SpecError(
        f"python={python!r} belongs to the virtual environment {prefix}, whose base interpreter "
        f"is not found in {base_prefix}. Recreate the environment."
    )


def _venv_home(prefix: str) -> str | None:
    try:
        lines = Path(prefix, "pyvenv.cfg").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    pairs = (line.partition("=") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == "home"), None)


def _stamp(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _cache_path(python: str) -> Path:
    variables = [os.environ.get(v) for v in ("HOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE")]
    key = json.dumps([_QUESTION, python, os.path.realpath(python), variables])
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return private_dir(data_dir() / "cache") / f"python-{name}.json"


def _read_cache(path: Path, python: str) -> dict[str, Any] | None:
    """The kept answer; None if there is none, or if it is stale or damaged."""
    try:
        answer = json.loads(path.read_text())
        stamps, present = answer["stamps"], answer["present"]
        fresh = os.path.realpath(python) in stamps
        fresh = fresh and all(_stamp(file) == stamp for file, stamp in stamps.items())
        fresh = fresh and all(os.path.exists(file) == there for file, there in present.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # asking again is always right
    return answer if fresh else None
