"""The same notebook, with what lies beside it, in a plain kernel and in a sandbox: the outputs are
equal."""

from __future__ import annotations

import pickle
import sqlite3
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from .live import PATIENCE

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
CELLS = (
    "import csv\nrows = list(csv.DictReader(open('data.csv')))\nrows",
    "import helpers\nhelpers.total(rows)",
    "from package import inner\nfrom package.deeper.leaf import name\nprint(inner.answer, name)",
    "import importlib\nimportlib.reload(helpers).total(rows)",
    "%run script.py one two",
    "%run -i sub/uses_rows.py",
    "%run -m package.tool",
    "%load helpers.py",
    "print(open('sub/deep.txt').read(), open('./sub/../data.csv').readline())",
    "from pathlib import Path\nsorted(map(str, Path().glob('**/*.txt')))",
    "import glob\nsorted(glob.glob('sub/*'))",
    "from IPython.display import Image\nImage('pixel.png')",
    "from IPython.display import HTML\nHTML(filename='table.html')",
    "import sqlite3\nsqlite3.connect('file:base.db?mode=ro', uri=True)"
    ".execute('select * from t').fetchall()",
    "import pickle\npickle.load(open('object.pickle', 'rb'))",
    "import zipfile\nzipfile.ZipFile('archive.zip').read('inside.txt')",
    "import sys\nsys.path.insert(0, 'archive.zip')\nimport zipped\nzipped.word",
    "!cat data.csv | wc -l; ls sub | sort",
    "lines = !head -2 data.csv\nlist(lines)",
    "%cd -q sub\nprint(open('deep.txt').read())\n%cd -q ..",
    "import os\nos.path.getsize('data.csv'), os.path.isdir('sub'), os.access('data.csv', os.R_OK)",
    "open('link.txt').read()",
    "open('nowhere.csv')",
    "import nowhere_at_all",
    "helpers.fails()",
    "import subprocess, sys\n"
    "subprocess.run([sys.executable, 'script.py', 'x'], capture_output=True, text=True).stdout",
    "from multiprocessing import get_context\n"
    "with get_context('spawn').Pool(1) as pool:\n    print(pool.map(helpers.double, [1, 2]))",
)


@pytest.fixture
def project(folder: Path) -> Path:
    top = folder / "project"
    (top / "sub").mkdir(parents=True)
    (top / "package" / "deeper").mkdir(parents=True)
    for name, text in {
        "data.csv": "name,count\napple,3\npear,4\n",
        "helpers.py": "def total(rows):\n    return sum(int(row['count']) for row in rows)\n"
        "def double(x):\n    return 2 * x\ndef fails():\n    raise ValueError('from the helper')\n",
        "script.py": "import sys\nprint('script', sys.argv[1:], open('data.csv').readline())\n",
        "sub/uses_rows.py": "print(len(rows), 'rows')\n",
        "sub/deep.txt": "deep",
        "sub/more.txt": "more",
        "package/__init__.py": "",
        "package/inner.py": "answer = 42\n",
        "package/tool.py": "from . import inner\n"
        "if __name__ == '__main__':\n    print('tool', inner.answer)\n",
        "package/deeper/__init__.py": "",
        "package/deeper/leaf.py": "name = __name__\n",
        "table.html": "<table><tr><td>1</td></tr></table>",
    }.items():
        (top / name).write_text(text)
    (top / "pixel.png").write_bytes(PIXEL)
    (top / "object.pickle").write_bytes(pickle.dumps({"a": [1, 2]}))
    (top / "link.txt").symlink_to("sub/deep.txt")
    with zipfile.ZipFile(top / "archive.zip", "w") as archive:
        archive.writestr("inside.txt", "zipped text")
        archive.writestr("zipped.py", "word = 'from a zip'\n")
    with sqlite3.connect(top / "base.db") as base:
        base.execute("create table t (x)")
        base.execute("insert into t values (7)")
    base.close()
    return top


def outputs(project: Path, kernel: str) -> list[list[dict[str, Any]]]:
    """What each cell showed, without tracebacks: they name the kernel's paths."""
    nbclient = pytest.importorskip("nbclient")
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        kernel_name=kernel,
        timeout=PATIENCE,
        allow_errors=True,
        resources={"metadata": {"path": str(project)}},
    )
    client.execute()
    return [joined({**one, "traceback": None} for one in cell.outputs) for cell in client.nb.cells]


def joined(outputs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Text that a kernel sends in one piece or in several, as it comes, is the same text."""
    found: list[dict[str, Any]] = []
    for one in outputs:
        last = found[-1] if found else {}
        if one["output_type"] == "stream" and last.get("name") == one["name"]:
            last["text"] += one["text"]
        else:
            found.append(one)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mount-ro", "mount", "copy"])
def test_outputs(project: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Data, modules, packages, scripts, pictures, archives, a data base, links and errors."""
    plain = outputs(project, "python3")
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", mode)
    sandboxed = outputs(project, "sandbox")
    for code, expected, found in zip(CELLS, plain, sandboxed, strict=True):
        assert found == expected, code
    assert len([cell for cell in plain if cell]) > len(CELLS) - 3
