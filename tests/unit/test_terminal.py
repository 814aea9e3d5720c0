"""What comes from models, servers and other ranks moves no cursor and sets no title of the user's terminal."""

from __future__ import annotations

import unicodedata

import pytest

import fake_server
from lowpeak.cli.output import print_once
from lowpeak.errors import CheckpointError, EngineError, show_controls
from lowpeak.training.completion_tables import print_completions
from lowpeak.vllm.server import ServerVllm
from lowpeak.watchdog.failure_detector import error_text

EVIL = "a\x1b]0;title\x07b\x1b[2Jc\x9b1Ad\r\x00\x7f\x08"
SHOWN = r"a\x1b]0;title\x07b\x1b[2Jc\x9b1Ad\x0d\x00\x7f\x08"


def controls(text):
    return {each for each in text if unicodedata.category(each) == "Cc"}


def test_all_controls_but_line_ends_and_tabs_are_shown():
    assert show_controls(EVIL) == SHOWN
    assert show_controls("é\n\t表 \\x1b") == "é\n\t表 \\x1b"
    assert show_controls("a\u202eb\u2066c\u2069") == r"a\u202eb\u2066c\u2069"  # they reorder what follows
    family = "\U0001f468\u200d\U0001f469"  # joined by a zero width joiner
    assert show_controls(family) == family
    assert controls(show_controls("".join(map(chr, range(0x2100))))) == {"\n", "\t"}


@pytest.mark.parametrize("completion", [EVIL, [{"role": "assistant", "content": EVIL}]])
def test_a_completion_is_printed_without_escape_sequences(completion, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    print_completions(
        [{"prompt": EVIL, "completion": completion, "rewards": {}, "reward": 1.0, "advantage": 0.0, "group": 0}], step=1
    )
    shown = capsys.readouterr().out
    assert shown.count(SHOWN) == 2
    assert controls(shown) <= {"\n"}


@pytest.mark.parametrize("answer", [(400, fake_server.error(EVIL)), (400, EVIL.encode()), (200, EVIL.encode())])
def test_a_servers_words_are_told_without_escape_sequences(answer):
    with fake_server.serving(fake_server.FakeServer()) as fake:
        fake.answers["/collective_rpc"] = lambda body: answer
        with pytest.raises(EngineError, match="title") as found:
            ServerVllm(fake.url).info()
    assert controls(str(found.value)) == set()


def test_an_error_keeps_its_class_s_own_form():
    assert str(CheckpointError(2, "gone")) == "[Errno 2] gone"
    assert str(EngineError(f"{EVIL}\n")) == f"{SHOWN}\n"


def test_another_ranks_words_and_a_log_are_told_without_escape_sequences(capsys):
    assert error_text(ValueError(EVIL)) == f"ValueError: {SHOWN}"
    print_once(EVIL)
    assert capsys.readouterr().err == f"{SHOWN}\n"
