"""Reward models give TRL's logits of prompt and completion, in batches of any size."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload
from panel_groups import group
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from lowpeak.errors import ArgumentError, ModelError
from lowpeak.parallel.base import freeze
from lowpeak.parallel.strategy import FrozenModel
from lowpeak.rewards.factory import make_rewards
from lowpeak.rewards.model import ModelReward, batches_by_length
from lowpeak.rewards.panel import RewardPanel, RewardSettings
from lowpeak.rewards.reward import Reward
from tiny_models import char_tokenizer, tiny_model

PLAIN = {"prompts": ["1+1=", "12+34=", "5+5="], "completions": ["2", "46", "1000"], "completion_ids": [[], [], []]}
MESSAGES = [[{"role": "user", "content": "1"}]]


def classifier(seed=0, num_labels=1, **changes):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=64, initializer_range=0.5, num_labels=num_labels,
        pad_token_id=None, eos_token_id=1, bos_token_id=None, **changes,
    )  # fmt: skip
    return Qwen2ForSequenceClassification(config)


def tokenizer(chat=False):
    return char_tokenizer("0123456789=+", chat=chat)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "models" / "tiny-reward"
    classifier().save_pretrained(path)
    tokenizer(chat=True).save_pretrained(path)
    return path


def one_by_one(model, words, texts):
    """Return each text's logit by the definition: alone, without padding."""
    rows = [words(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
    with torch.no_grad():
        return [model.eval()(input_ids=row).logits.item() for row in rows]


def looks_both_ways():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=1,
        initializer_range=0.5,
    )  # fmt: skip
    return BertForSequenceClassification(config)


@pytest.mark.parametrize("max_tokens", [1, 12, 10_000])
@pytest.mark.parametrize(("make", "pad_token"), [(classifier, "<pad>"), (classifier, None), (looks_both_ways, "<pad>")])
def test_batches_of_any_size_give_each_rows_own_logit(make, pad_token, max_tokens):
    words = tokenizer()
    words.pad_token = pad_token  # without one, the end of sequence pads
    reward = ModelReward(make(), words, max_tokens=max_tokens)
    texts = ["1+1=2", "12+34=46", "5+5=1000"]
    assert reward(**PLAIN) == pytest.approx(one_by_one(make(), tokenizer(), texts), abs=1e-5)
    assert reward([], [], []) == []
    assert words.pad_token == pad_token


def test_messages_are_read_through_the_reward_tokenizers_own_template():
    prompts = [
        [{"role": "user", "content": "1+1="}],
        [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}],
    ]
    completions = [[{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": "34"}]]
    words = tokenizer(chat=True)
    # The last <eos> is not the padding token, so it is what the logit is read at.
    texts = ["<user>1+1=<eos><assistant>2<eos>", "<system>1<eos><user>2<eos><assistant>34<eos>"]
    rewards = ModelReward(classifier(), words)(prompts, completions, [[2], [3, 4]])
    assert rewards == pytest.approx(one_by_one(classifier(), words, texts), abs=1e-5)


def test_a_message_that_is_continued_is_read_once():
    prompt = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    texts = {"": "<user>1<eos><assistant>2<eos><assistant>34<eos>", "2": "<user>1<eos><assistant>234<eos>"}
    for assistant_prefix, text in texts.items():
        whole = one_by_one(classifier(), tokenizer(chat=True), [text])
        options = {"continue_final_message": bool(assistant_prefix)}
        for of_run, of_row in (
            (options, {}),
            ({"continue_final_message": not assistant_prefix}, {"chat_template_kwargs": options}),
        ):
            model = ModelReward(classifier(), tokenizer(chat=True), chat_template_kwargs=of_run)
            panel, one = RewardPanel([model], RewardSettings((1.0,)), lambda ids: "34"), group(prompt, "x", **of_row)
            result = panel.compute_rewards(
                [replace(one, prompt=replace(one.prompt, assistant_prefix=assistant_prefix))]
            )
            assert result.records[0].rewards == pytest.approx(whole, abs=1e-5)


def test_chat_template_kwargs_reach_the_template():
    words = tokenizer(chat=True)
    words.chat_template = "{{ opening }}{{ messages[0]['content'] }}"
    reward = make_rewards(classifier(), words, chat_template_kwargs={"opening": "9"})[0]
    rewards = reward(MESSAGES, [[{"role": "assistant", "content": "2"}]], [[2]])
    assert rewards == pytest.approx(one_by_one(classifier(), words, ["91"]), abs=1e-5)


def test_a_model_of_a_path_has_its_tokenizer_and_name_from_there(folder):
    instance = AutoModelForSequenceClassification.from_pretrained(folder)
    for given in (folder, str(folder), str(folder) + "/", instance):
        reward = make_rewards(given)[0]
        assert reward.name == "tiny-reward"
        assert isinstance(reward, Reward)
        assert reward(**PLAIN) == pytest.approx(ModelReward(classifier(), tokenizer(chat=True))(**PLAIN), abs=1e-6)
    own = make_rewards(str(folder), model_kwargs={"dtype": torch.bfloat16})[0]
    assert next(own.model.parameters()).dtype == torch.bfloat16
    assert all(isinstance(value, float) for value in own(**PLAIN))


def test_a_model_is_left_as_it_was_passed_in():
    model = classifier(attention_dropout=0.5).train()
    model.score.eval()
    modes = [module.training for module in model.modules()]
    reward = ModelReward(model, tokenizer())
    assert reward(**PLAIN) == reward(**PLAIN), "dropout acted"
    assert [module.training for module in model.modules()] == modes
    assert model.config.pad_token_id is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batches_hold_rows_of_like_length_within_the_budget():
    assert list(batches_by_length([3, 9, 4, 20, 9, 1], 18)) == [[3], [1, 4], [2, 0, 5]]


def test_functions_and_models_stand_side_by_side_in_one_panel(folder):
    def bonus(completions):
        return [1.0] * len(completions)

    rewards = make_rewards([bonus, str(folder), str(folder)], [None, None, tokenizer(chat=True)])
    assert [reward.name for reward in rewards] == ["bonus", "tiny-reward", "tiny-reward_2"]
    panel = RewardPanel(rewards, RewardSettings((0.5, 1.0, 1.0)), lambda ids: "2")
    record = panel.compute_rewards([group("1+1=", "x")]).records[0]
    logit = one_by_one(classifier(), tokenizer(chat=True), ["1+1=2"])[0]
    assert record.reward == pytest.approx(0.5 + 2 * logit, abs=1e-5)


def saved(folder, model, words=True):
    model.save_pretrained(folder)
    if words:
        tokenizer().save_pretrained(folder)
    return str(folder)


def unpadded():
    words = tokenizer()
    words.pad_token = words.eos_token = None
    return words


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda at: make_rewards("./no/such/model"), ModelError, r"'\./no/such/model'"),
        (lambda at: make_rewards(saved(at, tiny_model())), ModelError, r"'{at}'.* score\.weight"),
        (lambda at: make_rewards(saved(at, classifier(num_labels=3))), ModelError, "'{at}'"),
        (lambda at: ModelReward(classifier(num_labels=3), tokenizer()), ArgumentError, "3 .*num_labels=1"),
        (lambda at: make_rewards(saved(at, classifier(), False)), ModelError, "'{at}' .*reward_processing_classes"),
        (lambda at: make_rewards(classifier()), ArgumentError, "reward_processing_classes"),
        (lambda at: make_rewards(torch.nn.Linear(1, 1), tokenizer()), ArgumentError, "Linear"),
        (lambda at: make_rewards(None), ArgumentError, "reward_funcs"),
        (lambda at: make_rewards([]), ArgumentError, "reward_funcs"),
        (lambda at: make_rewards([3]), ArgumentError, "3 .*int"),
        (lambda at: make_rewards([len, max], [None]), ArgumentError, "1 reward_processing_classes .*2 reward_funcs"),
        (lambda at: ModelReward(classifier(), tokenizer(), name="j")(MESSAGES, [[]], [[]]), ModelError, "'j'"),
        (lambda at: ModelReward(classifier(), unpadded(), name="j"), ModelError, "'j'"),
    ],
)
def test_what_is_no_reward_is_refused(tmp_path, make, error, words):
    with pytest.raises(error, match=words.replace("{at}", str(tmp_path))):
        make(tmp_path)


def test_a_model_whose_weights_are_offloaded_computes_on_its_device():
    reward = ModelReward(classifier(), tokenizer())
    expected = reward(**PLAIN)
    offloaded = cpu_offload(freeze(classifier()), torch.device("cpu"))
    assert {p.device.type for p in offloaded.parameters()} == {"meta"}
    reward.replace_model(FrozenModel(offloaded, nullcontext), None, torch.device("cpu"))
    assert reward(**PLAIN) == expected
