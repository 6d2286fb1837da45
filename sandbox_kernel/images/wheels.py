"""Packages for the interpreter of an image, resolved and cached on the host.

A cached folder has what ``pip install --target`` would make in the image; it appears complete, by a
rename. Packages come from this environment, if they fit, without any network, or from the package
index that pip is configured for. (pip, because uv knows neither pip's configuration nor all of
these targets: musl 1.1, s390x, ppc64le, free-threaded interpreters.)
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.host_programs import host_environment, own_python, run_program
from sandbox_kernel.images.image_store import building
from sandbox_kernel.images.target import Target
from sandbox_kernel.paths import data_dir, private_dir

KERNEL = "ipykernel>=6.29"
"""The requirement of every kernel."""

Note = Callable[[str], object]
"""Called with a line of text before a step that takes long."""

_PIP_TIMEOUT = 600.0
_MAX_PASSES = 5
_PROGRAM = re.compile(r"^(?:\.\./)+bin/([^/,\n]+),.*$", re.MULTILINE)
_OF_NO_USE = ("share", "etc")
# Half of all files are type stubs for other packages.
_NOT_LEAN = ("bin", "*/test", "*/tests", "jedi/third_party/typeshed/stubs/*")
_OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|ProxyError"
    r"|ConnectTimeout|ReadTimeout|Connection (refused|aborted|reset)|Network is unreachable"
)


class _DoesNotFit(Exception):
    """This environment's packages do not fit the target; the message says why."""


def packages_for(
    target: Target,
    requirements: Sequence[str] = (KERNEL,),
    *,
    lean: bool = False,
    note: Note = lambda line: None,
) -> Path:
    """A folder with these requirements and their dependencies for the target.

    ``lean`` is for packages that are uploaded: without tests and stubs, and from this environment
    if its versions fit. Otherwise this environment is used only if the index cannot be reached.
    Blocking: call it in a thread.
    """
    root = private_dir(data_dir() / "packages")
    key = target.key(*requirements)
    fetched = root / (f"{key}-lean" if lean else key)
    own = root / f"{fetched.name}-own"
    for made in (fetched, own) if lean else (fetched,):
        if made.is_dir():
            return made
    with building(root) as place:
        folder = place / "packages"
        folder.mkdir()
        made = own if _fill(folder, target, requirements, lean, note) else fetched
        _finish(folder, target, lean)
        try:
            folder.rename(made)
        except OSError:
            if not made.is_dir():  # else another process was faster
                raise
    return made


def uncached_packages_for(
    target: Target, arguments: Sequence[str], folder: Path, note: Note = lambda line: None
) -> None:
    """Fill an empty folder with what pip makes of these arguments. They may name files, indexes and
    links, so the result cannot be cached."""
    note(f"Fetching packages for {target} ...")
    try:
        _from_index(folder, target, arguments)
    except _Offline as offline:
        raise SandboxError(
            f"The packages for {target} cannot be fetched: the package index cannot be reached "
            f"({offline}). Connect to the network, or set PIP_INDEX_URL or PIP_FIND_LINKS."
        ) from None
    _finish(folder, target, False)


def unmet(folder: Path, target: Target, installed: Mapping[str, str]) -> list[str]:
    """In sentences: requirements of the folder's packages that ``installed`` ones do not meet."""
    versions = {canonicalize_name(name): version for name, version in installed.items()}
    found = []
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        for required in _requires(distribution, target):
            version = versions.get(canonicalize_name(required.name))
            try:
                met = version is None or required.specifier.contains(version, prereleases=True)
            except InvalidVersion:
                continue
            if not met:
                needs = f"{distribution.metadata['Name']} needs {required}"
                found.append(f"{required.name} {version}, but {needs}")
    return sorted(found)


def _fill(
    folder: Path, target: Target, requirements: Sequence[str], own_first: bool, note: Note
) -> bool:
    """Fill an empty folder; True if with this environment's own packages."""
    problems: dict[bool, Exception] = {}
    for own in (own_first, not own_first):
        shutil.rmtree(folder)
        folder.mkdir()
        try:
            if own:
                _from_here(folder, target, requirements)
            else:
                note(f"Fetching packages for {target} ...")
                _from_index(folder, target, requirements)
            return own
        except (_DoesNotFit, _Offline) as error:
            problems[own] = error
    raise SandboxError(
        f"{' '.join(requirements)} for {target} is not cached yet, and the package index cannot be "
        f"reached ({problems[False]}). The packages of this environment do not fit either: "
        f"{problems[True]}. Connect to the network once, set PIP_INDEX_URL or PIP_FIND_LINKS, or "
        f"use an image that has ipykernel."
    )


# --- from the index


class _Offline(Exception):
    """The index cannot be reached."""


def _from_index(folder: Path, target: Target, arguments: Sequence[str]) -> None:
    """Have pip fill the folder.

    pip evaluates markers for its own interpreter, not for the target. So each pass looks up which
    requirements of the target are missing in the result, and the next one asks for them, too.
    """
    wanted = list(arguments)
    for _ in range(_MAX_PASSES):
        shutil.rmtree(folder)
        folder.mkdir()
        _run_pip(folder, target, wanted)
        lacking = _lacking(folder, target)
        if not lacking:
            return
        wanted += lacking
    raise SandboxError(
        f"The requirements {' '.join(arguments)} for {target} cannot be resolved: "
        f"{', '.join(lacking)} are still missing after {_MAX_PASSES} passes."
    )


def _run_pip(folder: Path, target: Target, arguments: Sequence[str]) -> None:
    """Download, then install: only ``pip download`` checks Requires-Python for the target."""
    fitting = ["--only-binary=:all:", "--implementation", "cp", "--abi", target.abi]
    fitting += ["--python-version", target.version]
    for platform in target.platforms():
        fitting += ["--platform", platform]
    with tempfile.TemporaryDirectory(prefix=".wheels-", dir=folder.parent) as wheels:
        ran = _pip("download", "--dest", wheels, "--retries=1", *fitting, *arguments)
        if ran.returncode == 0:
            # By name, because pip would record the paths of files.
            parsed = [parse_wheel_filename(path.name) for path in Path(wheels).iterdir()]
            found = sorted(f"{name}==={version}" for name, version, *_ in parsed)
            options = ["--no-deps", "--no-index", "--find-links", wheels, "--no-compile"]
            options += ["--ignore-requires-python", "--no-warn-conflicts"]
            options += ["--root-user-action=ignore"]
            ran = _pip("install", "--target", str(folder), *options, *fitting, *found)
    if ran.returncode == 0:
        return
    said = ran.stderr.strip() or ran.stdout.strip()
    if "No module named pip" in said:
        raise SandboxError(
            f"pip fetches the packages for {target}, and {sys.executable} lacks it. Install it "
            f"there (`{sys.executable} -m ensurepip`)."
        )
    offline = _OFFLINE.search(said)
    if offline:
        raise _Offline(offline.group())
    errors = [line for line in said.splitlines() if line.startswith("ERROR")] or [said[-500:]]
    raise SandboxError(
        f"There are no wheels of {' '.join(arguments)} for {target}. pip said: "
        f"{' '.join(errors)[:1000]} Use an image with another Python, or one that has ipykernel."
    )


def _pip(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    common = ("--quiet", "--no-input", "--disable-pip-version-check")
    try:
        return run_program(
            own_python("-m", "pip", command, *common, *arguments),
            _PIP_TIMEOUT,
            env={**host_environment(), "PYTHONDONTWRITEBYTECODE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise _Offline(f"pip did not end within {_PIP_TIMEOUT:g} s") from None


def _lacking(folder: Path, target: Target) -> list[str]:
    """Requirements of the packages in the folder that are not in the folder."""
    found = {
        canonicalize_name(distribution.metadata["Name"]): distribution
        for distribution in importlib.metadata.distributions(path=[str(folder)])
    }
    lacking = {
        str(required)
        for distribution in found.values()
        for required in _requires(distribution, target)
        if canonicalize_name(required.name) not in found
    }
    return sorted(lacking)


def _requires(
    distribution: importlib.metadata.Distribution, target: Target
) -> Iterator[Requirement]:
    """A package's requirements on the target, without their markers."""
    for line in distribution.requires or ():
        required = Requirement(line)
        if required.marker is None or required.marker.evaluate(dict(target.markers())):
            required.marker = None
            yield required


# --- from this environment


def _from_here(folder: Path, target: Target, requirements: Sequence[str]) -> None:
    """Copy packages of this environment that were installed from wheels that fit the target."""
    fitting = frozenset(map(str, target.tags()))
    copied: set[str] = set()
    waiting = [_parsed(requirement) for requirement in requirements]
    while waiting:
        required = waiting.pop()
        name = canonicalize_name(required.name)
        try:
            distribution = importlib.metadata.distribution(required.name)
        except importlib.metadata.PackageNotFoundError:
            raise _DoesNotFit(f"{required.name} is not installed here") from None
        if not required.specifier.contains(distribution.version, prereleases=True):
            raise _DoesNotFit(f"{name} is here in version {distribution.version}")
        if name in copied:
            continue
        copied.add(name)
        _check_wheel(name, distribution, fitting)
        _copy(name, distribution, folder)
        waiting += _requires(distribution, target)


def _parsed(requirement: str) -> Requirement:
    with contextlib.suppress(InvalidRequirement):
        parsed = Requirement(requirement)
        if not parsed.url and not parsed.extras:
            return parsed
    raise _DoesNotFit(f"{requirement} is no plain requirement")


def _check_wheel(
    name: str, distribution: importlib.metadata.Distribution, fitting: frozenset[str]
) -> None:
    wheel = distribution.read_text("WHEEL") or ""
    tags = re.findall(r"^Tag: *(\S+)", wheel, re.MULTILINE)
    if not any(str(tag) in fitting for text in tags for tag in parse_tag(text)):
        how = f"for {', '.join(tags)}" if tags else "but not from a wheel"
        raise _DoesNotFit(f"{name} was installed here {how}")


def _copy(name: str, distribution: importlib.metadata.Distribution, folder: Path) -> None:
    for file in distribution.files or ():
        if ".." in file.parts or file.is_absolute() or "__pycache__" in file.parts:
            continue  # programs and data files of this environment
        source = Path(str(distribution.locate_file(file)))
        if not source.is_file():
            raise _DoesNotFit(f"{name} lacks its file {file}")
        place = folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
        place.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
    if not distribution.files or distribution.read_text("direct_url.json"):
        raise _DoesNotFit(f"{name} was not installed here from the index")


# --- folders


def _finish(folder: Path, target: Target, lean: bool) -> None:
    """Delete what is useless in an image, and compile the rest if this Python can."""
    for pattern in (*_OF_NO_USE, *(_NOT_LEAN if lean else ())):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for record in folder.glob("*.dist-info/RECORD"):
        # Programs begin with the path of the interpreter, which differs in the image.
        record.write_text(_PROGRAM.sub(r"../../../bin/\1,,", record.read_text()))
    if sys.version_info[:2] == target.python and sys.implementation.name == "cpython":
        # Hash-based and unchecked: the same sources give the same files. Python corrects the
        # paths in them at import.
        command = [sys.executable, "-I", "-m", "compileall", "-q", "-f", "-j", "1"]
        command += ["--invalidation-mode", "unchecked-hash", "-s", str(folder), "-p", "/"]
        # It fails for packages with files for other versions of Python, which does no harm.
        run_program([*command, str(folder)], _PIP_TIMEOUT)
    folder.chmod(0o755)
