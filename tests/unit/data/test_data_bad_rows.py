"""An invalid row raises an error with its index, its column and its value, in each of the three readers."""

from __future__ import annotations

import pytest

from lowpeak.data.preference import PreferenceReader
from lowpeak.data.prompts import PromptReader
from lowpeak.data.supervised import SupervisedReader
from lowpeak.errors import DataError
from tiny_models import char_tokenizer

NAN = float("nan")
ASSISTANT = {"role": "assistant", "content": "2"}


def user(content):
    return [{"role": "user", "content": content}]


PROMPTS = [
    ({"question": "1", "answer": "2"}, {}, "'prompt' 'answer', 'question'"),
    ({"prompt": None}, {}, "prompt"),
    ({"prompt": ""}, {}, "prompt"),
    ({"prompt": []}, {}, "prompt"),
    ({"prompt": 7}, {}, "prompt int"),
    ({"prompt": ["1"]}, {}, "prompt message 0 '1'"),
    ({"prompt": [{"content": "1"}]}, {}, "prompt message 0 {'content': '1'}"),
    ({"prompt": [{"role": "user"}]}, {}, "prompt message 0 'content'"),
    ({"prompt": [*user("1"), *user(4)]}, {}, "prompt message 1 content int"),
    ({"prompt": user([{"type": "image"}])}, {}, "prompt message 0 'image'"),
    ({"prompt": user("1"), "images": [1]}, {}, "'images'"),
    ({"prompt": user("1"), "log_metric": 1, "prompts": 1}, {}, "'log_metric', 'prompts'"),
    ({"prompt": user("1"), "tools": "[1"}, {}, "'tools' JSON"),
    ({"prompt": user("1"), "chat_template_kwargs": "x"}, {}, "'chat_template_kwargs' str"),
    ("prompt", {}, "str"),
    ({"prompt": user("1")}, {"template": "{{ '' }}"}, "prompt 'content': '1'"),
    ({"prompt": user("1")}, {"template": None}, "prompt tokenizer.chat_template"),
    ({"prompt": user("1")}, {"template": "{{ raise_exception('ones') }}"}, "prompt ones"),
    ({"prompt": "12345"}, {"max_prompt_tokens": 3, "limit_reason": "LIMIT"}, "5 LIMIT 3 overlong_prompts='drop'"),
    ({"prompt": "1"}, {"num_embeddings": 2}, "model.resize_token_embeddings"),
]
SUPERVISED = [
    ({"question": "1", "answer": "2"}, {}, "'question', 'answer'"),
    ({"prompt": "1"}, {}, "'prompt' 'completion'"),
    ({"prompt": "1", "completion": [ASSISTANT]}, {}, "prompt completion str list"),
    ({"prompt": "1", "completion": None}, {}, "prompt completion str NoneType"),
    ({"text": None}, {}, "'text' NoneType"),
    ({"input_ids": None}, {}, "'input_ids' None"),
    ({"input_ids": [1, 2], "labels": [1]}, {}, "1 'labels' 2 'input_ids'"),
    ({"input_ids": [1, 2], "labels": [-100, 3]}, {}, "label -100"),
    ({"input_ids": [1, 2], "labels": [1, 2]}, {"completion_only": True}, "'labels' completion_only_loss"),
    ({"input_ids": [1, 2]}, {"completion_only": True}, "'completion_mask' completion_only_loss"),
    ({"input_ids": [1, 2]}, {"assistant_only": True}, "'assistant_masks' assistant_only_loss"),
    ({"input_ids": [1, 2], "completion_mask": [0, 1]}, {}, "'completion_mask' completion_only_loss=True"),
    ({"input_ids": [1, 2], "seq_lengths": [1, 1]}, {}, "'seq_lengths'"),
    ({"input_ids": [1, 99]}, {"num_embeddings": 13}, "99 13"),
    ({"input_ids": [1, -1]}, {}, "-1"),
    ({"conversations": "1"}, {}, "'conversations' str"),
    ({"conversations": [{"from": "human"}]}, {}, "'conversations' message 0 'content'"),
    ({"text": "1"}, {"completion_only": True}, "completion_only_loss"),
    ({"text": "1"}, {"assistant_only": True}, "assistant_only_loss"),
    ({"text": "1"}, {"formatting_func": lambda row: 1}, "formatting_func int"),
    ({"text": "1"}, {"formatting_func": lambda row: row["body"]}, "formatting_func KeyError 'body'"),
    ({"prompt": "1", "completion": "2"}, {"assistant_only": True}, "assistant_only_loss"),
    ({"messages": "1"}, {}, "'messages' str"),
    ({"messages": []}, {}, "'messages'"),
    ({"messages": [{"role": "user"}]}, {}, "'messages' message 0 'content'"),
    ({"messages": user("1")}, {"template": None}, "'messages' tokenizer.chat_template"),
    ({"messages": user("1")}, {"template": "{{ nothing.there }}"}, "nothing"),
]
PREFERENCES = [
    ({"prompt": "1", "completion": "2"}, {}, "'prompt', 'completion' 'chosen' 'rejected'"),
    ({"chosen": "1"}, {}, "'chosen' 'rejected'"),
    ({"chosen": "1", "rejected": None}, {}, "'rejected' NoneType"),
    ({"prompt": user("1"), "chosen": "1", "rejected": "2"}, {}, "'chosen' str prompt list"),
    ({"chosen": [], "rejected": []}, {}, "'chosen'"),
    ({"chosen": "", "rejected": "1"}, {}, "'chosen'"),
    ({"chosen": "1", "rejected": "2", "margin": "a"}, {}, "margin 'a'"),
    ({"chosen": "1", "rejected": "2", "margin": NAN}, {}, "margin nan"),
    ({"chosen_ids": [99], "rejected_ids": [1]}, {"num_embeddings": 16}, "99 16"),
    ({"chosen": user("1"), "rejected": user("2")}, {"template": None}, "'chosen' tokenizer.chat_template"),
]
CASES = [
    pytest.param(reader, *case, id=f"{reader.__name__} {case[2]}")
    for reader, cases in ((PromptReader, PROMPTS), (SupervisedReader, SUPERVISED), (PreferenceReader, PREFERENCES))
    for case in cases
]


@pytest.mark.parametrize(("reader", "row", "settings", "words"), CASES)
def test_an_error_names_row_and_column_and_value(reader, row, settings, words):
    settings = dict(settings)
    tokenizer = char_tokenizer("0123456789=+ab", chat=settings.get("template", "") is not None)
    if template := settings.pop("template", None):
        tokenizer.chat_template = template
    with pytest.raises(DataError) as caught:
        reader(tokenizer, **settings).read(row, 0, index=3)
    message = str(caught.value)
    assert message.startswith("row 3")
    assert [word for word in words.split() if word not in message] == []
