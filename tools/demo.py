"""Run a notebook in a sandboxed kernel, cell by cell, and show its output. `make demo` calls it.

The last line says where the code ran. The exit code is 0 only if all cells succeeded and a kernel
that promises a sandbox ran in one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from sandbox_kernel.jupyter.kernelspec import list_kernelspecs

QUICKSTART = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"
MAX_OUTPUT = 4000
NAMESPACES = ("user", "pid", "mnt", "ipc", "uts", "net")

# Runs here and in the kernel; equal answers mean the same place.
WHERE = f"""
import os
def where():
    def link(name):
        try:
            return os.readlink("/proc/self/ns/" + name)
        except OSError:
            return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return {{"host": os.uname().nodename, "uid": os.getuid(), "boot": boot,
            "namespaces": {{name: link(name) for name in {NAMESPACES!r}}}}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", nargs="?", type=Path, default=QUICKSTART)
    parser.add_argument("--kernel", default="sandbox", help="default: sandbox")
    arguments = parser.parse_args()
    try:
        answer = run(arguments.notebook, arguments.kernel)
    except NoSuchKernel:
        return failed(
            f"Jupyter has no kernel {arguments.kernel!r}. Run this with 'make demo', or see "
            f"'jupyter kernelspec list'."
        )
    except CellExecutionError as error:
        return failed(f"A cell failed: {printable(f'{error.ename}: {error.evalue}')}")
    except (CellTimeoutError, RuntimeError) as error:  # RuntimeError: a dead kernel, SandboxError
        return failed(f"The kernel {arguments.kernel!r} failed: {error}")
    try:
        return report(arguments.kernel, answer)
    except (LookupError, TypeError, ValueError):
        return failed(f"The kernel gave an invalid answer about where it runs: {answer!r}")


def run(path: Path, kernel: str) -> str:
    """Execute the notebook, print its outputs, and return the kernel's answer to WHERE."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name=kernel,
        timeout=60,
        startup_timeout=60,
        resources={"metadata": {"path": str(path.parent)}},
    )
    print(f"Starting the kernel {kernel!r} for {path.name} ...", flush=True)
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "markdown":
                print("\n" + cell.source)
            elif cell.cell_type == "code":
                print("\n" + textwrap.indent(cell.source, "  | ", lambda _: True), flush=True)
                try:
                    client.execute_cell(cell, index)
                finally:
                    for output in cell.outputs:
                        print(textwrap.indent(as_text(output).rstrip("\n"), "  "), flush=True)
        asked = nbformat.v4.new_code_cell(WHERE + "import json; print(json.dumps(where()))")
        notebook.cells.append(asked)
        client.execute_cell(asked, len(notebook.cells) - 1)
    answer = "".join(output.get("text", "") for output in asked.outputs)
    return answer[:MAX_OUTPUT]


def as_text(output: Any) -> str:
    """The part of one output that a terminal can show."""
    if output.output_type == "stream":
        text = output.text
    elif output.output_type == "error":
        text = f"{output.ename}: {output.evalue}"
    else:
        data = output.data
        rich = [kind for kind in data if kind not in ("text/plain", "text/markdown")]
        text = str(data.get("text/markdown") or data.get("text/plain") or "")
        text += f"\n[also shown as {', '.join(rich)}]" if rich else ""
    return printable(text)


def printable(text: str) -> str:
    """Text from the sandbox, cut to length and without control characters."""
    kept = "".join(c for c in text[:MAX_OUTPUT] if c.isprintable() or c in "\n\t")
    return kept + (" ..." if len(text) > MAX_OUTPUT else "")


def report(kernel: str, answer: str) -> int:
    """Print where the code ran, compared with this process. Returns the exit code."""
    here, there = where(), json.loads(answer)
    if there["boot"] != here["boot"]:
        apart = "on another (virtual) machine"
    else:
        own = [n for n in NAMESPACES if there["namespaces"][n] != here["namespaces"][n]]
        apart = f"in its own namespaces ({', '.join(own)})" if own else ""
    if not apart:
        print(
            f"\nThe code ran directly on {here['host']!r}, without a sandbox (kernel {kernel!r})."
        )
        promised = kernel in {spec.name for spec in list_kernelspecs()}
        return failed(f"The kernel {kernel!r} promises a sandbox.") if promised else 0
    print(
        f"\nThe code ran in the sandbox {str(there['host'])[:80]!r} {apart}, as uid "
        f"{int(there['uid'])}; this is {here['host']!r}, uid {os.getuid()}."
    )
    return 0


def where() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(WHERE, scope)  # noqa: S102  (our own text, the same that the kernel runs)
    answer: dict[str, Any] = scope["where"]()
    return answer


def failed(message: str) -> int:
    print(f"\nDemo failed. {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
