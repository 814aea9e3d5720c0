"""A report in a headless Chromium: what a reader sees, can find and sort, and that nothing is loaded or run beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from accessibility import violations

from journals import MARKUP, conversation, online_run, token_row
from lowpeak.journal import Journal
from lowpeak.report.page import write_report


class Opened:
    """A report in a browser's tab, with what it asked for and complained of."""

    def __init__(self, browser, *runs: Path, view: str = "completions", **settings) -> None:
        self.requests, self.messages = [], []
        self.path = write_report(list(runs), runs[0] / "report.html")
        self.tab = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **settings})
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("console", lambda message: self.messages.append(message.text))
        self.tab.on("pageerror", lambda error: self.messages.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.messages.append(dialog.message))
        self.tab.goto(self.path.as_uri())
        self.tab.wait_for_selector("#sampled:not(:empty)", state="attached")
        self.choose(view)

    def choose(self, view: str) -> None:
        if self.tab.is_visible("#view"):
            self.tab.select_option("#view", view)

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
def opened(browser, tmp_path_factory):
    return Opened(browser, online_run(tmp_path_factory.mktemp("report") / "run", num_steps=10))


@pytest.fixture(autouse=True)
def first_view(request):
    """Each test of the shared page begins with it as it was opened."""
    if "opened" in request.fixturenames:
        opened = request.getfixturevalue("opened")
        opened.tab.reload()
        opened.choose("completions")
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


def test_a_group_has_its_prompt_once_and_its_answers_by_reward_with_coloured_advantages(browser, tmp_path):
    folder = online_run(tmp_path / "run", num_steps=12)
    journal = Journal(folder / "journal")
    journal.resume_at(0)
    for step in range(1, 13):
        rewards = {0: 0.25, 1: 1.0, 2: 1 / 3}
        rows = [
            {"rollout": step, "group": 0, "prompt": f"prompt {step}", "completion": f"answer {i} of {step}"}
            | {"reward": x, "advantage": x - 0.5, "rewards": {"f": -x * step}, "columns": {"answer": 7}}
            for i, x in rewards.items()
        ]
        journal.write_rollout(step, rows)
    opened = Opened(browser, folder, view="groups")
    assert opened.texts("#found") == ["12 groups, page 1 of 2"]
    assert opened.texts("#list .prompt") == [f"prompt {step}" for step in range(1, 11)]
    assert opened.completions()[:3] == ["answer 1 of 1", "answer 2 of 1", "answer 0 of 1"]
    shown = opened.texts("#list .answer .facts")[1]
    assert " ".join(shown.split()) == "reward 0.3333 advantage -0.1667 length none f -0.3333"
    head = opened.texts("#list .facts")[0]
    assert " ".join(head.split()) == "step 1 group 1/0 answers 3 mean reward 0.5278 answer 7"
    colors = opened.tab.locator("#list .answer >> .facts b:nth-of-type(2)").evaluate_all(
        "all => all.slice(0, 3).map(e => getComputedStyle(e).backgroundColor)"
    )
    assert colors == ["rgba(34, 160, 107, 0.65)", "rgba(229, 72, 77, 0.318)", "rgba(229, 72, 77, 0.4)"]
    opened.tab.select_option("#sort", "rewards/f")
    assert opened.texts("#list .prompt")[0] == "prompt 12"
    opened.tab.fill("#step-to", "3")
    opened.tab.fill("#reward-from", "0.9")
    opened.tab.press("#reward-from", "Tab")
    assert opened.texts("#list .prompt") == ["prompt 3", "prompt 2", "prompt 1"]
    assert opened.texts("#list .answer:not(.other) .completion") == [f"answer 1 of {step}" for step in (3, 2, 1)]
    assert opened.tab.locator("#list .answer.other").count() == 6
    opened.choose("completions")
    assert opened.completions() == [f"answer 1 of {step}" for step in (3, 2, 1)]
    opened.check_is_alone()


def test_curves_are_smoothed_and_stand_over_tokens_or_hours(browser, tmp_path):
    journal = Journal(tmp_path / "run" / "journal")
    for step in range(1, 31):
        journal.write_step(step, {"reward": float(step % 2), "num_tokens": 50.0 * step, "step_time": 36.0})
    opened = Opened(browser, tmp_path / "run")
    drawn = "document.querySelector('#curves .js-plotly-plot').data.map(t => [t.x.slice(-1)[0], t.y.slice(-2)])"
    assert opened.tab.evaluate(drawn) == [[30, [1, 0]]]
    opened.tab.select_option("#axis", "tokens")
    opened.tab.fill("#smoothing", "0.5")
    raw, smooth = opened.tab.evaluate(drawn)
    assert raw == [1500, [1, 0]]
    assert smooth == [1500, [pytest.approx(2 / 3), pytest.approx(1 / 3)]]
    opened.tab.select_option("#axis", "hours")
    assert opened.tab.evaluate(drawn)[0][0] == pytest.approx(0.3)
    assert opened.texts("#curves .xtitle")[0] == "hours"
    opened.check_is_alone()


@pytest.mark.parametrize("width", [390, 1280])
def test_a_dark_page_fits_the_width_of_a_telephone(browser, tmp_path, width):
    long = {"prompt": "word " * 400, "completion": "x" * 500}
    folder = online_run(tmp_path / "a-run-with-a-long-name-of-many-parts-in-one-word", **long)
    journal = Journal(folder / "journal")
    journal.resume_at(4)
    journal.write_event(4, "out of memory", error="y" * 300)
    settings = {"viewport": {"width": width, "height": 800}, "color_scheme": "dark"}
    opened = Opened(browser, folder, view="groups", **settings)
    assert opened.tab.evaluate("document.documentElement.scrollWidth") == width
    assert opened.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    assert opened.tab.evaluate("document.querySelector('#curves .js-plotly-plot').layout.font.color") == "#e6e8eb"
    box = opened.tab.locator("#curves .js-plotly-plot .main-svg").first.bounding_box()
    assert box["x"] + box["width"] <= width
    prompt = opened.tab.locator("#list .prompt").first
    before = prompt.bounding_box()["height"]
    opened.tab.locator("#list button").first.click()
    assert prompt.bounding_box()["height"] > before
    opened.check_is_alone()


@pytest.mark.parametrize("view", ["groups", "completions"])
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
@pytest.mark.parametrize("count", [1, 2])
def test_a_page_breaks_no_rule_of_accessibility(browser, tmp_path, count, width, scheme, view):
    folder = online_run(tmp_path / "one", **conversation(f"line\n{'x' * 400}"))
    journal = Journal(folder / "journal")
    journal.resume_at(4)
    journal.write_event(4, "out of memory", error="not enough")
    settings = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    opened = Opened(browser, *(folder, online_run(tmp_path / "two", 2))[:count], view=view, **settings)
    opened.tab.click("#more summary")
    opened.tab.wait_for_selector("#others .js-plotly-plot")
    opened.tab.locator("details.reply summary").first.click()
    assert violations(opened.tab) == []


def test_an_open_page_of_a_watched_run_loads_itself_and_keeps_what_was_chosen(browser, tmp_path):
    folder = online_run(tmp_path / "run")
    page = write_report([folder], reload_seconds=0.5)
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.fill("#search", "text 7")
    tab.check("#descending")
    journal = Journal(folder / "journal")
    journal.resume_at(4)
    journal.write_step(5, {"reward": 0.75})
    write_report([folder], reload_seconds=0.5)
    tab.wait_for_selector("#header td:text-is('5')")
    assert tab.input_value("#search") == "text 7"
    assert tab.is_checked("#descending")
    tab.close()


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


def test_a_branch_begins_with_its_own_context_which_is_no_reply_to_the_turn_before_it(browser, tmp_path):
    changed = conversation("3")
    changed["turns"][1]["follows"] = -1
    opened = Opened(browser, online_run(tmp_path / "run", num_steps=1, per_step=2, **changed))
    with_tokens, plain = (opened.tab.locator("#list article").nth(i) for i in range(2))
    for article, text, context in (
        (plain, "assistant: let me see", "add -> 3"),
        (with_tokens, "te", "xt "),
    ):
        first, second = (article.locator(".turn").nth(i) for i in range(2))
        assert first.locator(".completion").inner_text().startswith(text)
        assert first.locator(".reply").count() == 0
        assert second.locator(".reply + .completion").count() == 1
        assert second.locator(".reply").text_content() == context
    opened.search("add -> 3")
    assert opened.texts("#found") == ["2 completions, page 1 of 1"]
    opened.check_is_alone()
