"""The browser that the tests share."""

from __future__ import annotations

import pytest
from find_browser import find_browser
from playwright.sync_api import sync_playwright


@pytest.fixture(scope="session")
def browser():
    path = find_browser()
    assert path is not None, "`make test-report` installs a browser"
    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=path)
        yield running
        running.close()
