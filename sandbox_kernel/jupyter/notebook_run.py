"""Runs a notebook from its first cell to its last, for ``sandbox-kernel policy learn``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.jupyter.kernelspec import PROVISIONER

_INSTALL = "pip install 'sandbox-kernel[demo]'"
_MOST_TEXT = 300


@dataclass(frozen=True)
class FailedCell:
    """A cell that did not do what it should."""

    number: int
    """Of the code cells, from 1."""
    error: str


async def run_notebook(
    path: Path, kernel: str, environ: Mapping[str, str], *, timeout: float | None = None
) -> list[FailedCell]:
    """Run all cells in a new kernel, in the notebook's folder, also after one has failed; the
    failed ones. The notebook's file is left alone. While it runs, this process has the variables of
    ``environ``. ``timeout`` is for each cell. Cancelling it ends the kernel. SandboxError."""
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellTimeoutError, DeadKernelError
    except ImportError as error:
        raise SandboxError(f"Running a notebook needs nbclient: {_INSTALL} ({error}).") from None
    _check_kernel(kernel)
    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise SpecError(f"The notebook {path} cannot be read: {error}") from None
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    begun: list[Any] = []
    client = NotebookClient(
        notebook,
        kernel_name=kernel,
        timeout=timeout,
        allow_errors=True,
        resources={"metadata": {"path": _folder_of(path)}},
        on_cell_execute=lambda cell, cell_index: begun.append(notebook.cells[cell_index]),
    )
    stopped = ""
    with _environment(environ):
        try:
            await client.async_execute()
        except (DeadKernelError, CellTimeoutError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # nbclient takes that for a dead kernel
                raise asyncio.CancelledError from None
            stopped = str(error).strip().partition("\n")[0]
    failed = [
        FailedCell(number, _error_of(cell))
        for number, cell in enumerate(cells, 1)
        if _error_of(cell)
    ]
    if stopped:
        number = (
            next((n for n, cell in enumerate(cells, 1) if cell is begun[-1]), 1) if begun else 1
        )
        failed.append(FailedCell(number, stopped[:_MOST_TEXT]))
    return failed


def _folder_of(path: Path) -> str:
    return str(path.absolute().parent)


def _check_kernel(name: str) -> None:
    try:
        spec = KernelSpecManager().get_kernel_spec(name)
    except NoSuchKernel:
        raise SpecError(
            f"Jupyter has no kernel {name!r}. `sandbox-kernel install local` makes one; "
            f"`jupyter kernelspec list` names those that there are."
        ) from None
    provisioner = spec.metadata.get("kernel_provisioner", {})
    if provisioner.get("provisioner_name") != PROVISIONER:
        raise SpecError(
            f"The kernel {name!r} does not run in a sandbox, so nobody sees what it reaches. "
            f"Name one that `sandbox-kernel install` has made."
        )


def _error_of(cell: Any) -> str:
    for output in cell.outputs:
        if output.output_type == "error":
            return f"{output.ename}: {output.evalue}"[:_MOST_TEXT]
    return ""


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
