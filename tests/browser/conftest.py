"""A JupyterLab of its own for each test, and a page of Chromium on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import StartServer, folder, make_server

from .lab import Lab

__all__ = ["folder", "make_server"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def lab(make_server: StartServer) -> Iterator[Lab]:
    from playwright.sync_api import sync_playwright

    server = make_server(module="jupyterlab")
    with sync_playwright() as playwright:
        # The distribution's Chromium if it is there, else the one that playwright has fetched.
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield Lab(server, browser.new_page(viewport={"width": 1400, "height": 1000}))
        browser.close()
