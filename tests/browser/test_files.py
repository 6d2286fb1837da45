"""Files beside the notebook, as a person in JupyterLab sees them."""

from __future__ import annotations

import pytest

from .lab import Lab

READ = "import helpers\nprint(open('data.csv').read(), helpers.word, open('sub/deep.txt').read())"
PICTURE = "from IPython.display import Image\nImage('pixel.png')"
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
HIDDEN = "import os\nprint([name for name in os.listdir() if os.path.isfile(name)])"


def beside(lab: Lab) -> None:
    work = lab.server.root / "work"
    (work / "sub").mkdir(parents=True)
    for name, text in (
        ("data.csv", "1,2"),
        ("helpers.py", "word = 'module'"),
        ("sub/deep.txt", "deep"),
        (".env", "secret"),
    ):
        (work / name).write_text(text)
    (work / "pixel.png").write_bytes(PIXEL)


def test_a_mounted_folder(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook in a folder reads data, imports a module and shows a picture, as with a plain
    kernel; hidden files are no files."""
    monkeypatch.setenv("SANDBOX_KERNEL_FILES", "mount-ro")
    beside(lab)
    lab.open("work/n.ipynb", READ, PICTURE, HIDDEN)
    lab.run(0)
    lab.wait_for_output(0, "1,2 module deep")
    lab.run(1)
    lab.cell(1).locator(".jp-OutputArea img").wait_for()
    lab.run(2)
    lab.wait_for_output(2, "data.csv")
    assert ".env" not in lab.output(2)


def test_a_folder_that_is_not_shown(lab: Lab) -> None:
    """Below the traceback stands why, and how to share the folder."""
    beside(lab)
    lab.open("work/n.ipynb", "open('data.csv')", "import helpers")
    for number, name in enumerate(("data.csv", "helpers.py")):
        lab.run(number)
        lab.wait_for_output(number, f"'{name}' lies beside the notebook")
        assert "SANDBOX_KERNEL_FILES=mount-ro" in lab.output(number)
    lab.screenshot("hint")
