"""Files are saved while cells run."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future
from pathlib import Path

from sandbox_kernel.tunnel import background
from sandbox_kernel.workspace import SaveReport, Store, export, persist

from .live import PATIENCE, Live

MAKE = """
import hashlib, json, os
for number in range(60):
    os.makedirs(f"d{number % 7}", exist_ok=True)
    with open(f"d{number % 7}/f{number}", "wb") as file:
        file.write(os.urandom(500_000 + number))
with open("large", "wb") as file:
    file.write(os.urandom(20_000_001))
print(json.dumps({
    os.path.relpath(os.path.join(folder, name)): hashlib.sha256(
        open(os.path.join(folder, name), "rb").read()).hexdigest()
    for folder, _, names in os.walk(".") for name in names
}))
"""


def test_a_first_save_while_cells_run(live: Live, tmp_path: Path) -> None:
    """Cells get their answers all along, and the save has every byte."""
    made = json.loads(live.ok(MAKE).text())
    store = Store.open(str(tmp_path / "store"))
    saving: Future[SaveReport] = background.submit(persist(live.kernel, store, "work"))
    cells = 0
    while not saving.done():
        assert live.ok(f"{cells} + 1").value == str(cells + 1)
        cells += 1
    report = saving.result(PATIENCE)
    assert report.new
    assert not report.problems
    assert cells
    export(store, "work", str(tmp_path / "out"))
    found = {
        str(path.relative_to(tmp_path / "out")): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == made
