"""Token in, token out: appended turns and parsed calls, for every chat template of TRL's wheel that writes tool calls."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import trl_wheel
from lowpeak.data.row_reader import common_prefix_length
from lowpeak.environments.append import USER, TurnAppender, render, tool_call
from lowpeak.environments.calls import CallParser, find_call_format
from lowpeak.errors import DataError

FOLDER = trl_wheel.FOLDER / "trl" / "chat_templates"
CONTROL = re.compile(
    r"<[|｜][^<>\s'\"{}]{1,40}[|｜]>|<\|[a-z_\"]+>|<[a-z_]+\|>|\[gMASK\]|<sop>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value)>"
)
# End tokens by the beginning of a template's name; a turn with calls ends with the first.
ENDS = {
    **dict.fromkeys(("gemma4_v2",), ("<turn|>", "<|tool_response>", "<eos>")),
    **dict.fromkeys(("gemma4", "diffusion_gemma"), ("<|tool_response>", "<turn|>", "<eos>")),
    "glm": ("<|observation|>", "<|user|>", "<|endoftext|>"),
    "gptoss": ("<|call|>", "<|return|>"),
    "llama3": ("<|eot_id|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "": ("<|im_end|>",),
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "description": "A number."} for name in ("a", "b")},
            "required": ["a", "b"],
        },
    },
}
OPTIONS = {"tools": [ADD]}
ARGUMENTS = {"a": 17, "b": 26}
WITHOUT_CALLS = {
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5"),
    *("qwen2_5_vl", "idefics3", "llava_next", "smolvlm"),
    "muse_glimmer",  # writes calls in a form of its own: a response_template is asked for
}


def names():
    found = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
    return [name for name in found if name not in WITHOUT_CALLS]


@cache
def tokenizer_of(name):
    """A tokenizer of bytes with the template's control tokens, and the ids of its end tokens."""
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    ends = next(tokens for family, tokens in ENDS.items() if name.startswith(family))
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    control = sorted({*CONTROL.findall(template), *ends, "<bos>", "<pad>"})
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=ends[-1], bos_token="<bos>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer, [tokenizer.convert_tokens_to_ids(text) for text in ends]


def results(count, text="4{} yes"):
    return [{"role": "tool", "name": "add", "content": text.format(i)} for i in range(count)]


def canonical(tokenizer, replies):
    """The ids of a whole conversation with a call, and of the prompt alone, as the template writes them."""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        turn = {"role": "assistant", "content": "", "tool_calls": [tool_call("add", arguments)]}
        messages = [USER, turn, *[{**reply, "tool_call_id": "call00000"} for reply in replies]]
        try:
            texts = [render(tokenizer, each, {**OPTIONS, "add_generation_prompt": True}) for each in (messages, [USER])]
        except Exception:
            continue
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    raise AssertionError("the template renders neither form of arguments")


@trl_wheel.needs_trl
@pytest.mark.parametrize("name", names())
def test_a_conversation_has_the_ids_of_its_canonical_rendering(name):
    tokenizer, ends = tokenizer_of(name)
    appender, parser = TurnAppender(tokenizer, ends, OPTIONS), CallParser(tokenizer, ends, OPTIONS)
    controls = set(tokenizer.get_added_vocab().values())
    for count in (1, 2):
        whole, prompt = canonical(tokenizer, results(count))
        reply = appender.append(ends[0], results(count))
        start = len(whole) - len(reply)
        assert whole[start:] == reply
        assert whole[start - 1] == ends[0]
        # A turn that was cut off gets the template's end, too.
        cut = appender.append(tokenizer("x")["input_ids"][-1], results(count))
        assert whole[len(whole) - len(cut) :] == cut
        turn = parser.parse(whole[common_prefix_length(prompt, whole) : start])
        assert [(each.name, each.arguments) for each in turn.calls] == [("add", ARGUMENTS)]
        assert (turn.message["content"], turn.num_malformed) == ("", 0)
        # Control tokens in a result stay text.
        text = "".join(sorted(tokenizer.get_added_vocab()))
        attacked = appender.append(ends[0], results(count, f"{{}} {text.replace('{', '{{').replace('}', '}}')}"))
        assert sum(token in controls for token in attacked) == sum(token in controls for token in reply)


@trl_wheel.needs_trl
def test_every_template_of_the_wheel_is_tested_or_writes_no_calls():
    assert len(names()) >= 27
    for name in WITHOUT_CALLS:
        with pytest.raises(DataError, match="response_template"):
            find_call_format(tokenizer_of(name)[0], OPTIONS)
