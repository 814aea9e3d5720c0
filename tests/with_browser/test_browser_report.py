"""A report in a headless Chromium: what a reader sees, can find and sort, and that nothing is loaded or run beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from find_browser import find_browser
from playwright.sync_api import sync_playwright

from journals import MARKUP, conversation, online_run, token_row
from lowpeak.journal import Journal
from lowpeak.report.page import write_report


class Opened:
    """A report in a browser's tab, with what it asked for and complained of."""

    def __init__(self, browser, *runs: Path) -> None:
        self.requests, self.messages = [], []
        self.path = write_report(list(runs), runs[0] / "report.html")
        self.tab = browser.new_page(viewport={"width": 1280, "height": 900})
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("console", lambda message: self.messages.append(message.text))
        self.tab.on("pageerror", lambda error: self.messages.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.messages.append(dialog.message))
        self.tab.goto(self.path.as_uri())
        self.tab.wait_for_selector("#sampled:not(:empty)", state="attached")

    def texts(self, selector: str) -> list[str]:
        return self.tab.locator(selector).all_text_contents()

    def completions(self) -> list[str]:
        return self.texts("#list .completion")

    def search(self, text: str) -> None:
        self.tab.fill("#search", text)
        self.tab.wait_for_timeout(300)

    def colors(self) -> list[str]:
        return self.tab.locator("#list .token").evaluate_all("all => all.map(e => e.style.backgroundColor)")

    def check_is_alone(self) -> None:
        """Nothing but the page itself was asked for, and no script failed, was blocked or spoke."""
        assert self.requests == [self.path.as_uri()]
        assert self.messages == []


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    assert path is not None, "`make test-report` installs a browser"
    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=path)
        yield running
        running.close()


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    return Opened(browser, online_run(tmp_path_factory.mktemp("report") / "run", num_steps=10))


@pytest.fixture(autouse=True)
def first_view(request):
    """Each test of the shared page begins with it as it was opened."""
    if "opened" in request.fixturenames:
        opened = request.getfixturevalue("opened")
        opened.tab.reload()
        opened.requests.clear()
        opened.requests.append(opened.path.as_uri())


def test_curves_phases_and_tables_are_drawn_and_nothing_is_loaded(opened):
    assert opened.tab.locator("#curves .js-plotly-plot").count() == 5
    assert opened.tab.locator("#phases .js-plotly-plot").count() == 2
    assert opened.texts("#curves .gtitle")[0] == "Reward"
    drawn = opened.tab.locator("#curves .js-plotly-plot path.js-line").first.get_attribute("d")
    assert drawn.startswith("M0,")
    assert "2.00 GiB" in opened.texts("#tables td")
    opened.check_is_alone()


def test_other_metrics_are_drawn_when_they_are_opened(opened):
    assert opened.tab.locator("#others .js-plotly-plot").count() == 0
    opened.tab.click("#more summary")
    opened.tab.wait_for_selector("#others .js-plotly-plot")
    assert opened.texts("#others .gtitle") == ["odd metric"]


def test_the_search_finds_words_of_prompts_and_completions_in_any_case(opened):
    assert opened.texts("#found") == ["40 completions, page 1 of 2"]
    opened.search("TEXT 39")
    assert opened.completions() == ["text 39"]
    opened.search("prompt 7")
    assert opened.completions() == ["text 24", "text 25", "text 26", "text 27"]
    opened.search("nothing")
    assert opened.texts("#found") == ["0 completions, page 1 of 1"]


@pytest.mark.parametrize(
    ("key", "descending", "first"),
    [
        ("reward", True, "text 39"),
        ("reward", False, "text 0"),
        ("advantage", False, "text 39"),
        ("step", True, "text 36"),
    ],
)
def test_completions_are_sorted(opened, key, descending, first):
    opened.tab.select_option("#sort", key)
    opened.tab.set_checked("#descending", descending)
    assert opened.completions()[0] == first


def test_pages_are_turned(opened):
    assert opened.tab.is_disabled("#previous")
    opened.tab.click("#next")
    assert opened.tab.is_disabled("#next")
    assert len(opened.completions()) == 20
    assert opened.completions()[0] == "text 20"


@pytest.mark.parametrize(
    ("column", "first", "last"),
    [
        ("logprobs", "rgba(220, 60, 40, 0)", "rgba(220, 60, 40, 0.3)"),
        ("entropy", "rgba(230, 120, 0, 0)", "rgba(230, 120, 0, 0.25)"),
        ("mismatch", "rgba(30, 100, 200, 0)", "rgba(30, 100, 200, 0.298)"),
        ("loss_mask", "rgba(40, 150, 70, 0.45)", "rgba(40, 150, 70, 0.45)"),
    ],
)
def test_tokens_are_coloured_by_their_value(opened, column, first, last):
    opened.tab.check("#valued")
    opened.tab.select_option("#color", column)
    assert opened.texts("#list .token")[:3] == ["te", "xt ", "0"]
    colors = opened.colors()[:3]
    assert (colors[0], colors[2]) == (first, last)
    assert len(set(colors)) == (2 if column == "loss_mask" else 3)
    title = opened.tab.locator("#list .token").nth(1).get_attribute("title")
    assert title == "log-prob -1, entropy 0.5, mismatch 0.1, loss mask 0"
    assert opened.texts("#legend span")


def test_tokens_without_a_value_have_no_colour_and_other_completions_can_be_left_out(opened):
    opened.tab.check("#valued")
    assert opened.texts("#found") == ["10 completions, page 1 of 1"]
    opened.tab.select_option("#color", "")
    assert set(opened.colors()) == {""}
    assert opened.texts("#legend span") == []


def test_markup_in_any_text_stays_text(browser, tmp_path):
    folder = online_run(
        tmp_path / "<img src=x onerror=alert(3)>", prompt=MARKUP, completion=MARKUP, extra={MARKUP: MARKUP}
    )
    journal = Journal(folder / "journal")
    journal.resume_at(4)
    journal.write_tokens(1, [token_row(1, [MARKUP, "", "<script>alert(4)</script>"])])
    journal.write_step(5, {"rewards/<img src=x onerror=alert(5)>/mean": 1.0, MARKUP: 1.0, "time/<b>x</b>": 1.0})
    journal.write_event(5, MARKUP, error=MARKUP)
    opened = Opened(browser, folder)
    opened.tab.click("#more summary")
    opened.tab.wait_for_selector("#others .js-plotly-plot")
    assert opened.completions()[2] == MARKUP
    assert opened.completions()[1] == f"{MARKUP}\u00b7<script>alert(4)</script>"
    assert opened.texts("#list .prompt")[0] == MARKUP
    assert MARKUP in opened.texts("#events td")
    assert "rewards/<img src=x onerror=alert(5)>/mean" in opened.texts("#curves .legendtext")
    assert MARKUP in opened.texts("#others .gtitle")
    assert opened.tab.locator("img, b:not(.facts b), #list script, #events script").count() == 0
    opened.check_is_alone()


def test_a_conversation_is_shown_by_turns_and_a_long_result_is_collapsed(browser, tmp_path):
    result = f"{MARKUP}\n{'x' * 400}"
    opened = Opened(browser, online_run(tmp_path / "run", num_steps=1, per_step=2, **conversation(result)))
    with_tokens, plain = (opened.tab.locator("#list article").nth(i) for i in range(2))
    assert plain.locator(".completion").all_text_contents() == [
        "assistant: let me see\n  add(a=1, b=2)",
        "assistant: so 3",
    ]
    reply = plain.locator("details.reply")
    shown = f"add -> {MARKUP}\n    {'x' * 400}"
    assert reply.locator("summary").inner_text() == f"{shown[:100].splitlines()[0]} \u2026"
    assert not reply.locator("div").is_visible()
    reply.locator("summary").click()
    assert reply.locator("div").inner_text() == shown
    # Context tokens are hatched in any colour.
    assert with_tokens.locator(".completion").all_text_contents() == ["te", "0"]
    assert with_tokens.locator(".reply .token.masked").all_text_contents() == ["xt "]
    assert with_tokens.locator(".completion .masked").count() == 0
    opened.search("ADD(A=1")
    assert opened.texts("#found") == ["2 completions, page 1 of 1"]
    assert opened.tab.locator("img, #list script").count() == 0
    opened.check_is_alone()


def test_what_a_script_tries_to_load_is_refused_by_the_policy(browser, tmp_path):
    opened = Opened(browser, online_run(tmp_path / "run"))
    assert opened.tab.evaluate("fetch('http://a.invalid/').then(() => 'loaded', () => 'refused')") == "refused"
    opened.tab.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://a.invalid/x.png'}))")
    opened.tab.wait_for_timeout(200)
    assert [text.count("Content Security Policy") > 0 for text in opened.messages[:2]] == [True, True]


def test_several_runs_are_overlaid_and_can_be_chosen(browser, tmp_path):
    opened = Opened(browser, online_run(tmp_path / "one"), online_run(tmp_path / "two", 2))
    assert opened.texts("#curves .js-plotly-plot >> nth=0 >> .legendtext") == ["one", "two"]
    assert opened.texts("#found") == ["24 completions, page 1 of 2"]
    opened.tab.select_option("#run", label="two")
    assert opened.texts("#found") == ["8 completions, page 1 of 1"]
    opened.check_is_alone()


def test_a_run_without_completions_and_without_steps_says_so(browser, tmp_path):
    Journal(tmp_path / "supervised" / "journal").write_step(1, {"loss": 1.0})
    opened = Opened(browser, tmp_path / "supervised")
    assert "no completions" in opened.texts("#sampled")[0]
    assert not opened.tab.is_visible("#browser")
    assert opened.tab.locator("#curves .js-plotly-plot").count() == 1
    (tmp_path / "empty" / "journal").mkdir(parents=True)
    (tmp_path / "empty" / "journal" / "steps.jsonl").touch()
    empty = Opened(browser, tmp_path / "empty")
    assert "no steps" in empty.texts("#curves")[0]
    for each in (opened, empty):
        each.check_is_alone()


def test_twenty_thousand_completions_are_searched_and_sorted(browser, tmp_path):
    opened = Opened(browser, online_run(tmp_path / "run", num_steps=2_500, per_step=10))
    assert opened.texts("#found") == ["20000 completions, page 1 of 1000"]
    assert "20000 of 25000 completions, evenly sampled" in opened.texts("#sampled")[0]
    opened.tab.select_option("#sort", "reward")
    opened.tab.check("#descending")
    assert opened.completions()[0] == "text 24999"
    opened.search("text 2499")
    assert {"text 24990", "text 24999"} <= {*opened.completions()}
    opened.check_is_alone()
