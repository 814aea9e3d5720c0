"""The log-prob core's home: a causal LM's own head, inside the model's single forward.

`install_head` gives a transformers causal LM one more keyword, `head_request`. With it the backbone runs and `lm_head`
is called as a module with the hidden states and the request, so that whatever wraps the model (DDP's reducer, FSDP2's
and ZeRO-3's hooks) sees an ordinary forward with ordinary outputs; beside the model the core would get unaveraged or
mismatched gradients. Without it both forwards are unchanged, except that a mixture of experts adds no
load-balancing loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.errors import ModelError
from lowpeak.logprobs.chunked import TokenLoss, chunked_logprobs, no_autocast, one_visit
from lowpeak.logprobs.hidden import at_positions, fp32_product, linear
from lowpeak.logprobs.inplace_grad import direct_lookups, looks_up_directly, lookup
from lowpeak.logprobs.module_head import module_logprobs, module_loss
from lowpeak.logprobs.reference import ChunkSettings, HeadScale, head_scale
from lowpeak.models import RoutingRequest, States, critic_of, routing_sums, transformers_model

# What a causal LM's forward takes and its backbone does not, or what a request decides.
_NOT_FOR_BACKBONE = (
    "labels",
    "logits_to_keep",
    "return_dict",
    "use_cache",
    "num_items_in_batch",
    "output_router_logits",
)
_MARK = "_lowpeak_head"


@dataclass(frozen=True)
class HeadRequest:
    """What is wanted of the head: log-probs of T targets at T positions of the flattened [B*L] hidden states.

    `loss(logprobs_C, entropy_C, start, stop)` is the summed loss of tokens [start, stop): with it the answer has a
    differentiable "loss", and log-probs and entropies come detached. Without it the log-probs are differentiable.
    With `values` the answer has the critic's "values" [T], of whose gradient `values_gradient` reaches a backbone that is the
    policy's too; without `logprobs` it has nothing else, and the head does not run.
    With `top1` the answer has "top1", bool [T]: whether no id is likelier than the target (ties count).
    With `routing` it has a mixture of experts' "routing" [2, E], see `routing_sums`.
    `promised_scale` is what backward will multiply the loss by: with it a plain head and plain embeddings add their
    gradients to `.grad` themselves (`direct.py`), which a strategy allows where nothing has to see them on their way.
    """

    positions_T: Tensor
    targets_T: Tensor
    temperature: float
    chunk_size: int
    entropy: bool = False
    entropy_grad: bool = False
    loss: TokenLoss | None = None
    promised_scale: float | None = None
    values: bool = False
    logprobs: bool = True
    values_gradient: float = 1.0
    top1: bool = False
    routing: RoutingRequest | None = None


@dataclass(frozen=True)
class Installed:
    """What a module with a replaced forward remembers. Bound methods follow their module through `copy.deepcopy`."""

    forward: Callable[..., Any]
    on_instance: bool
    scale: HeadScale
    in_fp32: bool


def install_head(model: nn.Module, *, cast_head_to_fp32: bool = False) -> nn.Module:
    """Make a causal LM, plain or under peft, answer `model(..., head_request=HeadRequest(...))`; returns the model.

    The answer is a dict of tensors: "logprobs" [T], "entropy" and "top1" [T] if asked, "loss" if the request has one. Installing
    again renews it: needed after adapters were added to the head. `cast_head_to_fp32` makes the head's product fp32
    with and without a request. Raises ModelError for a model without a backbone followed by a head.
    """
    causal = causal_lm(model)
    backbone_of(causal)
    head, scale = _head_of(causal), head_scale(causal.config)
    parts = head_parts(head)
    for module in head.modules():  # what was a head before an adapter wrapped it is a plain layer of the new head
        if module not in parts:
            _restore(module)
    for part in parts:
        if cast_head_to_fp32 and not is_linear(part):
            raise ModelError(
                f"cast_lm_head_to_fp32 needs a plain linear head, and {type(causal).__name__}'s is "
                f"{type(part).__module__}.{type(part).__name__}; leave it off, or keep adapters and quantization away from the head"
            )
        replace_forward(part, _head_forward, scale, cast_head_to_fp32)
        setattr(part, "computes_in_fp32", cast_head_to_fp32)  # noqa: B010, for whoever computes logits in its place
    embeddings = causal.get_input_embeddings()
    if type(embeddings) is nn.Embedding and (_MARK in embeddings.__dict__ or "forward" not in embeddings.__dict__):
        replace_forward(embeddings, _embedding_forward, scale, in_fp32=False)
    replace_forward(causal, _causal_forward, scale, cast_head_to_fp32)
    return model


def causal_lm(model: Any) -> Any:
    """The transformers causal LM itself, taken out of DDP's and peft's wrappers where there are any."""
    while not hasattr(model, "get_output_embeddings") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    inner = transformers_model(model)
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "config"):
        raise ModelError(f"{type(inner).__name__} is not a transformers causal language model; load one for causal LM")
    if getattr(inner.config, "is_encoder_decoder", False):
        raise ModelError(f"{type(inner).__name__} is an encoder-decoder model; only causal language models can be used")
    return inner


def backbone_of(causal: Any) -> nn.Module:
    """The module that turns ids into the hidden states that the head reads."""
    for backbone in (causal.base_model, causal.get_decoder()):
        if isinstance(backbone, nn.Module) and backbone is not causal:
            return backbone
    raise ModelError(
        f"{type(causal).__name__} has no separate backbone (base_model_prefix, get_decoder()) below its head, so "
        "log-probs cannot be formed without its logits; use a model whose head is a module of its own"
    )


def _head_of(causal: Any) -> nn.Module:
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(causal).__name__} has no output head (get_output_embeddings() gives none)")
    return head


def _causal_forward(self: Any, *args: Any, head_request: HeadRequest | None = None, **kwargs: Any) -> Any:
    installed = installed_on(self)
    if head_request is None:
        if getattr(self.config.get_text_config(), "output_router_logits", False):
            # transformers' load-balancing loss takes a mask of the tokens of this call, and with a cache gets one of all
            kwargs.setdefault("output_router_logits", False)
        return installed.forward(*args, **kwargs)
    head = _head_of(self)
    if not all(_MARK in part.__dict__ for part in head_parts(head)):
        raise ModelError(f"the head of {type(self).__name__} was changed after install_head; call install_head again")
    inputs, backbone = backbone_inputs(kwargs), backbone_of(self)
    routing = {} if head_request.routing is None else {"output_router_logits": True}
    with direct_lookups(head_request.promised_scale is not None):
        outputs = backbone(*args, **inputs, **routing, use_cache=False)
    answer = head(outputs[0], head_request=head_request) if head_request.logprobs else {}
    if head_request.values:
        answer["values"] = _values(self, head_request, States(outputs[0], backbone, args, inputs))
    if head_request.routing is not None:
        answer["routing"] = routing_sums(outputs.router_logits, head_request.routing)
    return answer


def _values(causal: Any, request: HeadRequest, states: States) -> Tensor:
    """The critic's values, formed in the policy's forward."""
    critic = critic_of(causal)
    if critic is None:
        raise ModelError(f"{type(causal).__name__} has no critic, so it gives no values; PPOTrainer attaches one")
    return critic(states, request.positions_T, request.values_gradient)


def backbone_inputs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What of a model's keywords is its backbone's; wrappers pass arguments on as None that not every backbone knows."""
    return {name: value for name, value in kwargs.items() if value is not None and name not in _NOT_FOR_BACKBONE}


def _embedding_forward(self: Any, input: Tensor) -> Tensor:
    return lookup(self, input) if looks_up_directly(self) else installed_on(self).forward(input)


def _head_forward(self: Any, hidden: Tensor, *args: Any, head_request: HeadRequest | None = None, **kwargs: Any) -> Any:
    installed = installed_on(self)
    if head_request is None:
        if installed.in_fp32:
            return fp32_product(self, hidden)
        if is_linear(self):
            return linear(hidden, self.weight, self.bias)
        return installed.forward(hidden, *args, **kwargs)
    hidden_TD = at_positions(hidden, head_request.positions_T)  # prompts and padding never reach the head
    if not installed.in_fp32:
        return _answer(self, installed, hidden_TD, head_request)
    with no_autocast(hidden.device):
        return _answer(self, installed, hidden_TD.float(), head_request)


def _answer(module: Any, installed: Installed, hidden_TD: Tensor, request: HeadRequest) -> dict[str, Tensor]:
    settings = ChunkSettings(
        request.chunk_size,
        request.temperature,
        installed.scale,
        request.entropy,
        request.entropy_grad,
        request.promised_scale,
        torch.empty_like(request.targets_T, dtype=torch.bool) if request.top1 else None,
    )
    targets_T, loss = request.targets_T, None
    if is_linear(module):
        head = (hidden_TD, module.weight, module.bias, targets_T)
        if request.loss is None:
            logprobs_T, entropy_T = chunked_logprobs(*head, settings)
        else:
            loss, logprobs_T, entropy_T = one_visit(*head, request.loss, settings)
    elif request.loss is None:
        logprobs_T, entropy_T = module_logprobs(installed.forward, hidden_TD, targets_T, settings)
    else:
        loss, logprobs_T, entropy_T = module_loss(installed.forward, hidden_TD, targets_T, request.loss, settings)
    answer = {"logprobs": logprobs_T, "entropy": entropy_T, "loss": loss, "top1": settings.is_top1_T}
    return {name: value for name, value in answer.items() if value is not None}


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes hidden @ weight.T + bias from plain tensors, also as FSDP2's subclass of nn.Linear."""
    installed = module.__dict__.get(_MARK)
    hooked = installed.on_instance if installed is not None else "forward" in module.__dict__
    if hooked or type(module).forward is not nn.Linear.forward:
        return False
    weight: Any = module.weight
    # A tensor made of others (quantized, distributed) has products of its own.
    return weight.is_floating_point() and not hasattr(type(weight), "__tensor_flatten__")


def head_parts(head: nn.Module) -> list[nn.Module]:
    """The modules that do the head's work: peft keeps an original and a trained copy, and routes calls to one."""
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        return [head.original_module, *copies.values()]  # type: ignore[list-item]
    return [head]


def replace_forward(module: Any, replacement: Callable[..., Any], scale: HeadScale, in_fp32: bool) -> None:
    """Let `module(...)` call `replacement(module, ...)`, which finds the module's own forward by `installed_on`."""
    if _MARK in module.__dict__:  # renewed; its forward may by now be wrapped by others, so it is left in place
        setattr(module, _MARK, replace(module.__dict__[_MARK], scale=scale, in_fp32=in_fp32))
        return
    original = module.forward
    setattr(module, _MARK, Installed(original, "forward" in module.__dict__, scale, in_fp32))

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, *args, **kwargs)

    # generate() and the Trainer read the signature. Not by `__wrapped__`: accelerate unwraps a forward along it.
    del forward.__wrapped__
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(original)
    signature = signature.replace(parameters=[own, *signature.parameters.values()])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    # A method of the instance: a deep copy gets one that is bound to the copy.
    module.forward = MethodType(forward, module)


def installed_on(module: nn.Module) -> Installed:
    """What `replace_forward` keeps of a module."""
    found: Installed = getattr(module, _MARK)
    return found


def _restore(module: Any) -> None:
    installed = module.__dict__.pop(_MARK, None)
    if installed is None:
        return
    if installed.on_instance:
        module.forward = installed.forward
    else:
        del module.forward
