"""Axe's checks of a page: contrast, headings, landmarks, labels, texts of pictures."""

from __future__ import annotations

from typing import Any

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

_RUN = """async () => (await axe.run(document, {resultTypes: ['violations']})).violations
    .map(rule => [rule.impact, rule.id, ...rule.nodes.slice(0, 3).map(node => node.html.slice(0, 200))])"""


def violations(tab: Page) -> list[list[Any]]:
    """Return the rules of any level that the page breaks: their level, name and first elements."""
    tab.evaluate(AXE_SCRIPT)
    return tab.evaluate(_RUN)
