"""The command line: ``python -m benchmarks [compare|scale|programs|workspace|egress] ...``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import cells, changes, egress, programs, report, workspace
from benchmarks.columns import COLUMNS, DEFAULT_COLUMNS, Column, before_columns
from benchmarks.compare import Results, compare, workers
from benchmarks.rows import ROWS
from benchmarks.scale import Point
from benchmarks.worker import QUICK, Sizes, WorkerFailed

RESULTS = Path(__file__).parent / "results"
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # A shell's `timeout` or a CI job that ends this also gets the figures measured so far.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts = report.machine_facts()
    _progress(report.machine_line(facts))
    # A short path, because it holds Unix sockets.
    folder = Path(tempfile.mkdtemp(prefix="skb-"))
    try:
        run = {
            "compare": run_compare,
            "scale": run_scale,
            "programs": run_programs,
            "workspace": run_workspace,
            "egress": run_egress,
        }
        return run[options.benchmark](options, facts, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_compare(options: argparse.Namespace, facts: dict[str, object], folder: Path) -> int:
    sizes = QUICK if options.quick else Sizes()
    rounds = options.rounds or (1 if options.quick else 3)
    results = Results(_columns(options, DEFAULT_COLUMNS), [ROWS[name] for name in options.rows])
    interrupted = True
    with contextlib.suppress(KeyboardInterrupt):
        compare(results, sizes, rounds, folder, _progress)
        interrupted = False
    _print_title(facts, interrupted)
    print(f"rounds: {rounds}; output: {sizes.output / 1e6:g} MB; prints: {sizes.prints:,}")
    for column in results.columns:
        print(f"  {column.name}: {column.about}")
    print()
    print(report.comparison_table(results))
    print()
    for check in report.checks(results):
        print(check)
    content = report.comparison_json(results, facts, sizes, rounds)
    return _save(options.json or RESULTS / "latest.json", content, interrupted)


def run_scale(options: argparse.Namespace, facts: dict[str, object], folder: Path) -> int:
    columns = _columns(options, ("local", "sandbox"))
    curves: dict[str, list[Point]] = {column.name: [] for column in columns}
    problems: list[str] = []
    interrupted = True
    with contextlib.suppress(KeyboardInterrupt):
        with workers(columns, Sizes(), folder, problems.append) as running:
            for count in options.counts:
                for worker in running:
                    _progress(f"{worker.column.name}, kernels: {count}")
                    try:
                        size = {"kernels": count, "round_trips": options.trips}
                        curves[worker.column.name].append(worker.call("many_kernels", **size))
                    except WorkerFailed as error:
                        problems.append(f"column {worker.column.name}, {count} kernels: {error}")
                        _progress(problems[-1])
        interrupted = False
    _print_title(facts, interrupted)
    print(f"every kernel does {options.trips} round trips, all kernels at once\n")
    print(report.curve_table(curves))
    print()
    for line in report.bends(curves):
        print(line)
    content = report.curve_json(curves, facts, problems)
    return _save(options.json or RESULTS / "scale.json", content, interrupted)


def run_programs(options: argparse.Namespace, facts: dict[str, object], folder: Path) -> int:
    rounds = options.rounds or (1 if options.quick else 5)
    samples = programs.measure(folder, rounds, _progress)
    in_all = cells.measure(folder, rounds, _progress)
    _print_title(facts, False)
    print(f"rounds: {rounds}; medians\n")
    print(report.table(programs.lines(samples)))
    print()
    print(report.table(cells.lines(in_all)))
    print()
    for check in cells.checks(in_all):
        print(check)
    content = {"machine": facts, "seconds": samples, "cells": in_all}
    return _save(options.json or RESULTS / "programs.json", content)


def run_workspace(options: argparse.Namespace, facts: dict[str, object], folder: Path) -> int:
    os.environ["SANDBOX_KERNEL_DATA_DIR"] = str(folder / "data")
    os.environ["SANDBOX_KERNEL_RUNTIME_DIR"] = str(folder / "run")
    rounds = options.rounds or (1 if options.quick else 3)
    files, size = (2_000, 200_000_000) if options.quick else (10_000, 1_000_000_000)
    figures = workspace.measure(folder, files, size, rounds, _progress)
    moved = changes.measure(folder, size, _progress) if options.changes else []
    _print_title(facts, False)
    print(f"rounds: {rounds}; {files:,} files with {size / 1e6:g} MB of random bytes\n")
    print(workspace.report_table(figures))
    print()
    for check in workspace.checks(figures, size):
        print(check)
    if moved:
        print(f"\na changed file of {size / 1e6:g} MB\n")
        print(report.table(moved))
    content = {
        "machine": facts,
        "figures": {"files": files, "size": size, **figures},
        "changes": moved,
    }
    return _save(options.json or RESULTS / "workspace.json", content)


def run_egress(options: argparse.Namespace, facts: dict[str, object], folder: Path) -> int:
    rounds = options.rounds or (1 if options.quick else 3)
    size = 50_000_000 if options.quick else 200_000_000
    own = folder / "own"
    own.mkdir()
    os.environ["SANDBOX_KERNEL_DATA_DIR"] = str(own / "data")
    os.environ["SANDBOX_KERNEL_RUNTIME_DIR"] = str(own / "run")
    os.environ["SANDBOX_KERNEL_WARM_SPARES"] = "0"
    columns = [COLUMNS[name] for name in options.columns or egress.UNUSED_COLUMNS]
    if options.before:
        columns = before_columns(columns, options.before)
    unused = Results(columns, [ROWS[name] for name in egress.UNUSED_ROWS])
    figures = egress.Figures()
    interrupted = True
    with contextlib.suppress(KeyboardInterrupt):
        egress.measure(figures, own, size, rounds, _progress)
        compare(unused, egress.UNUSED_SIZES, rounds, folder, _progress)
        interrupted = False
    _print_title(facts, interrupted)
    print(f"rounds: {rounds}; transfers of {size / 1e6:g} MB\n")
    if figures.columns:
        print(report.table(egress.lines(figures)))
    print("\na kernel that makes no request\n")
    for column in columns:
        print(f"  {column.name}: {column.about}")
    print()
    print(report.comparison_table(unused))
    print()
    for check in (*egress.checks(figures), *egress.unused_checks(unused)):
        print(check)
    content = {
        "machine": facts,
        "size": size,
        **asdict(figures),
        "unused": unused.rounds,
        "problems": [*figures.problems, *unused.problems],
    }
    return _save(options.json or RESULTS / "egress.json", content, interrupted)


def _columns(options: argparse.Namespace, default: Sequence[str]) -> list[Column]:
    if options.kernels:
        named = [COLUMNS[name] for name in options.columns or ()]
        return [*named, *(Column(name, f"kernelspec {name}", name) for name in options.kernels)]
    columns = [COLUMNS[name] for name in options.columns or default]
    return before_columns(columns, options.before) if options.before else columns


def _print_title(facts: dict[str, object], interrupted: bool) -> None:
    if interrupted:
        print("\nInterrupted; these figures were measured so far.")
    print(report.machine_line(facts))


def _save(path: Path, content: dict[str, Any], interrupted: bool = False) -> int:
    """Print the problems, save the figures, and give the exit code."""
    problems = content.get("problems", [])
    for problem in problems:
        print(f"problem: {problem}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"saved in {path}")
    return INTERRUPTED if interrupted else 1 if problems else 0


_begin = time.monotonic()


def _progress(text: str) -> None:
    print(f"[{time.monotonic() - _begin:6.1f} s] {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    columns = "\n".join(f"  {c.name:<16} {c.about}" for c in COLUMNS.values())
    rows = "\n".join(f"  {row.name:<16} {row.about} ({row.unit})" for row in ROWS.values())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the sandbox kernel next to a plain local one, in the same run.",
        epilog=f"columns:\n{columns}\n\nrows:\n{rows}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "benchmark",
        nargs="?",
        choices=("compare", "scale", "programs", "workspace", "egress"),
        default="compare",
        help="compare (the default): all rows; scale: many kernels at work at once; "
        "programs: papermill, a hundred cells in all, and notebooks in a server; "
        "workspace: saving and restoring files; egress: ways out of a sandbox",
    )
    parser.add_argument(
        "--columns", nargs="+", choices=COLUMNS, metavar="COLUMN", help="the first is the base"
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=(),
        metavar="NAME",
        help="kernelspecs to measure, after the columns named with --columns, if any",
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="measure each sandbox column a second time, with the package of another checkout",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to save the figures")
    only_compare = parser.add_argument_group("compare")
    only_compare.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    only_compare.add_argument("--rounds", type=_positive, help="3 by default, 1 with --quick")
    only_compare.add_argument("--quick", action="store_true", help="less of everything")
    only_workspace = parser.add_argument_group("workspace")
    only_workspace.add_argument(
        "--changes",
        action="store_true",
        help="also: what a small change of a large file moves, here and with restic and borg",
    )
    only_scale = parser.add_argument_group("scale")
    only_scale.add_argument(
        "--counts", nargs="+", type=_positive, default=[1, 5, 20, 50], help="numbers of kernels"
    )
    only_scale.add_argument(
        "--trips", type=_positive, default=200, help="round trips that each kernel does"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value
