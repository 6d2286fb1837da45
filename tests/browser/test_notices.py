"""What a person reads in JupyterLab when something goes wrong."""

from __future__ import annotations

from pathlib import Path

from .lab import Lab

HOARD = "hoard = []\nwhile True: hoard.append(bytearray(2**20))"


def test_why_the_kernel_died(lab: Lab) -> None:
    """A cell takes too much memory. Lab's dialog says only that the kernel appears to have died;
    below the cell stands why, with the figures and what to do, and the cell waits no longer."""
    lab.server.options("--SandboxProvisioner.memory_mib=256")
    lab.open("n.ipynb", HOARD, "print(6 * 7)")
    lab.run(0)
    lab.wait_for_output(0, "The kernel died: out of memory: ")
    assert " MiB of 256 MiB" in lab.output(0)
    assert "memory_mib" in lab.output(0)
    lab.wait_for_dialog("Kernel Restarting")
    lab.screenshot("death")
    lab.wait_until_idle()
    assert "*" not in lab.prompt(0)
    lab.run(1)
    lab.wait_for_output(1, "42")


def test_files_that_are_not_saved(lab: Lab, folder: Path) -> None:
    """The notebook is saved, its files are not: the cell that ran last says so."""
    lab.open("n.ipynb", "print(open('file', 'w').write('1'))")
    lab.run(0)
    lab.wait_for_output(0, "1")
    store = folder / "data" / "store"
    store.rename(folder / "data" / "away")
    store.write_text("no folder")
    lab.save()
    lab.wait_for_output(0, "not the files that its cells wrote")
    lab.screenshot("unsaved")
    store.unlink()
    (folder / "data" / "away").rename(store)
    lab.write(0, "print(2)")
    lab.save()
    lab.wait_for_output(0, "saved again")


def test_a_kernel_that_does_not_start(lab: Lab) -> None:
    """Lab's dialog shows why, and what to do, without scrolling."""
    lab.server.options("--SandboxProvisioner.image=py")
    lab.visit("n.ipynb", "1")
    lines = lab.wait_for_dialog("Error Starting Kernel").splitlines()
    assert lines[1].startswith("Sandbox 'kernel-")
    assert any("use a backend with" in line for line in lines)
    text = lab.page.locator("dialog.jp-Dialog pre").first
    assert text.evaluate("pre => pre.scrollWidth <= pre.parentElement.clientWidth")
    lab.screenshot("start")
