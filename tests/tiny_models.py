"""Small real models and tokenizers, made on the spot: no hub, no download."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def char_tokenizer(alphabet: str = "0123456789=", chat: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, `<pad>` 0 and `<eos>` 1; with `chat`, role tokens and a template."""
    special = ["<pad>", "<eos>"] + (["<system>", "<user>", "<assistant>"] if chat else [])
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=special[2:]
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that a character may take four tokens."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces that carry their leading space, which is lost when a piece is decoded alone."""
    pieces = ["▁a", "b", "▁b", "ab", "▁", "ba", "▁aab"]
    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="b"))
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def tiny_model(
    vocab_size: int = 13,
    seed: int = 0,
    *,
    tied: bool = True,
    hidden: int = 32,
    layers: int = 2,
    context: int = 128,
    dtype: torch.dtype = torch.float32,
) -> Qwen2ForCausalLM:
    """A Qwen2-shaped model with random weights, in eval mode; wide enough an init that its logits differ clearly."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=2 * hidden, max_position_embeddings=context, tie_word_embeddings=tied, initializer_range=0.2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).eval()


def tiny_experts(vocab_size: int = 13, **changes: object) -> Qwen3MoeForCausalLM:
    """A Qwen3-shaped mixture of four experts, of which a token has two, with random weights, in eval mode."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **changes})).eval()


def trained_adapter(model: nn.Module, config: LoraConfig) -> PeftModel:
    """The model under an adapter that has an effect."""
    from peft import get_peft_model

    made, generator = get_peft_model(model, config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made


def digest(model: nn.Module) -> str:
    """A hash of all of a model's tensors, bit for bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def footprint(model: nn.Module) -> list[tuple[object, ...]]:
    """What a rollout may change of a model's modules for its time: modes, hooks, forwards, checkpointing, parameters."""
    return [
        (
            module.training,
            list(module._forward_pre_hooks),
            list(module._forward_hooks),
            id(module.__dict__.get("forward")),
            getattr(module, "gradient_checkpointing", None),
            [id(parameter) for parameter in module._parameters.values()],
        )
        for module in model.modules()
    ]


TOOL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<tool>{{ message['content'] }}<eos>"
    "{% else %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, role tokens, and a chat template that writes tool calls as Qwen's does."""
    tokenizer = char_tokenizer("".join(map(chr, range(32, 127))) + "\n", chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]}, replace_extra_special_tokens=False)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer
