"""The start-up checks: the log-prob core against the model's own logits on a few tokens, and its load-balancing loss.

The first is what finds a scale, cap, norm or padding of the vocabulary that `head_scale` does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.errors import HeadMismatchError, ModelError
from lowpeak.logprobs.lm_head import HeadRequest, causal_lm
from lowpeak.logprobs.reference import pick
from lowpeak.models import LoadBalance, RoutingRequest, balance_loss


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module's own mode comes back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def verify_head(model: nn.Module, *, num_tokens: int = 8, device: torch.device | str | None = None) -> float:
    """The largest difference between the core's values and those of the model's logits; HeadMismatchError if large.

    Two rows of `num_tokens` fixed ids through the model as given (wrapped or not, `install_head` done), in eval mode.
    `device` is that of the embeddings unless named. What is tolerated is the rounding of logits that
    were rounded three times (product, scale, cap), twice over.
    """
    causal = causal_lm(model)
    table: Tensor = causal.get_input_embeddings().weight
    if table.is_meta:  # this rank has no weights yet; one that has them looks
        return 0.0
    ids_BL = _fixed_ids(causal, num_tokens, device or table.device)
    positions_T = torch.arange(2 * num_tokens, device=ids_BL.device)
    targets_T = ids_BL.flatten().roll(-1)
    # A chunk that does not divide T, so that the seam is checked as well.
    request = HeadRequest(positions_T, targets_T, temperature=1.0, chunk_size=num_tokens + 1, entropy=True)
    with evaluated(model):
        logits_TV: Tensor = model(input_ids=ids_BL).logits.flatten(0, 1)
        answer = model(input_ids=ids_BL, head_request=request)
    expected = pick(logits_TV, targets_T)
    values = torch.stack([answer["logprobs"], answer["entropy"]])
    largest = float((values - torch.stack(expected)).abs().max())
    allowed = 1e-4 + 3 * rounding(logits_TV.dtype, logits_TV.device) * float(logits_TV.abs().max())
    if not largest <= allowed:
        check_finite_weights(causal)
        raise HeadMismatchError(
            f"the log-probs of {type(causal).__name__} formed from its hidden states differ from those of its own "
            f"logits by up to {largest:.3g}, where rounding explains {allowed:.3g}: it changes its logits in a way "
            "that lowpeak does not know; report the model, and use another one until it is supported"
        )
    return largest


def check_finite_weights(causal: nn.Module) -> None:
    """Raise ModelError for the first weight that has NaN or infinities."""
    for name, parameter in causal.named_parameters():
        if parameter.is_floating_point() and not parameter.isfinite().all():
            raise ModelError(
                f"the model's weights are not finite: {name} has NaN or infinite numbers; load a checkpoint without them, or in a "
                "wider dtype."
            )


def verify_load_balance(model: nn.Module, balance: LoadBalance, *, num_tokens: int = 8) -> None:
    """Compare the load-balancing loss with the model's own, over `2 * num_tokens` fixed ids; ModelError if they differ.

    What is tolerated is a token of which two experts are as likely, to half precision.
    """
    causal = causal_lm(model)
    table: Tensor = causal.get_input_embeddings().weight
    if table.is_meta:  # this rank has no weights yet; one that has them looks
        return
    ids_BL = _fixed_ids(causal, num_tokens, table.device)
    nothing_T = ids_BL.new_zeros(1)
    routing = RoutingRequest(torch.ones(ids_BL.numel(), device=ids_BL.device), balance.top_k)
    request = HeadRequest(nothing_T, nothing_T, temperature=1.0, chunk_size=1, logprobs=False, routing=routing)
    with evaluated(model):
        expected = model(input_ids=ids_BL, output_router_logits=True).aux_loss
        choices_E, probabilities_E = model(input_ids=ids_BL, head_request=request)["routing"]
        found = balance_loss(choices_E, probabilities_E, balance.top_k)
    if not abs(float(found) - float(expected)) <= 0.02 * abs(float(expected)):
        raise ModelError(
            f"the load-balancing loss of {type(causal).__name__} is {float(expected):.4g}, and Switch Transformer's formula gives "
            f"{float(found):.4g} for the same router logits: set router_aux_loss_coef=0 to train without it."
        )


def _fixed_ids(causal: Any, num_tokens: int, device: torch.device | str) -> Tensor:
    """Two rows of `num_tokens` ids, the same in every run."""
    num_ids = causal.config.get_text_config().vocab_size
    return (torch.arange(2 * num_tokens, device=device) * 7919 + 3).remainder(num_ids).view(2, -1)


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """The rounding of one product in a dtype on a device, whose settings may allow fp32 products to be rougher."""
    if dtype != torch.float32:
        return torch.finfo(dtype).eps
    # Not torch.get_float32_matmul_precision: it raises where the settings were made by their newer names, as transformers does.
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return 2.0**-10 if backend.matmul.fp32_precision in ("tf32", "bf16") else torch.finfo(dtype).eps
