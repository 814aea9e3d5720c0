"""A causal LM's head that returns log-probs from inside the model's single forward.

`install_head` adds the keyword `head_request` to a transformers causal LM. With a request the backbone runs, and `lm_head`
is called as a module with the hidden states. Wrappers of the model (DDP's reducer, FSDP2's and ZeRO-3's hooks) thus see an
ordinary forward with ordinary outputs; a call of the head outside of it would get unaveraged or mismatched gradients.
Without a request both forwards are unchanged, except that a mixture of experts adds no load-balancing loss, and that a plain
head without gradients, as in generation, has logits in fp32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.errors import ModelError
from lowpeak.heads.experts import RoutingRequest, routing_sums
from lowpeak.heads.unwrap import transformers_model
from lowpeak.heads.value_heads import CriticInputs, critic_of
from lowpeak.logprobs import (
    ChunkSettings,
    HeadScale,
    TeacherHead,
    TokenLoss,
    allows_inplace_embedding,
    chunked_logprobs,
    fp32_linear,
    fused_loss,
    head_scale,
    inplace_embedding_grads,
    inplace_grad_embedding,
    linear,
    module_logprobs,
    module_loss,
    no_autocast,
    select_positions,
    wide_linear,
)

# Keywords of a causal LM's forward that its backbone does not take, or that a request decides.
_NOT_FOR_BACKBONE = (
    "labels",
    "logits_to_keep",
    "return_dict",
    "use_cache",
    "num_items_in_batch",
    "output_router_logits",
)
_STATE = "_lowpeak_head"


@dataclass(frozen=True)
class SameHeadStates:
    """States of a teacher whose head is the one that answers the request: the model itself, or its base.

    `with_adapters`: the teacher has the model's adapters.
    """

    states_TE: Tensor
    num_ids: int | None = None
    with_adapters: bool = False


Teaching = TeacherHead | SameHeadStates


@dataclass(frozen=True)
class HeadRequest:
    """A request for log-probs of T targets at T positions of the flattened [B*L] hidden states.

    The model's answer is a dict of tensors, each in it only if requested:

    - "logprobs" [T] (with `logprobs`), and with `entropy` "entropy" [T], through which gradients flow with `entropy_grad`.
    - "loss", a differentiable scalar, with `loss(logprobs_C, entropy_C, start, stop)`, the summed loss of tokens
      [start, stop); log-probs, entropies and divergences are then detached.
    - "divergence" [T] from a `teacher`, whose kind is `beta`'s (see `naive_divergence`); `loss` gets it as a fifth argument;
      and "teacher_logprobs" [T] of the targets, -inf of ids that are not compared.
    - "states" [T, D], with `states`: the hidden states that the head reads, from which `teacher_head` makes a teacher.
    - "top1", bool [T], with `top1`: True if no id is likelier than the target (ties are True).
    - "values" [T] of the critic, with `values`; `values_gradient` is the share of their gradient that reaches a backbone
      that the critic shares with the policy.
    - "routing" [2, E] of a mixture of experts, with `routing`; see `routing_sums`.

    `inplace_grad_scale` is the factor by which backward will multiply the loss. With it a plain head and plain embeddings
    add their gradients to `.grad` themselves (see `inplace_grad.py`); set it only if nothing must see them before that.
    """

    positions_T: Tensor
    targets_T: Tensor
    temperature: float
    chunk_size: int
    entropy: bool = False
    entropy_grad: bool = False
    loss: TokenLoss | None = None
    inplace_grad_scale: float | None = None
    values: bool = False
    logprobs: bool = True
    values_gradient: float = 1.0
    top1: bool = False
    routing: RoutingRequest | None = None
    teacher: Teaching | None = None
    beta: float = 1.0
    states: bool = False


@dataclass(frozen=True)
class PatchedForward:
    """State of a module whose forward was replaced; its bound methods follow the module through `copy.deepcopy`."""

    original: Callable[..., Any]
    on_instance: bool  # whether the instance itself had a forward, as accelerate sets it
    scale: HeadScale
    in_fp32: bool


def install_head(model: nn.Module, *, cast_head_to_fp32: bool = False) -> nn.Module:
    """Let a causal LM, plain or under peft, answer `model(..., head_request=HeadRequest(...))`; return the model.

    Install again after adding adapters to the head. `cast_head_to_fp32` computes the head's product in fp32, with and
    without a request. Raises ModelError for a model without a backbone followed by a head.
    """
    causal = causal_lm(model)
    backbone_of(causal)
    head, scale = _head_of(causal), head_scale(causal.config)
    patched = head_modules(head)
    # A former head that an adapter has wrapped since is a plain layer of the new head.
    for module in head.modules():
        if module not in patched:
            _restore_forward(module)
    for module in patched:
        if cast_head_to_fp32 and not is_linear(module):
            raise ModelError(
                f"cast_lm_head_to_fp32 needs a plain linear head, and {type(causal).__name__}'s is "
                f"{type(module).__module__}.{type(module).__name__}; leave it off, or keep adapters and "
                "quantization away from the head"
            )
        patch_forward(module, _head_forward, scale, cast_head_to_fp32)
        # For generation with a sharded head, which computes the logits instead.
        setattr(module, "computes_in_fp32", cast_head_to_fp32)  # noqa: B010
    embeddings = causal.get_input_embeddings()
    if type(embeddings) is nn.Embedding and (_STATE in embeddings.__dict__ or "forward" not in embeddings.__dict__):
        patch_forward(embeddings, _embedding_forward, scale, in_fp32=False)
    patch_forward(causal, _causal_forward, scale, cast_head_to_fp32)
    return model


def causal_lm(model: Any) -> Any:
    """Return the transformers causal LM inside DDP's and peft's wrappers, if any; raise ModelError if there is none."""
    while not hasattr(model, "get_output_embeddings") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    inner = transformers_model(model)
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "config"):
        raise ModelError(
            f"{type(inner).__name__} is not a transformers causal language model; load the model with AutoModelForCausalLM"
        )
    if getattr(inner.config, "is_encoder_decoder", False):
        raise ModelError(f"{type(inner).__name__} is an encoder-decoder model; only causal language models can be used")
    return inner


def backbone_of(causal: Any) -> nn.Module:
    """Return the module that computes the hidden states that the head reads."""
    for backbone in (causal.base_model, causal.get_decoder(), getattr(causal, "model", None)):
        if isinstance(backbone, nn.Module) and backbone is not causal:
            return backbone
    raise ModelError(
        f"{type(causal).__name__} has no separate backbone (base_model_prefix, get_decoder(), model) below its head, so "
        "lowpeak cannot compute log-probs from its hidden states; use a model with a separate backbone and head"
    )


def _head_of(causal: Any) -> nn.Module:
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ModelError(
            f"{type(causal).__name__} has no output head (get_output_embeddings() returned none); load the "
            "model with AutoModelForCausalLM"
        )
    return head


def _causal_forward(self: Any, *args: Any, head_request: HeadRequest | None = None, **kwargs: Any) -> Any:
    if head_request is None:
        return _forward_without_request(self, args, kwargs)
    head = _head_of(self)
    if not all(_STATE in module.__dict__ for module in head_modules(head)):
        raise ModelError(f"the head of {type(self).__name__} was changed after install_head; call install_head again")
    inputs, backbone = backbone_kwargs(kwargs), backbone_of(self)
    routing = {} if head_request.routing is None else {"output_router_logits": True}
    with inplace_embedding_grads(head_request.inplace_grad_scale is not None):
        outputs = backbone(*args, **inputs, **routing, use_cache=False)
    answer = head(outputs[0], head_request=head_request) if head_request.logprobs else {}
    if head_request.states:
        answer["states"] = select_positions(outputs[0], head_request.positions_T)
    if head_request.values:
        answer["values"] = _values(self, head_request, CriticInputs(outputs[0], backbone, args, inputs))
    if head_request.routing is not None:
        answer["routing"] = routing_sums(outputs.router_logits, head_request.routing)
    return answer


def _forward_without_request(causal: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the output of the model's own forward; for a forest its backbone's alone."""
    if kwargs.get("forest") is not None:  # not all families pass it on
        return backbone_of(causal)(*args, **backbone_kwargs(kwargs), use_cache=False)
    if getattr(causal.config.get_text_config(), "output_router_logits", False):
        # transformers' load-balancing loss needs a mask of this call's tokens; with a cache it gets one of all tokens.
        kwargs.setdefault("output_router_logits", False)
    return patched_forward(causal).original(*args, **kwargs)


def _values(causal: nn.Module, request: HeadRequest, states: CriticInputs) -> Tensor:
    """Return the critic's values, computed in the policy's forward: [T]."""
    critic = critic_of(causal)
    if critic is None:
        raise ModelError(f"{type(causal).__name__} has no critic, so it cannot return values; PPOTrainer attaches one")
    return critic(states, request.positions_T, request.values_gradient)


def backbone_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a model's forward that its backbone takes, without None.

    Wrappers pass unused arguments on as None, and not every backbone knows them.
    """
    return {name: value for name, value in kwargs.items() if value is not None and name not in _NOT_FOR_BACKBONE}


def _embedding_forward(self: Any, input: Tensor) -> Tensor:
    if allows_inplace_embedding(self):
        return inplace_grad_embedding(self, input)
    return patched_forward(self).original(input)


def _head_forward(self: Any, hidden: Tensor, *args: Any, head_request: HeadRequest | None = None, **kwargs: Any) -> Any:
    patch = patched_forward(self)
    if head_request is None:
        if patch.in_fp32:
            return fp32_linear(self, hidden)
        if is_linear(self):
            # With gradients the logits keep the dtype of `nn.Linear`. Without, as in generation, they are fp32, so that
            # sampled log-probs are not rounded to bf16.
            product = linear if torch.is_grad_enabled() else wide_linear
            return product(hidden, self.weight, self.bias)
        return patch.original(hidden, *args, **kwargs)
    # Only the requested positions reach the head: no prompts, no padding.
    hidden_TD = select_positions(hidden, head_request.positions_T)
    if not patch.in_fp32:
        return _answer(self, patch, hidden_TD, head_request)
    with no_autocast(hidden.device):
        return _answer(self, patch, hidden_TD.float(), head_request)


def _answer(module: Any, patch: PatchedForward, hidden_TD: Tensor, request: HeadRequest) -> dict[str, Tensor]:
    teacher, logprobs_T = request.teacher, None
    if isinstance(teacher, SameHeadStates):
        head = module if teacher.with_adapters else _without_adapters(module)
        teacher = _teacher_of(head, patch.scale, teacher.states_TE, teacher.num_ids)
    if teacher is not None:
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        logprobs_T = hidden_TD.new_empty(len(request.targets_T), dtype=wide)
    settings = ChunkSettings(
        request.chunk_size,
        request.temperature,
        patch.scale,
        request.entropy,
        request.entropy_grad,
        request.inplace_grad_scale,
        torch.empty_like(request.targets_T, dtype=torch.bool) if request.top1 else None,
        teacher,
        request.beta,
        logprobs_T,
    )
    targets_T, loss = request.targets_T, None
    values: Sequence[Tensor | None]
    if is_linear(module):
        head = (hidden_TD, module.weight, module.bias, targets_T)
        if request.loss is None:
            values = chunked_logprobs(*head, settings)
        else:
            loss, *values = fused_loss(*head, request.loss, settings)
    elif request.loss is None:
        values = module_logprobs(patch.original, hidden_TD, targets_T, settings)
    else:
        loss, *values = module_loss(patch.original, hidden_TD, targets_T, request.loss, settings)
    answer = dict(zip(("logprobs", "entropy", "divergence"), values, strict=True))
    answer |= {"loss": loss, "top1": settings.is_top1_T, "teacher_logprobs": logprobs_T}
    return {name: value for name, value in answer.items() if value is not None}


def teacher_head(model: Any, states_TE: Tensor, num_ids: int | None = None) -> TeacherHead:
    """Return `HeadRequest.teacher` from a model that `install_head` patched, and its "states".

    `num_ids` bounds the ids that are compared. Within peft's `disable_adapter` it is the base's head; an adapter on the head
    that is active acts as it does when the head is used.
    """
    module: Any = _head_of(causal_lm(model))
    if getattr(module, "disable_adapters", False):
        module = _without_adapters(module)
    return _teacher_of(module, head_scale(causal_lm(model).config), states_TE, num_ids)


def _without_adapters(module: Any) -> Any:
    """Return the head below adapters, or the original one beside its trained copies; a plain head itself."""
    return getattr(module, "original_module", None) or getattr(module, "base_layer", module)


def _teacher_of(module: Any, scale: HeadScale, states_TE: Tensor, num_ids: int | None) -> TeacherHead:
    if _STATE in module.__dict__ and patched_forward(module).in_fp32:
        states_TE = states_TE.float()
    if is_linear(module):
        weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
        return TeacherHead(states_TE, weight, bias, scale, num_ids)
    return TeacherHead(states_TE, module, None, scale, min(num_ids or module.out_features, module.out_features))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes hidden @ weight.T + bias of plain tensors; FSDP2's subclass of nn.Linear does."""
    patch = module.__dict__.get(_STATE)
    is_replaced = patch.on_instance if patch is not None else "forward" in module.__dict__
    if is_replaced or type(module).forward is not nn.Linear.forward:
        return False
    weight: Any = module.weight
    # Quantized and distributed tensors, which wrap others, define their products themselves.
    return weight.is_floating_point() and not hasattr(type(weight), "__tensor_flatten__")


def head_modules(head: nn.Module) -> list[nn.Module]:
    """Return the modules that compute the head: under peft's `modules_to_save` the original and its trained copies."""
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        return [head.original_module, *copies.values()]  # type: ignore[list-item]
    return [head]


def patch_forward(module: nn.Module, replacement: Callable[..., Any], scale: HeadScale, in_fp32: bool) -> None:
    """Let `module(...)` call `replacement(module, ...)`; `patched_forward(module).original` is the forward before."""
    # Installed before: other libraries may have wrapped the forward since, so only the settings change.
    if _STATE in module.__dict__:
        setattr(module, _STATE, replace(module.__dict__[_STATE], scale=scale, in_fp32=in_fp32))
        return
    original = module.forward
    setattr(module, _STATE, PatchedForward(original, "forward" in module.__dict__, scale, in_fp32))

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, *args, **kwargs)

    # generate() and the Trainer read the signature. It cannot come from `__wrapped__`, along which accelerate unwraps forwards.
    del forward.__wrapped__
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(original)
    signature = signature.replace(parameters=[first, *signature.parameters.values()])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    # A bound method: a deep copy of the module gets one that is bound to the copy.
    module.forward = MethodType(forward, module)


def patched_forward(module: nn.Module) -> PatchedForward:
    """Return the state that `patch_forward` stored on a module."""
    patch: PatchedForward = getattr(module, _STATE)
    return patch


def _restore_forward(module: nn.Module) -> None:
    patch = module.__dict__.pop(_STATE, None)
    if patch is None:
        return
    if patch.on_instance:
        module.forward = patch.original
    else:
        del module.forward
