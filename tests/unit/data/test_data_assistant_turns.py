"""The assistant's tokens under unmarked templates, in the styles of the common model families."""

from __future__ import annotations

import logging
from itertools import groupby

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from lowpeak.data.assistant_turns import AssistantTurns
from lowpeak.errors import DataError
from tiny_models import char_tokenizer

TOKENS = [f"<|{name}|>" for name in ("a", "e", "end", "return", "user", "start")]
TOKENS += ["<s>", "[INST]", "[/INST]", "<think>", "</think>"]
# Of each message m: how it opens, its text, how it ends. The last line is the generation prompt.
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
HEADERS = (
    "<s>{% for m in messages %}<|a|>{{ m.role }}<|e|>\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>assistant<|e|>\n\n{% endif %}"
)
INST = (
    "<s>{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ (first if loop.first else '') + m.content }} [/INST]"
    "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.thinking and loop.last %}<|a|>analysis<|e|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|a|>final<|e|>{{ m.content }}{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|e|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
EOS_AT_THE_END = (
    "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'a' }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|>\n{% else %}<eos>{% endif %}"
)
THINKS_LAST = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.thinking or '' }}</think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ASKS_TO_THINK = (
    "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'a' }}|>{{ m.content }}"
    "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<|a|><think>\n{% endif %}"
)
SYSTEM_IN_THE_LAST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ 'be brief ' if loop.index0 >= messages | length - 2 }}"
    "{{ m.content }}[/INST]{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)


def logged(caplog):
    """lowpeak's records: asyncio logs late of tasks that other tests left behind."""
    return [record for record in caplog.records if record.name.startswith("lowpeak")]


def turn(role, text, **more):
    return {"role": role, "content": text, **more}


LONG = [turn("user", "one"), turn("assistant", "two"), turn("user", "three"), turn("assistant", "<four>")]


def tokenizer_of(template):
    tokenizer = char_tokenizer("abcdefghijklmnopqrstuvwxyz.<>/ \n")
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = template
    return tokenizer


def counted_text(template, messages, first=0, options=None, turns=None):
    """Return the text of the tokens that count; a bar separates turns."""
    tokenizer = tokenizer_of(template)
    ids, counted = (turns or AssistantTurns(tokenizer)).encode(messages, options or {}, "row 3", first)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=True, **(options or {}))["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    runs = groupby(zip(tokens, counted, strict=True), key=lambda each: each[1])
    return "|".join("".join(token for token, _ in run) for counts, run in runs if counts)


@pytest.mark.parametrize(
    ("template", "one", "two"),
    [
        (CHATML, "two<|end|>\n", "two<|end|>\n|<four><|end|>\n"),
        (HEADERS, "two<|end|>", "two<|end|>|<four><|end|>"),
        (INST, " two<eos>", " two<eos>| <four><eos>"),
        (CHANNELS, "<|a|>final<|e|>two<|return|>", "<|a|>final<|e|>two|<|a|>final<|e|><four><|return|>"),
        (EOS_AT_THE_END, "two<|end|>\n<eos>", "two<|end|>\n|<four><|end|>\n<eos>"),
    ],
    ids=["ChatML", "headers", "INST", "channels", "an end of sequence behind the last message"],
)
def test_every_turn_counts_with_the_token_that_ends_it(template, one, two, caplog):
    assert counted_text(template, LONG[:2]) == one
    assert counted_text(template, LONG) == two
    assert logged(caplog) == []


@pytest.mark.parametrize("template", [CHATML, HEADERS, INST])
def test_a_system_message_and_a_last_message_of_the_user_change_nothing(template):
    alone = counted_text(template, LONG[:2])
    assert counted_text(template, [turn("system", "be brief"), *LONG[:3]]) == alone


@pytest.mark.parametrize(
    ("messages", "settings", "text"),
    [
        ([LONG[0], LONG[1], turn("assistant", "more")], {}, "two<|end|>\n|more<|end|>\n"),
        (LONG, {"first": 2}, "<four><|end|>\n"),
        (LONG[:2], {"template": "{{ opening }}" + CHATML, "options": {"opening": "<s>a"}}, "two<|end|>\n"),
        (LONG[:1], {}, ""),
    ],
    ids=["neighbouring turns", "only later turns", "options of the template", "no turn"],
)
def test_the_turns_that_are_asked_for_count(messages, settings, text):
    assert counted_text(messages=messages, **{"template": CHATML, **settings}) == text


def test_a_turn_that_the_template_rewrites_later_does_not_count_and_the_log_says_so_once(caplog):
    thinking = [{**each, "thinking": "hm"} for each in LONG]
    with caplog.at_level(logging.WARNING):
        assert counted_text(THINKS_LAST, thinking) == "<think>hm</think><four><|end|>\n"
    (warning,) = logged(caplog)
    assert warning.args[:3] == ("row 3", 1, 2)
    assert "{% generation %}" in caplog.text
    assert (
        counted_text(CHANNELS, thinking)
        == "<|a|>analysis<|e|>hm<|end|><|start|>assistant<|a|>final<|e|><four><|return|>"
    )


CHANGED, NEVER_ASKED = ("row 3", 1, 2), ("row 3",)


@pytest.mark.parametrize(
    ("template", "messages", "text", "warned"),
    [
        (SYSTEM_IN_THE_LAST, LONG, "<four><eos>", CHANGED),
        (ASKS_TO_THINK, LONG, "two<eos>|<four><eos>", NEVER_ASKED),
        (CHATML, [turn("assistant", "hi"), *LONG[:2]], "two<|end|>\n", CHANGED),
    ],
    ids=[
        "a history that changes with the turn",
        "a generation prompt that the row has not",
        "a turn without a question",
    ],
)
def test_a_turn_that_the_model_would_not_write_like_that_is_told_once_for_all_rows(
    template, messages, text, warned, caplog
):
    turns = AssistantTurns(tokenizer_of(template))
    with caplog.at_level(logging.WARNING):
        assert counted_text(template, messages, turns=turns) == counted_text(template, messages, turns=turns) == text
    assert [record.args[: len(warned)] for record in logged(caplog)] == [warned]


def not_fast():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "messages", "words"),
    [
        (tokenizer_of(THINKS_LAST), LONG[:3], r"row 3: .*\{% generation %\}"),
        (not_fast(), LONG, r"row 3: .*\{% generation %\}"),
        (tokenizer_of(INST), [turn("user", "one"), turn("user", "two")], "row 3: .*alternate"),
    ],
    ids=["no turn can be told", "tokens are not mapped to characters", "the template fails"],
)
def test_a_row_that_cannot_be_read_is_an_error_with_the_remedy(tokenizer, messages, words):
    with pytest.raises(DataError, match=words):
        AssistantTurns(tokenizer).encode(messages, {}, "row 3")


def merging_tokenizer(template):
    """Return a tokenizer with one token for two consecutive line ends."""
    vocabulary = {
        token: i for i, token in enumerate(["<pad>", "<eos>", "\n", "\n\n", *"abcdefghijklmnopqrstuvwxyz:<>|"])
    }
    inner = Tokenizer(models.BPE(vocabulary, [("\n", "\n")]))
    inner.pre_tokenizer = pre_tokenizers.Split("nothing", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def test_a_token_that_lies_on_both_sides_of_a_turns_edge_counts_as_with_generation_blocks():
    plain = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    marked = (
        "{% for m in messages %}{{ m.role }}:\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n"
        "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    )
    turns = [turn("user", "a"), turn("assistant", "\nb\n\n"), turn("\nuser", "c"), turn("assistant", "d")]
    ids, counted = AssistantTurns(merging_tokenizer(plain)).encode(turns, {}, "row 3")
    expected = merging_tokenizer(marked).apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    assert ids == expected["input_ids"]
    assert 3 in ids
    assert counted == [bool(flag) for flag in expected["assistant_masks"]]
