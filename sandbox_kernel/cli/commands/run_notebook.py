"""``sandbox-kernel run`` with notebooks."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.options import CommandParser, given_settings, positive, seconds, winning
from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.spec import NOTEBOOK

_RUN = ".run" + NOTEBOOK
"""How the output's name ends if --output does not say."""


def add_options(parser: CommandParser) -> None:
    """The options that only notebooks have."""
    group = parser.add_argument_group("notebooks", "What papermill has, too, means the same.")
    several: dict[str, Any] = {"action": "append", "default": []}
    pair: dict[str, Any] = {**several, "nargs": 2, "metavar": ("NAME", "VALUE")}
    added = [
        group.add_argument("-p", "--parameters", **pair, help="a parameter, as papermill reads it"),
        group.add_argument("-r", "--parameters-raw", **pair, help="a parameter that is text"),
        group.add_argument("-y", "--parameters-yaml", **several, metavar="YAML", help="several"),
        group.add_argument(
            *("-f", "--parameters-file"), **several, metavar="FILE", help="as YAML or JSON"
        ),
        group.add_argument(
            *("-o", "--output"),
            metavar="FILE",
            help=f"where to write it (default: NAME{_RUN}); a folder for several notebooks",
        ),
        group.add_argument(
            *("-k", "--kernel"), metavar="NAME", help="a kernel that `install` has made"
        ),
        group.add_argument(
            "--deadline", type=seconds, metavar="SECONDS", help="end all of it after this long"
        ),
        group.add_argument(
            *("-j", "--jobs"), type=positive, metavar="N", help="run so many at once (default: 1)"
        ),
        group.add_argument(
            "--json", action="store_true", help="print each step on stdout, as a line of JSON"
        ),
    ]
    parser.set_defaults(notebook_options=frozenset(option.dest for option in added))


def run(arguments: argparse.Namespace) -> int:
    """Run the notebooks of a command line; the exit code."""
    # lazy: start-up time
    from sandbox_kernel.agents.notebook_run import RunOptions
    from sandbox_kernel.agents.parameters import read_parameters
    from sandbox_kernel.agents.pipeline import exit_code, run_notebooks
    from sandbox_kernel.cli.run_progress import progress_for, tell_failures

    if arguments.tty or arguments.cwd:
        raise SpecError(
            "--tty and --cwd are for commands. A notebook's kernel sees the notebook's folder, if "
            "it is to see it, with --files."
        )
    arguments.has_former_volume = False  # --workspace is a notebook's saved workspace
    runs = _with_outputs([Path(name) for name in arguments.notebooks], arguments.output)
    options = RunOptions(
        parameters=read_parameters(
            files=arguments.parameters_file,
            yaml=arguments.parameters_yaml,
            pairs=arguments.parameters,
            raw=arguments.parameters_raw,
        ),
        cell_timeout=arguments.timeout,
        deadline=arguments.deadline,
        kernel=arguments.kernel,
        backend=arguments.backend,
        settings=given_settings(arguments),
    )
    if not arguments.debug:
        logging.getLogger("traitlets").addFilter(_is_news)
    progress = progress_for(len(runs), as_json=arguments.json)
    work = run_notebooks(runs, options, jobs=arguments.jobs or 1, tell=progress.tell)
    given = [*options.settings, *(["backend"] if options.backend else [])]
    try:
        with winning(given):
            return exit_code(foreground.run(progress.during(work)))
    finally:
        tell_failures(progress.reports)


def _is_news(record: logging.LogRecord) -> bool:
    """False for our own errors: jupyter_client logs them with a traceback, and raises them."""
    return not (record.exc_info and isinstance(record.exc_info[1], SandboxError))


def _with_outputs(notebooks: Sequence[Path], output: str | None) -> list[tuple[Path, Path]]:
    """Each notebook and where it is written. SpecError if that is not clear."""
    if wrong := next((path for path in notebooks if path.suffix != NOTEBOOK), None):
        raise SpecError(f"{str(wrong)!r} is no notebook: those end in {NOTEBOOK}.")
    if len(notebooks) > 1 and output is None:
        raise SpecError("Say into which folder several notebooks are written: --output FOLDER")
    if output is None:
        return [(path, path.with_suffix(_RUN)) for path in notebooks]
    if len(notebooks) == 1 and not output.endswith(os.sep) and not os.path.isdir(output):
        if not output.endswith(NOTEBOOK):
            raise SpecError(
                f"--output {output!r} is neither a notebook ({NOTEBOOK}) nor a folder that exists; "
                f"for a new folder, end it with {os.sep!r}."
            )
        return [(notebooks[0], Path(output))]
    folder = Path(output)
    names = [path.name for path in notebooks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(f"Two notebooks are called {twice!r}, and would be written to one file.")
    folder.mkdir(parents=True, exist_ok=True)
    return [(path, folder / path.name) for path in notebooks]
