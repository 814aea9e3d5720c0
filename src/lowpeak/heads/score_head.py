"""A sequence classifier's head that returns scores from inside the model's single forward.

`install_score_head` adds the keyword `head_request` to a transformers sequence classifier with one label, as `install_head`
does to a causal LM. With a request the backbone runs, and `score` is called as a module on the hidden states at the
requested positions only, so wrappers of the model see an ordinary forward. Without a request the forward is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.errors import HeadMismatchError, ModelError
from lowpeak.heads.lm_head import (
    HeadRequest,
    backbone_kwargs,
    backbone_of,
    causal_lm,
    head_modules,
    is_linear,
    patch_forward,
    patched_forward,
)
from lowpeak.heads.self_check import NUM_CHECK_TOKENS, check_finite_weights, eval_mode
from lowpeak.logprobs import HeadScale, fp32_linear, select_positions


def install_score_head(model: nn.Module, *, cast_head_to_fp32: bool = False) -> nn.Module:
    """Let a classifier, plain or under peft, answer `model(..., head_request=HeadRequest(...))`; return the model.

    The answer is {"values": [T]}, float32: `score(backbone(ids))` at the T positions. Hidden states are cast to the head's
    dtype (a trained head may be wider than its backbone); `cast_head_to_fp32` computes the head's product in fp32.
    Raises ModelError for a model without a backbone followed by a `score` with one output.
    """
    classifier = classifier_of(model)
    backbone_of(classifier)
    for module in head_modules(classifier.score):
        if cast_head_to_fp32 and not is_linear(module):
            raise ModelError(
                f"cast_lm_head_to_fp32 needs a plain linear score, and {type(classifier).__name__}'s is "
                f"{type(module).__module__}.{type(module).__name__}; leave it off, or keep adapters and "
                "quantization away from the head"
            )
        patch_forward(module, _score_forward, HeadScale(), cast_head_to_fp32)
    patch_forward(classifier, _classifier_forward, HeadScale(), cast_head_to_fp32)
    return model


def classifier_of(model: nn.Module) -> Any:
    """Return the transformers sequence classifier inside DDP's and peft's wrappers, if any."""
    inner = causal_lm(model)
    score = getattr(inner, "score", None)
    if not isinstance(score, nn.Module) or inner.config.num_labels != 1:
        raise ModelError(
            f"{type(inner).__name__} has no `score` head with one output; pass a name or path, or an instance of "
            "AutoModelForSequenceClassification with num_labels=1 on a causal language model's backbone"
        )
    return inner


def _classifier_forward(self: Any, *args: Any, head_request: HeadRequest | None = None, **kwargs: Any) -> Any:
    if head_request is None:
        return patched_forward(self).original(*args, **kwargs)
    hidden: Tensor = backbone_of(self)(*args, **backbone_kwargs(kwargs), use_cache=False)[0]
    return {"values": self.score(select_positions(hidden, head_request.positions_T))[:, 0].float()}


def _score_forward(self: Any, hidden: Tensor) -> Tensor:
    patch = patched_forward(self)
    if patch.in_fp32:
        return fp32_linear(self, hidden)
    scores: Tensor = patch.original(hidden.to(self.weight.dtype) if is_linear(self) else hidden)
    return scores


def verify_score_head(model: nn.Module) -> float:
    """Compare scores by request with the model's logits; return the largest difference, or raise HeadMismatchError.

    The classifier's logit must be the score at a sequence's last token, and a score inside a sequence must not depend on
    later tokens. Pass the model as it will be called (wrapped or not) after `install_score_head`; it runs in eval mode.
    """
    classifier = classifier_of(model)
    table: Tensor = classifier.get_input_embeddings().weight
    # This rank has no weights yet; a rank that has them runs the check.
    if table.is_meta:
        return 0.0
    ids_1L, changed_1L = _two_sequences(classifier.config.get_text_config(), table.device)
    middle, last = NUM_CHECK_TOKENS // 2, NUM_CHECK_TOKENS - 1
    with eval_mode(model):
        logit: Tensor = model(input_ids=ids_1L).logits[0, 0].float()
        at_last, at_middle = _scores(model, ids_1L, [last, middle])
        (at_middle_changed,) = _scores(model, changed_1L, [middle])
    allowed = 1e-4 + 3 * torch.finfo(table.dtype).eps * float(torch.stack([logit, at_middle]).abs().max())
    by_position, by_later_tokens = float((logit - at_last).abs()), float((at_middle - at_middle_changed).abs())
    _check(classifier, by_position, allowed, "does not read its score at a sequence's last token")
    _check(classifier, by_later_tokens, allowed, "changes a score with later tokens, so it is not causal")
    return max(by_position, by_later_tokens)


def _two_sequences(config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two sequences of fixed ids that differ after the middle: [1, L] each."""
    # Without padding ids: a classifier looks for these to find the last token.
    pad = getattr(config, "pad_token_id", None)
    ids = [i for i in range(config.vocab_size) if i != pad][: 2 * NUM_CHECK_TOKENS]
    sequence = [ids[i * 7 % len(ids)] for i in range(NUM_CHECK_TOKENS)]
    changed = [*sequence[: NUM_CHECK_TOKENS // 2 + 1], *reversed(sequence[NUM_CHECK_TOKENS // 2 + 1 :])]
    return torch.tensor([sequence], device=device), torch.tensor([changed], device=device)


def _scores(model: nn.Module, ids_1L: Tensor, positions: list[int]) -> Tensor:
    positions_T = torch.tensor(positions, device=ids_1L.device)
    request = HeadRequest(positions_T, positions_T, temperature=1.0, chunk_size=len(positions), values=True)
    scores: Tensor = model(input_ids=ids_1L, head_request=request)["values"]
    return scores


def _check(classifier: nn.Module, difference: float, allowed: float, problem: str) -> None:
    if not difference <= allowed:
        check_finite_weights(classifier)
        raise HeadMismatchError(
            f"{type(classifier).__name__} {problem}: two scores that should be equal differ by {difference:.3g}, and "
            f"rounding explains {allowed:.3g} at most; train a reward model on a causal language model's backbone"
        )
