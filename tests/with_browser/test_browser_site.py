"""The manual's site in a headless Chromium: tables can be read, the search works as files, nothing is loaded, axe is content."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from accessibility import violations

SITE = Path(__file__).parents[2] / "build" / "site"
WIDTHS = (390, 1280, 1920)
WIDER = """[...document.querySelectorAll('.md-content table')].filter(table => {
    const column = document.querySelector('.md-content__inner').getBoundingClientRect().right;
    return table.scrollWidth > table.clientWidth + 1 || table.getBoundingClientRect().right > column + 1;
}).map(table => table.innerText.slice(0, 60))"""


@pytest.fixture(scope="module")
def tab(browser):
    assert (SITE / "index.html").is_file(), "`make docs` builds the site"
    tab = browser.new_page()
    yield tab
    tab.close()


def test_no_table_is_wider_than_its_column_and_no_page_than_the_window(tab):
    pages, wide, requests = sorted({*SITE.rglob("*.html")} - {SITE / "404.html"}), [], []
    tab.on("request", lambda request: requests.append(request.url))
    for page in pages:
        tab.goto(page.as_uri())
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            name = f"{page.relative_to(SITE)} at {width}"
            wide += [f"{name}: {table}" for table in tab.evaluate(WIDER)]
            if tab.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
                wide.append(name)
    assert len(pages) > 30
    assert wide == []
    assert [url for url in requests if not url.startswith(SITE.as_uri())] == []


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("resume", "Start, preemption, restart"),
        ("LoRA", "LoRA and QLoRA on 24 GB"),
        ("wandb", "Trackers and the hub"),
        ("entropy", "Read a run"),
        ("length_penalty", "Write rewards"),
        ("evaluation", "Evaluation"),
        ("out of memory", "Memory"),
        ("dataset format", "Get started"),
    ],
)
def test_the_search_has_user_pages_first_and_neither_the_log_nor_decisions(tab, word, first):
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.goto((SITE / "index.html").as_uri())
    tab.click(".md-search__input")
    tab.locator(".md-search__input").press_sequentially(word)
    tab.wait_for_selector(".md-search-result__item")
    found = tab.locator(".md-search-result__item h1").all_inner_texts()
    assert first in found[:2]
    links = tab.locator(".md-search-result__item > a").evaluate_all("all => all.map(e => e.href)")
    assert [link for link in links if "/log" in link or "/decisions/" in link] == []


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    """The site over HTTP: the page of missing addresses names its files from the root."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("width", "scheme", "pattern"),
    [(1280, "light", "*.html"), (390, "dark", "[4air]*.html")],  # each kind of content: code, tables, the API
    ids=["light", "dark"],
)
def test_no_page_breaks_a_rule_of_accessibility(browser, address, width, scheme, pattern):
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    broken = {}
    for page in sorted(SITE.glob(pattern)):
        tab.goto(f"{address}/{page.relative_to(SITE)}")
        broken[page.name] = violations(tab)
    tab.goto(f"{address}/index.html")
    tab.click("label[for=__search]" if width < 960 else ".md-search__input")
    tab.locator(".md-search__input").press_sequentially("resume")
    tab.wait_for_selector(".md-search-result__item")
    tab.wait_for_timeout(500)  # the dialog fades in
    broken["search"] = violations(tab)
    tab.close()
    assert len(broken) > 10
    assert {name: rules for name, rules in broken.items() if rules} == {}
