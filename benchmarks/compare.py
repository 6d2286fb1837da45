"""The main comparison: every row for every column, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.columns import WORK, Column
from benchmarks.rows import Row
from benchmarks.worker import Samples, Sizes, Worker, WorkerFailed

Progress = Callable[[str], object]

ORDER = ("start", *WORK, "restart", "stop", "notebook")
"""The tasks of one round: the life of a kernel."""


@dataclass
class Results:
    """The figures measured so far. All columns are compared with the first."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Column -> row -> a value for each round, in the row's unit."""
    problems: list[str] = field(default_factory=list)

    def value(self, column: str, row: str) -> float | None:
        """The median of all rounds; None if there was none."""
        values = self.rounds.get(column, {}).get(row)
        return statistics.median(values) if values else None

    def ratio(self, column: str, row: str) -> float | None:
        """A column's value over the first column's."""
        value, base = self.value(column, row), self.value(self.columns[0].name, row)
        return value / base if value is not None and base else None

    def add(self, column: Column, samples: Mapping[str, Sequence[float]]) -> None:
        """Reduce the samples of one round to a value for each row."""
        for row in self.rows:
            if values := samples.get(row.key):
                of_column = self.rounds.setdefault(column.name, {})
                of_column.setdefault(row.name, []).append(row.reduce(values) * row.scale)


@contextmanager
def workers(
    columns: Sequence[Column], sizes: Sizes, folder: Path, problem: Progress
) -> Iterator[list[Worker]]:
    """A process for each column that works here."""
    running: list[Worker] = []
    try:
        for column in columns:
            try:
                running.append(Worker(column, sizes, folder))
            except WorkerFailed as error:
                problem(f"column {column.name} is skipped: {error}")
        yield running
    finally:
        for worker in running:
            worker.close()


def compare(results: Results, sizes: Sizes, rounds: int, folder: Path, progress: Progress) -> None:
    """Fill ``results``. An interrupt keeps the figures measured so far."""

    def problem(text: str) -> None:
        results.problems.append(text)
        progress(text)

    with workers(results.columns, sizes, folder, problem) as running:
        wanted = {row.task for row in results.rows}
        tasks = [task for task in ORDER if task in wanted]
        run = _Run(results, running, problem)
        if tasks:
            progress("warming up: one start that does not count")
            run.task("start", 1, keep=False)
            for worker in [worker for worker in running if worker.column.name in run.failed]:
                problem(f"column {worker.column.name} is skipped")
                running.remove(worker)
                worker.close()
            run.task("stop", 1, keep=False)
        for number in range(rounds if tasks else 0):
            for task in tasks:
                progress(f"round {number + 1} of {rounds}: {task}")
                run.task(task, sizes.batches if task == "round_trips" else 1)
            # Another column is first in each round.
            running[:] = running[1:] + running[:1]
        run.task("discard", 1, keep=False)
        if "memory" in wanted:
            progress(f"memory of {sizes.kernels} idle kernels")
            run.task("memory", 1)


@dataclass
class _Run:
    results: Results
    workers: list[Worker]
    problem: Progress
    failed: set[str] = field(default_factory=set)
    """Columns in which something has failed."""

    def task(self, task: str, batches: int, *, keep: bool = True) -> None:
        """Run a task in all columns in turn. Columns in which it fails go on with the next task."""
        samples: dict[str, Samples] = {}
        for _ in range(batches):
            for worker in list(self.workers):
                if keep and task not in worker.column.tasks:
                    continue
                try:
                    found: Samples = worker.call(task) or {}
                except WorkerFailed as error:
                    self.problem(f"column {worker.column.name}, {task}: {error}")
                    self.failed.add(worker.column.name)
                    if worker.dead:
                        self.workers.remove(worker)
                    continue
                of_column = samples.setdefault(worker.column.name, {})
                for key, values in found.items():
                    of_column.setdefault(key, []).extend(values)
        if keep:
            for worker in self.workers:
                self.results.add(worker.column, samples.get(worker.column.name, {}))
