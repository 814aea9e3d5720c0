"""Start-up checks of a model: its log-probs against its logits, and its load-balancing loss.

The first detects a scale, cap, norm or vocabulary padding that `head_scale` does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.errors import HeadMismatchError, ModelError
from lowpeak.heads.experts import LoadBalance, RoutingRequest, balance_loss
from lowpeak.heads.lm_head import HeadRequest, causal_lm
from lowpeak.logprobs import logprobs_and_entropy

NUM_CHECK_TOKENS = 8  # of each sequence that a self-check forwards


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode without gradients; afterwards restore each module's mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def verify_head(model: nn.Module) -> float:
    """Compare log-probs by request with those of the model's logits; return the largest difference.

    Raises HeadMismatchError if it is more than rounding explains: twice that of logits rounded three times (product, scale,
    cap). Pass the model as it will be called (wrapped or not) after `install_head`; two sequences of fixed ids run in
    eval mode, on the embeddings' device.
    """
    causal = causal_lm(model)
    table: Tensor = causal.get_input_embeddings().weight
    # This rank has no weights yet; a rank that has them runs the check.
    if table.is_meta:
        return 0.0
    ids_BL = _fixed_ids(causal, table.device)
    positions_T = torch.arange(ids_BL.numel(), device=ids_BL.device)
    targets_T = ids_BL.flatten().roll(-1)
    # A chunk size that does not divide T, so that a chunk border is checked too.
    request = HeadRequest(positions_T, targets_T, temperature=1.0, chunk_size=NUM_CHECK_TOKENS + 1, entropy=True)
    with eval_mode(model):
        logits_TV: Tensor = model(input_ids=ids_BL).logits.flatten(0, 1)
        answer = model(input_ids=ids_BL, head_request=request)
    expected = logprobs_and_entropy(logits_TV, targets_T)
    values = torch.stack([answer["logprobs"], answer["entropy"]])
    largest = float((values - torch.stack(expected)).abs().max())
    allowed = 1e-4 + 3 * matmul_eps(logits_TV.dtype, logits_TV.device) * float(logits_TV.abs().max())
    if not largest <= allowed:
        check_finite_weights(causal)
        if not values.isfinite().all():
            raise ModelError(
                f"the hidden states of {type(causal).__name__} are not finite on {ids_BL.device} with attn_implementation="
                f"{causal.config._attn_implementation!r}: choose another one, such as 'sdpa', or a wider dtype."
            )
        raise HeadMismatchError(
            f"the log-probs of {type(causal).__name__} from its hidden states differ from those of its logits by up to "
            f"{largest:.3g}, and rounding explains at most {allowed:.3g}: the model changes its logits in a way that lowpeak "
            "does not know; report the model, and use another one until it is supported"
        )
    return largest


def check_finite_weights(causal: nn.Module) -> None:
    """Raise ModelError for the first weight that has NaN or infinite values."""
    for name, parameter in causal.named_parameters():
        if parameter.is_floating_point() and not parameter.isfinite().all():
            raise ModelError(
                f"the model's weights are not finite: {name} has NaN or infinite values; load a checkpoint without them, or load "
                "it in a wider dtype."
            )


def verify_load_balance(model: nn.Module, balance: LoadBalance) -> None:
    """Raise ModelError if the load-balancing loss of fixed ids differs from the model's `aux_loss`."""
    causal = causal_lm(model)
    table: Tensor = causal.get_input_embeddings().weight
    # As in `verify_head`.
    if table.is_meta:
        return
    ids_BL = _fixed_ids(causal, table.device)
    nothing_T = ids_BL.new_zeros(1)
    routing = RoutingRequest(torch.ones(ids_BL.numel(), device=ids_BL.device), balance.top_k)
    request = HeadRequest(nothing_T, nothing_T, temperature=1.0, chunk_size=1, logprobs=False, routing=routing)
    with eval_mode(model):
        expected = model(input_ids=ids_BL, output_router_logits=True).aux_loss
        choices_E, probabilities_E = model(input_ids=ids_BL, head_request=request)["routing"]
        computed = balance_loss(choices_E, probabilities_E, balance.top_k)
    # 2 %: in half precision two experts may be equally likely for a token.
    if not abs(float(computed) - float(expected)) <= 0.02 * abs(float(expected)):
        raise ModelError(
            f"the load-balancing loss of {type(causal).__name__} is {float(expected):.4g}, and Switch Transformer's formula gives "
            f"{float(computed):.4g} for the same router logits: set router_aux_loss_coef=0 to train without it."
        )


def _fixed_ids(causal: Any, device: torch.device) -> Tensor:
    """Return two sequences of ids, the same in every run: [2, L]."""
    num_ids = causal.config.get_text_config().vocab_size
    return (torch.arange(2 * NUM_CHECK_TOKENS, device=device) * 7919 + 3).remainder(num_ids).view(2, -1)


def matmul_eps(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative rounding of a matrix product in a dtype; torch's settings may lower that of fp32."""
    if dtype != torch.float32:
        return torch.finfo(dtype).eps
    # Not torch.get_float32_matmul_precision: it raises after fp32_precision was set, as transformers does.
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return 2.0**-10 if backend.matmul.fp32_precision in ("tf32", "bf16") else torch.finfo(dtype).eps
