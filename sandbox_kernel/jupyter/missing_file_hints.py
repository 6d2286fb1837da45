"""Hints for a cell that misses a file or module which lies beside the notebook on the host: the
sandbox does not see that folder, and the traceback does not say so.

The name of the missing file comes from the sandbox and may be anything. It is only compared with
names in the notebook's folder, no link is followed, and the sandbox does not learn the answer.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from sandbox_kernel.untrusted_text import printable

_FILE = re.compile(r"No such file or directory: ('[^'\n]{1,500}'|\"[^\"\n]{1,500}\")")
_MAGIC = re.compile(
    r"File `('[^'\n]{1,500}'|\"[^\"\n]{1,500}\")` not found\."
    r"|('[^'\n]{1,500}') was not found in history, "
)
"""IPython's messages for %run and %load."""
_NUMPY = re.compile(r"([^\n]{1,500}) not found\.")
_MODULE = re.compile(r"No module named '([^'\n]{1,200})'")
_MOST_TEXT, _MOST_PARTS = 4000, 10


def hint(error: Mapping[str, Any], folder: str, workdir: str, shown: str) -> str:
    """A hint after this error (the content of Jupyter's message), or an empty string. ``folder`` is
    the notebook's on the host, ``workdir`` the kernel's in the sandbox, and ``shown`` the
    setting that gives the sandbox a part of the folder, if any."""
    for name in _missed(error, (workdir, folder)):
        if name[:1] == ("..",):
            # Whether it exists stays unsaid: the sandbox may read the notebook with this line.
            return (
                f"{printable('/'.join(name))!r} leads out of the notebook's folder. This kernel "
                f"runs in a sandbox, which gets at most that folder: move the file there, or the "
                f"notebook to the folder above."
            )
        if _is_there(folder, name):
            beside = f"{printable('/'.join(name))!r} lies beside the notebook, but this kernel runs"
            if shown:
                return (
                    f"{beside} in a sandbox, and it is not among what {shown} and .sandboxignore "
                    f"let in. Files come in when a kernel is started: shut this one down, and "
                    f"start it again."
                )
            return (
                f"{beside} in a sandbox, which does not see that folder. To share it: "
                f"`sandbox-kernel install BACKEND --files mount-ro`, or "
                f"SANDBOX_KERNEL_FILES=mount-ro; then shut this kernel down, and start it again."
            )
    return ""


def _missed(error: Mapping[str, Any], folders: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Paths that the cell may have missed, in parts, relative to any of ``folders``."""
    kind, text = str(error.get("ename"))[:100], str(error.get("evalue"))[:_MOST_TEXT]
    if kind == "ModuleNotFoundError" and (found := _MODULE.search(text)):
        module = found[1].partition(".")[0]
        return [(f"{module}.py",), (module,)] if module.isidentifier() else []
    name = ""
    if kind == "FileNotFoundError" and (found := _NUMPY.fullmatch(text)):
        name = found[1]
    elif (kind == "FileNotFoundError" and (found := _FILE.search(text))) or (
        kind in ("Exception", "ValueError") and (found := _MAGIC.match(text))
    ):
        with contextlib.suppress(ValueError, SyntaxError):
            name = str(ast.literal_eval(found[found.lastindex or 1]))
    path = PurePosixPath(name)
    for folder in folders:
        if path.is_absolute() and path.is_relative_to(folder):
            path = path.relative_to(folder)
    if name and not path.is_absolute() and len(path.parts) <= _MOST_PARTS:
        return [path.parts]
    return []


def _is_there(folder: str, parts: tuple[str, ...]) -> bool:
    """Whether the folder has this file, without following links or hidden names."""
    path = folder
    for number, part in enumerate(parts, 1):
        if part.startswith(".") or "\0" in part:
            return False
        path = os.path.join(path, part)
        try:
            mode = os.lstat(path).st_mode
        except (OSError, ValueError):
            return False
        if not stat.S_ISDIR(mode) and (number < len(parts) or not stat.S_ISREG(mode)):
            return False
    return bool(parts)
