"""What people do: run cells, save, lose the server, lose the sandbox, restart."""

from __future__ import annotations

import re
import signal

from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.tunnel import background
from sandbox_kernel.workspace import Store, name_for_notebook
from tests.helpers.waiting import wait_until

from .lab import Lab

WRITE = "x = 41\nopen('result.txt', 'w').write('hello')"
PRINT = "import time\nfor i in range(80): print('line', i, flush=True); time.sleep(0.1)"
LOOK = "print('sum', x + 1, open('result.txt').read())"


def test_nothing_is_lost(lab: Lab) -> None:
    """The server is killed while a cell prints, and started again; then the sandbox is killed.
    The page is the same all the time."""
    lab.open("n.ipynb", WRITE, PRINT, LOOK)
    lab.run(0)
    lab.wait_for_output(0, "5")
    lab.save()
    name = name_for_notebook(str(lab.server.root / "n.ipynb"))
    wait_until(lambda: Store.open().latest(name), "the save of the files")

    lab.run(1)
    lab.wait_for_output(1, "line 10")
    lab.server.end(signal.SIGKILL)
    lab.server.start()
    lab.wait_for_output(1, "line 79")
    assert re.findall(r"line (\d+)", lab.output(1)) == [str(number) for number in range(80)]
    lab.run(2)
    lab.wait_for_output(2, "sum 42 hello")

    [record] = Records().list("local")
    background.submit(LocalClient().remove(record.name)).result(60)
    wait_until(lambda: Records().list("local"), "a new sandbox")
    lab.wait_until_idle()
    lab.restart_kernel()
    lab.write(2, "print('again', open('result.txt').read())")
    lab.run(2)
    lab.wait_for_output(2, "again hello")


def test_interrupt_and_restart(lab: Lab) -> None:
    """The buttons do what they do for a local kernel."""
    lab.open("n.ipynb", "x = 1\nwhile True: pass", "print('x' in dir())")
    lab.run(0)
    lab.page.locator('.jp-Notebook-ExecutionIndicator[data-status="busy"]').first.wait_for()
    lab.page.keyboard.press("Escape")
    lab.page.keyboard.press("i")
    lab.page.keyboard.press("i")
    lab.wait_for_output(0, "KeyboardInterrupt")
    lab.run(1)
    lab.wait_for_output(1, "True")
    lab.restart_kernel()
    lab.run(1)
    lab.wait_for_output(1, "False")
