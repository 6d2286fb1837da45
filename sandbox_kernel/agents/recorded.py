"""The notebook's file: a valid .ipynb with what the jobs came to, replaced atomically.

It is written soon after a cell begins and after it ends, in a thread, and not more often than the
disk can bear; ``save`` and the end of the notebook write what is not there yet. Cells that were
there before stay. What another program has changed in the file meanwhile, such as JupyterLab, stays
too: only the cells of this notebook's jobs are put into it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from sandbox_kernel.agents.job_state import JobState
from sandbox_kernel.agents.outputs import json_object
from sandbox_kernel.atomic_write import written_aside
from sandbox_kernel.errors import SandboxError, SpecError

log = logging.getLogger("sandbox_kernel")

ENDING = ".ipynb"
OURS = "sandbox_kernel"
"""In a cell's metadata, with the job's id: for a process that goes on with the notebook."""
_INTERVAL = 0.5
_SHARE = 10.0
"""Writing takes at most this part of the time."""
_MAX_FILE = 2**30
_CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_LANGUAGE = ("name", "version", "mimetype", "file_extension", "pygments_lexer", "codemirror_mode")

Cell = dict[str, Any]
_Version = tuple[int, int, int]


class RecordedNotebook:
    """Used on the notebook's loop; only reading and writing the file happen in threads."""

    def __init__(self, path: Path, content: dict[str, Any] | None = None) -> None:
        self.path = path
        self._content = content or _empty()
        self._cells: list[Cell] = self._content["cells"]
        self._texts: dict[str, str] = {}
        """Cells as text, by id, so that one that has not changed costs little."""
        self._jobs: dict[str, JobState] = {}
        """The latest job of each cell that is ours."""
        self._removed: set[str] = set()
        self._on_disk: set[str] = set()
        self._unwritten: set[str] = set()
        self._written: _Version | None = _version(path)
        self._due = False
        self._not_before = 0.0
        self._writer: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self.problem = ""
        """Why the file could not be written last time."""

    @classmethod
    def open(
        cls, path: Path, source: Path | None = None, content: Mapping[str, Any] | None = None
    ) -> RecordedNotebook:
        """Of a file, which may be missing, or with the cells of another one, or with ``content``,
        which is not written yet. Blocks. SpecError."""
        if path.suffix != ENDING:
            raise SpecError(f"{path} was not opened: a notebook's name ends with {ENDING}.")
        path = Path(os.path.realpath(path))
        if not path.parent.is_dir():
            raise SpecError(f"{path} was not opened: its folder does not exist. Make it first.")
        if content is not None:
            made = cls(path, dict(content))
            made._due = True
            return made
        source = source or path
        return cls(path, _read(source) if source != path or path.exists() else None)

    def describe(self, kernelspec: Mapping[str, Any], name: str, language: object) -> None:
        """Note in the file which kernel it is, unless the file has one already."""
        metadata = self._content["metadata"]
        found = json_object(language)
        known = {key: found[key] for key in _LANGUAGE if key in found}
        shown, spoken = kernelspec.get("display_name", name), kernelspec.get("language", "")
        spec = {"name": name, "display_name": shown, "language": spoken}
        metadata.setdefault("kernelspec", spec)
        if known.get("name") and "language_info" not in metadata:
            metadata["language_info"] = known
        self._due = True

    def place(self, job: JobState) -> None:
        """Give a job its cell: the one with its ``cell_id``, or a new one at the end."""
        cell = self._find(job.cell_id)
        if cell is None:
            cell = {"cell_type": "code", "id": job.cell_id, "metadata": {}}
            self._cells.append(cell)
        self._jobs[job.cell_id] = job
        self._removed.discard(job.cell_id)
        self._refresh(job.cell_id, cell)

    def changed(self, job: JobState) -> None:
        """A job has begun or ended, or more of its output came afterwards."""
        if self._jobs.get(job.cell_id) is job and job.cell_id not in self._removed:
            self._unwritten.add(job.cell_id)
            self.write_soon()

    def know(self, job: JobState) -> list[Cell]:
        """A job that an earlier process has run; what the file has of it. Its cell stays as it is
        until the job changes."""
        cell = self._find(job.cell_id)
        if cell is None:
            self.place(job)
            return []
        self._jobs[job.cell_id] = job
        if json_object(cell["metadata"].get(OURS)).get("job") != job.id:
            return []
        outputs = cell.get("outputs")
        return [o for o in outputs if isinstance(o, dict)] if isinstance(outputs, list) else []

    def _find(self, cell_id: str) -> Cell | None:
        return next((c for c in self._cells if c["id"] == cell_id), None)

    def _refresh(self, cell_id: str, cell: Cell) -> None:
        job = self._jobs[cell_id]
        cell["cell_type"] = "code"
        cell.pop("attachments", None)
        cell["source"] = job.code
        cell["metadata"] = {**cell["metadata"], OURS: {"job": job.id}}
        cell["execution_count"] = job.execution_count
        cell["outputs"] = job.outputs.merged()
        self._texts.pop(cell_id, None)

    # --- writing

    def write_soon(self) -> None:
        self._due = True
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_in_time())

    async def _write_in_time(self) -> None:
        try:
            while self._due:
                await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
                await self.write(lasting=False)
        except (SandboxError, OSError) as error:
            self._complain(error)
        finally:
            self._writer = None

    def _complain(self, error: Exception) -> None:
        if str(error) != self.problem:
            self.problem = str(error)
            log.warning("The notebook %s could not be written: %s", self.path, error)

    async def write(self, *, lasting: bool = True) -> None:
        """Write what is not on disk yet. OSError, or SpecError if the file is no notebook now."""
        async with self._writing:
            if not self._due and self._written is not None:
                return
            self._due = False
            began = time.monotonic()
            try:
                if (content := await asyncio.to_thread(self._changed_by_others)) is not None:
                    self._take(content)
                for cell_id in self._unwritten:
                    if (cell := self._find(cell_id)) is not None:
                        self._refresh(cell_id, cell)
                self._unwritten.clear()
                # Cells are replaced on this loop, never changed, so a thread may read them.
                cells = [(cell["id"], dict(cell)) for cell in self._cells]
                await _to_its_end(asyncio.to_thread(self._replace, cells, lasting))
            except BaseException:
                self._due = True
                raise
            finally:
                ended = time.monotonic()
                self._not_before = ended + max(_INTERVAL, _SHARE * (ended - began))
            self.problem = ""

    async def close(self) -> None:
        """Write the rest. Says in the log why that does not work, if it does not."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])
        try:
            await self.write()
        except (SandboxError, OSError) as error:
            self.problem = ""
            self._complain(error)

    def _replace(self, cells: list[tuple[str, Cell]], lasting: bool) -> None:
        texts = []
        for cell_id, cell in cells:
            if cell_id not in self._texts:
                self._texts[cell_id] = _cell_text(cell)
            texts.append(self._texts[cell_id])
        rest = {**self._content, "cells": []}
        head, _, tail = _text(rest).partition('"cells": []')
        body = '"cells": [\n' + ",\n".join(texts) + "\n ]" if texts else '"cells": []'
        data = f"{head}{body}{tail}\n".encode(errors="replace")
        mode = _mode(self.path)
        with written_aside(self.path.parent, data, prefix=".~", lasting=lasting) as temporary:
            temporary.chmod(mode)
            os.replace(temporary, self.path)
        self._written = _version(self.path)
        self._on_disk = {cell_id for cell_id, _ in cells}

    def _changed_by_others(self) -> dict[str, Any] | None:
        """The file's content if another program has changed it. Blocks."""
        found = _version(self.path)
        return None if found is None or found == self._written else _read(self.path)

    def _take(self, content: dict[str, Any]) -> None:
        """Go on with what another program has made of the file. Cells of ours stay as they are;
        those that it deleted stay deleted."""
        cells: list[Cell] = content["cells"]
        there = {cell["id"] for cell in cells}
        self._removed |= (self._on_disk - there) & self._jobs.keys()
        ours = self._jobs.keys() - there - self._removed
        cells.extend(cell for cell in self._cells if cell["id"] in ours)
        self._content, self._cells = content, cells
        self._texts.clear()
        self._unwritten |= self._jobs.keys() - self._removed


async def _to_its_end(writing: Coroutine[Any, Any, None]) -> None:
    """Also if we are cancelled: what a thread writes later would replace what is written next."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def check_cell_id(cell_id: str) -> str:
    """The id itself, or SpecError."""
    if not _CELL_ID.fullmatch(cell_id):
        raise SpecError(
            f"A cell's id has 1 to 64 characters of a-z A-Z 0-9 - _; {cell_id!r} does not fit."
        )
    return cell_id


def _empty() -> dict[str, Any]:
    return {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def _read(path: Path) -> dict[str, Any]:
    """A notebook's file, as version 4.5. SpecError if it is none."""
    refused = f"The notebook {path}"
    try:
        if path.stat().st_size > _MAX_FILE:
            raise SpecError(f"{refused} has more than {_MAX_FILE} bytes.")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(f"{refused} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{refused} is not JSON, so it is no notebook: {error}.") from None
    version = content.get("nbformat") if isinstance(content, dict) else None
    if version != 4:
        raise SpecError(
            f"{refused} has the format {version!r}, not 4. Open and save it in JupyterLab, or "
            f"convert it: `jupyter nbconvert --to notebook --inplace {path.name}`."
        )
    cells = content.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise SpecError(f"{refused} has no list of cells, so it is no notebook.")
    if not isinstance(content.setdefault("metadata", {}), dict):
        raise SpecError(f"{refused} has metadata that is no object, so it is no notebook.")
    # Nothing else is valid there.
    content = {key: content.get(key) for key in ("cells", "metadata", "nbformat", "nbformat_minor")}
    minor = content["nbformat_minor"]
    content["nbformat_minor"] = max(5, minor) if isinstance(minor, int) else 5
    taken: set[str] = set()
    for cell in cells:
        given = cell.get("id")
        fits = isinstance(given, str) and _CELL_ID.fullmatch(given) and given not in taken
        cell["id"] = given if fits else secrets.token_hex(4)
        taken.add(cell["id"])
        if not isinstance(cell.setdefault("metadata", {}), dict):
            raise SpecError(f"{refused} has a cell whose metadata is no object.")
    return content


def _cell_text(cell: Cell) -> str:
    """As nbformat writes it: texts of several lines as lists of lines."""
    cell = {**cell, "source": _lines(cell.get("source", ""))}
    if cell.get("cell_type") == "code":
        cell["outputs"] = [_output(output) for output in cell.get("outputs", [])]
    return "\n".join(f"  {line}" for line in _text(cell).split("\n"))


def _output(output: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(output)
    if "text" in found:
        found["text"] = _lines(found["text"])
    if isinstance(data := found.get("data"), dict):
        found["data"] = {
            mime: value if mime == "application/json" or mime.endswith("+json") else _lines(value)
            for mime, value in data.items()
        }
    return found


def _lines(text: Any) -> Any:
    return text.splitlines(True) if isinstance(text, str) else text


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, separators=(",", ": "))


def _version(path: Path) -> _Version | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _mode(path: Path) -> int:
    """That of the file, or of a new one."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        # Asking with umask(2) would change it for the other threads.
        status = Path("/proc/self/status").read_text()
        found = re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
        return 0o666 & ~int(found.group(1), 8) if found else 0o600
