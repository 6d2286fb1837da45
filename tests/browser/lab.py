"""What a person does in JupyterLab, and what they see."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.helpers.waiting import wait_until
from tests.server.running import TOKEN, JupyterServer

PATIENCE = 120_000.0
"""Milliseconds."""


class Lab:
    """A server and a page. ``open`` comes first."""

    def __init__(self, server: JupyterServer, page: Any) -> None:
        self.server = server
        self.page = page
        page.set_default_timeout(PATIENCE)

    def open(self, path: str, *cells: str) -> None:
        """Start the server and open a new notebook with these cells; wait for its kernel."""
        self.visit(path, *cells)
        self.cell(0).wait_for()
        self.page.locator(".jp-NotebookPanel-toolbar", has_text="Python 3 (sandbox)").wait_for()
        wait_until(self._is_connected, "the page's connection to its kernel")
        self.wait_until_idle()

    def visit(self, path: str, *cells: str) -> None:
        """The same, without waiting: the kernel may not start."""
        notebook = {
            "cells": [
                {
                    "cell_type": "code",
                    "id": f"cell{number}",
                    "metadata": {},
                    "outputs": [],
                    "execution_count": None,
                    "source": source,
                }
                for number, source in enumerate(cells)
            ],
            "metadata": {"kernelspec": {"name": "sandbox", "display_name": "Python 3 (sandbox)"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (self.server.root / path).write_text(json.dumps(notebook))
        self.server.start()
        address = f"http://127.0.0.1:{self.server.port}/lab/tree/{path}?token={TOKEN}"
        self.page.goto(address)

    def cell(self, number: int) -> Any:
        return self.page.locator(".jp-CodeCell").nth(number)

    def _is_connected(self) -> bool:
        """Lab drops a cell that is run before that, with any kernel."""
        try:
            kernels = self.server.get("/api/kernels")
        except AssertionError:
            return False  # jupyter_server 2.21 cannot list a kernel that is just being started
        return any(k["connections"] and k["execution_state"] == "idle" for k in kernels)

    def wait_until_idle(self) -> None:
        self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').first.wait_for()

    def run(self, number: int) -> None:
        self.close_dialogs()
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def write(self, number: int, text: str) -> None:
        self.close_dialogs()
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(text)

    def save(self) -> None:
        self.page.keyboard.press("Control+s")

    def output(self, number: int) -> str:
        return str(self.cell(number).locator(".jp-OutputArea").first.inner_text())

    def wait_for_output(self, number: int, text: str) -> None:
        wait_until(lambda: text in self.output(number), f"{text!r} in cell {number}")

    def close_dialogs(self) -> list[str]:
        """Agree to what Lab says; the headings."""
        said = []
        dialogs = self.page.locator("dialog.jp-Dialog")
        while dialogs.count():
            said.append(dialogs.first.inner_text().splitlines()[0])
            dialogs.first.locator("button").last.click()
            dialogs.first.wait_for(state="detached")
        return said

    def wait_for_dialog(self, heading: str) -> str:
        """Wait for what Lab says in a dialog; all of it. The dialog stays."""
        dialog = self.page.locator("dialog.jp-Dialog", has_text=heading).first
        dialog.wait_for()
        return str(dialog.inner_text())

    def prompt(self, number: int) -> str:
        """What stands left of a cell: [*] while it waits or runs."""
        return str(self.cell(number).locator(".jp-InputPrompt").first.inner_text())

    def screenshot(self, name: str) -> None:
        """For a person to look at, where $BROWSER_SCREENSHOTS names a folder."""
        folder = os.environ.get("BROWSER_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=os.path.join(folder, f"{name}.png"))

    def restart_kernel(self) -> None:
        self.close_dialogs()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("0")
        self.page.keyboard.press("0")
        self.page.locator("dialog.jp-Dialog button", has_text="Restart").click()
        self.wait_until_idle()
