"""A pipeline on nbclient, with the kernel "sandbox" in place of "python3".

That name is all that changes for a program that runs notebooks through Jupyter's own packages.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CELLS = (
    "import os\nos.uname().nodename, os.getcwd()",
    "total = sum(range(1_000_001))\ntotal",
    "from pathlib import Path\nPath('total.txt').write_text(str(total))\nsorted(os.listdir())",
)


def main(output: Path) -> int:
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, kernel_name="sandbox", timeout=60)
    try:
        client.execute()
    except CellExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        nbformat.write(notebook, output)
    for cell in notebook.cells:
        print(cell.outputs[-1].data["text/plain"])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "pipeline.ipynb")))
