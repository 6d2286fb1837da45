"""A sweep over parameters with papermill: one word more, and each run has a sandbox of its own.

``papermill --engine sandbox in.ipynb out.ipynb -p rate 0.1`` is the same on a command line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import papermill

RATES = (0.05, 0.5, 1.05)
CELLS = (
    "rate = 0.1\nsteps = 50",
    "x = 4.0\nfor _ in range(steps):\n    x -= rate * 2 * x",
    "import json\nprint(json.dumps({'rate': rate, 'x': x}))",
)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    template = folder / "descent.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    cells[0].metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), template)
    for rate in RATES:
        done = papermill.execute_notebook(
            template,
            folder / f"descent-{rate}.ipynb",
            parameters={"rate": rate},
            engine_name="sandbox",
            sandbox_settings={"memory_mib": 512},
            progress_bar=False,
        )
        found = json.loads(done.cells[-1].outputs[-1].text)
        state = "converges" if abs(found["x"]) < 0.1 else "does not converge"
        print(f"rate {found['rate']}: {state} (x = {found['x']:.3g})")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sweep"))
