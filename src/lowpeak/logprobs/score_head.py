"""The score head's home: a sequence classifier's own `score`, inside the model's single forward.

`install_score_head` gives a transformers sequence classifier with one label the keyword `head_request`, as `install_head`
gives it to a causal LM. With it the backbone runs and `score` is called as a module, on the hidden states at the request's
positions alone; whatever wraps the model sees an ordinary forward. Without it the forward is what it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.errors import HeadMismatchError, ModelError
from lowpeak.logprobs.hidden import at_positions, fp32_product
from lowpeak.logprobs.lm_head import (
    HeadRequest,
    backbone_inputs,
    backbone_of,
    causal_lm,
    head_parts,
    installed_on,
    is_linear,
    replace_forward,
)
from lowpeak.logprobs.reference import HeadScale
from lowpeak.logprobs.self_check import check_finite_weights, evaluated


def install_score_head(model: nn.Module, *, cast_head_to_fp32: bool = False) -> nn.Module:
    """Make a classifier, plain or under peft, answer `model(..., head_request=HeadRequest(...))`; returns the model.

    The answer is {"values": [T]}, float32: `score(backbone(ids))` at the T positions. The head takes hidden states of another
    dtype than its own, as a half precision backbone's under a trained head are; `cast_head_to_fp32` makes its product fp32.
    Raises ModelError for a model without a backbone followed by a `score` of one number.
    """
    classifier = classifier_of(model)
    backbone_of(classifier)
    for part in head_parts(classifier.score):
        if cast_head_to_fp32 and not is_linear(part):
            raise ModelError(
                f"cast_lm_head_to_fp32 needs a plain linear score, and {type(classifier).__name__}'s is "
                f"{type(part).__module__}.{type(part).__name__}; leave it off, or keep adapters and quantization away from the head"
            )
        replace_forward(part, _score_forward, HeadScale(), cast_head_to_fp32)
    replace_forward(classifier, _classifier_forward, HeadScale(), cast_head_to_fp32)
    return model


def classifier_of(model: nn.Module) -> Any:
    """The transformers sequence classifier itself, taken out of DDP's and peft's wrappers where there are any."""
    inner = causal_lm(model)
    score = getattr(inner, "score", None)
    if not isinstance(score, nn.Module) or inner.config.num_labels != 1:
        raise ModelError(
            f"{type(inner).__name__} has no `score` head that gives one number; pass a name or path, or an instance of "
            "AutoModelForSequenceClassification with num_labels=1 whose backbone is a causal language model's"
        )
    return inner


def _classifier_forward(self: Any, *args: Any, head_request: HeadRequest | None = None, **kwargs: Any) -> Any:
    if head_request is None:
        return installed_on(self).forward(*args, **kwargs)
    hidden: Tensor = backbone_of(self)(*args, **backbone_inputs(kwargs), use_cache=False)[0]
    return {"values": self.score(at_positions(hidden, head_request.positions_T))[:, 0].float()}


def _score_forward(self: Any, hidden: Tensor) -> Tensor:
    installed = installed_on(self)
    if installed.in_fp32:
        return fp32_product(self, hidden)
    scores: Tensor = installed.forward(hidden.to(self.weight.dtype) if is_linear(self) else hidden)
    return scores


def verify_score_head(model: nn.Module, *, num_tokens: int = 8, device: torch.device | str | None = None) -> float:
    """The largest difference between scores by request and the model's own; HeadMismatchError where it is large.

    A row's own score is its classifier's logit, which has to be read at the row's last token; and a score in the middle of a
    row may not change with what comes after it. `model` as it will be called, `install_score_head` done, in eval mode.
    """
    classifier = classifier_of(model)
    table: Tensor = classifier.get_input_embeddings().weight
    if table.is_meta:  # this rank has no weights yet; one that has them looks
        return 0.0
    ids_1L, others_1L = _rows(classifier.config.get_text_config(), num_tokens, device or table.device)
    middle, last = num_tokens // 2, num_tokens - 1
    with evaluated(model):
        own: Tensor = model(input_ids=ids_1L).logits[0, 0].float()
        there, before = _scores(model, ids_1L, [last, middle])
        (again,) = _scores(model, others_1L, [middle])
    allowed = 1e-4 + 3 * torch.finfo(table.dtype).eps * float(torch.stack([own, before]).abs().max())
    elsewhere, ahead = float((own - there).abs()), float((before - again).abs())
    _check(classifier, elsewhere, allowed, "reads its score elsewhere than at a row's last token")
    _check(classifier, ahead, allowed, "changes a score with the tokens that come after it, so it is not causal")
    return max(elsewhere, ahead)


def _rows(config: Any, num_tokens: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Two rows of fixed ids that part after their middle; none of the ids is padding, after which a classifier looks."""
    pad = getattr(config, "pad_token_id", None)
    ids = [i for i in range(config.vocab_size) if i != pad][: 2 * num_tokens]
    row = [ids[i * 7 % len(ids)] for i in range(num_tokens)]
    other = [*row[: num_tokens // 2 + 1], *reversed(row[num_tokens // 2 + 1 :])]
    return torch.tensor([row], device=device), torch.tensor([other], device=device)


def _scores(model: nn.Module, ids_1L: Tensor, positions: list[int]) -> Tensor:
    positions_T = torch.tensor(positions, device=ids_1L.device)
    request = HeadRequest(positions_T, positions_T, temperature=1.0, chunk_size=len(positions), values=True)
    scores: Tensor = model(input_ids=ids_1L, head_request=request)["values"]
    return scores


def _check(classifier: nn.Module, difference: float, allowed: float, what: str) -> None:
    if not difference <= allowed:
        check_finite_weights(classifier)
        raise HeadMismatchError(
            f"{type(classifier).__name__} {what}: two of its scores that should be equal differ by {difference:.3g}, where "
            f"rounding explains {allowed:.3g}; train a reward model on a causal language model's backbone"
        )
