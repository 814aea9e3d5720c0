"""Draw the pictures of docs/report.md: `python tests/with_browser/report_pictures.py RUN [RUN ...]`, with any runs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from find_browser import find_browser
from playwright.sync_api import Page, sync_playwright

from lowpeak.report.page import write_report

DOCS = Path(__file__).parents[2] / "docs"
WIDTH = 1080


def main(runs: list[Path]) -> None:
    """Write a picture of the curves, of the phases and of the completions."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        page = write_report(runs, Path(folder) / "report.html")
        browser = started.chromium.launch(executable_path=find_browser())
        tab = browser.new_page(viewport={"width": WIDTH, "height": 800})
        tab.goto(page.as_uri())
        tab.wait_for_selector("#list article")
        tab.fill("#smoothing", "0.6")
        draw(tab, "report-curves.png", "#axis", 720)
        draw(tab, "report-phases.png", "#phases", 690)
        tab.check("#valued")
        tab.select_option("#sort", "step")
        tab.check("#descending")
        draw(tab, "report-completions.png", "#sampled", 720)
        browser.close()


def draw(tab: Page, name: str, first: str, height: int) -> None:
    """Write a picture of the page from the element `first` on."""
    box = tab.locator(first).bounding_box()
    assert box is not None
    top = box["y"] + tab.evaluate("window.scrollY") - 12
    clip = {"x": 0, "y": top, "width": WIDTH, "height": height}
    tab.screenshot(path=DOCS / name, clip=clip, full_page=True)
    print(f"{name}: {(DOCS / name).stat().st_size} bytes")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
