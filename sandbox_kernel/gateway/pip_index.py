"""``@pip``: the package index that this machine's pip is set up for, read as pip reads it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.errors import SpecError
from sandbox_kernel.gateway.presets import Source, is_web
from sandbox_kernel.host_programs import find_program, run_program

_TIMEOUT = 30.0
_SECTIONS = ("global", "install", ":env:")
"""Of pip's configuration, in the order in which they override each other."""
_PROGRAM = """
import json
from pip._internal.configuration import Configuration
from pip._internal.models.index import PyPI, TestPyPI
configuration = Configuration(isolated=False)
configuration.load()
indexes = [(index.simple_url, index.file_storage_domain) for index in (PyPI, TestPyPI)]
print(json.dumps([list(configuration.items()), indexes]))
"""
_Found = tuple[Iterable[tuple[str, Any]], Iterable[tuple[str, str]]]
"""Items of pip's configuration, and its indexes."""


@dataclass(frozen=True)
class PipSettings:
    """What pip knows: its configuration, and indexes whose files are on another host."""

    options: Mapping[str, str]
    indexes: tuple[tuple[str, str], ...]
    """URL and the host of its files; the first is the default index."""


def read() -> Source:
    """The hosts of pip's indexes. SpecError if there is no pip."""
    return source_of(load_settings())


def source_of(settings: PipSettings) -> Source:
    """The hosts of pip's indexes, and what pip needs in a sandbox to use them."""
    options, source = settings.options, Source()
    default_url = settings.indexes[0][0] if settings.indexes else ""
    no_index = options.get("no-index", "").lower() in ("1", "true", "yes", "on")
    index = options.get("index-url") or default_url
    lists = {
        "PIP_INDEX_URL": [] if no_index else [index],
        "PIP_EXTRA_INDEX_URL": [] if no_index else options.get("extra-index-url", "").split(),
        "PIP_FIND_LINKS": options.get("find-links", "").split(),
    }
    for variable, urls in lists.items():
        plain = [_add(source, url, settings) for url in urls if is_web(url)]
        if plain and plain != [default_url]:
            source.env[variable] = " ".join(plain)
    if no_index:
        source.env["PIP_NO_INDEX"] = "1"
    if options.get("cert"):
        source.env["PIP_CERT"] = options["cert"]
    known = {name for target in source.targets for name in (target.host, str(target))}
    trusted = [host for host in options.get("trusted-host", "").split() if host in known]
    if trusted:
        source.env["PIP_TRUSTED_HOST"] = " ".join(trusted)
    return source


def _add(source: Source, url: str, settings: PipSettings) -> str:
    for known, files in settings.indexes:
        if url.rstrip("/") == known.rstrip("/"):
            source.add(f"https://{files}/")
    return source.add(url)


def load_settings() -> PipSettings:
    """pip's settings, as this interpreter's pip gives them, or that of another interpreter."""
    try:
        items, indexes = _import()
    except ImportError:
        items, indexes = _run()
    flat = dict(_flat(items))
    options = {
        key.removeprefix(f"{section}."): value
        for section in _SECTIONS
        for key, value in flat.items()
        if key.startswith(f"{section}.")
    }
    return PipSettings(options, tuple((url, files) for url, files in indexes))


def _flat(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    for key, value in items:
        if isinstance(value, Mapping):  # newer versions tell by file
            yield from ((inner, str(text)) for inner, text in value.items())
        else:
            yield key, str(value)


def _import() -> _Found:
    logger_class = logging.getLoggerClass()
    try:
        from pip._internal.configuration import Configuration
        from pip._internal.exceptions import ConfigurationError
        from pip._internal.models.index import PyPI, TestPyPI
    finally:
        logging.setLoggerClass(logger_class)  # pip sets its own, for the whole process
    configuration = Configuration(isolated=False)
    try:
        configuration.load()
    except ConfigurationError as error:
        raise SpecError(f"egress: @pip cannot be used: {error}") from None
    indexes = [(index.simple_url, index.file_storage_domain) for index in (PyPI, TestPyPI)]
    return configuration.items(), indexes


def _run() -> _Found:
    """Ask another interpreter's pip. ``-I``: nothing of the present folder is imported."""
    base = getattr(sys, "_base_executable", None)
    for python in dict.fromkeys(filter(None, (base, find_program("python3")))):
        try:
            ran = run_program([python, "-I", "-c", _PROGRAM], _TIMEOUT, cwd="/")
            items, indexes = json.loads(ran.stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            continue
        return items, indexes
    url = os.environ.get("PIP_INDEX_URL")
    if url:
        return [(":env:.index-url", url)], []
    raise SpecError(
        "egress: @pip cannot be used: there is no pip on this machine to ask for its index. "
        "Install pip, or name the hosts."
    )
