"""PPO's critic as a part of the policy's module: accelerate prepares one module, and one forward returns log-probs and values.

Three layouts:
1. `SharedCritic`: a value head on the policy's hidden states. One forward, almost no memory.
2. `AdapterCritic`: a value head on the same frozen base under a separate LoRA adapter. Two forwards through one base.
3. `SeparateCritic`: a sequence classifier with one label and a separate backbone.

The critic's parameters have "critic" in their names (a module's or an adapter's name), by which engines, exports and generation
leave them out (`belongs_to_critic`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoTokenizer

from lowpeak.errors import ArgumentError, ModelError
from lowpeak.heads.unwrap import num_embeddings
from lowpeak.logprobs import fp32_linear, select_positions

CRITIC = "critic"
# The keyword argument of a layer that runs for the critic; activation checkpointing passes it again in its recomputation.
_CRITIC_KEYWORD = "for_critic"


@dataclass(frozen=True)
class CriticInputs:
    """The critic's inputs: the policy's hidden states [B, L, D], its backbone, and the arguments of the backbone's call."""

    hidden_BLD: Tensor
    backbone: Callable[..., Any]
    args: tuple[Any, ...]
    inputs: Mapping[str, Any]


class ValueHead(nn.Linear):
    """A value head: `hidden @ weight.T` for hidden states [..., D], in fp32 even under autocast; initialised to 0."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, 1, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return fp32_linear(self, hidden)


class SharedCritic(nn.Module):
    """Values [T] = `score(policy's hidden states)`; `gradient` is the fraction of their gradient that reaches the policy."""

    def __init__(self, score: ValueHead) -> None:
        super().__init__()
        self.score = score

    def forward(self, states: CriticInputs, positions_T: Tensor, gradient: float) -> Tensor:
        return self.score(_scale_gradient(select_positions(states.hidden_BLD, positions_T), gradient))[:, 0]


class AdapterCritic(nn.Module):
    """Values = `score(hidden states of the base under the adapter "critic")`; ModelError if layers cannot switch adapters."""

    def __init__(self, score: ValueHead) -> None:
        super().__init__()
        self.score = score
        self.switches: list[_AdapterSwitch] = []

    def forward(self, states: CriticInputs, positions_T: Tensor, gradient: float) -> Tensor:
        before = [switch.calls for switch in self.switches]
        outputs = states.backbone(*states.args, **states.inputs, **{_CRITIC_KEYWORD: True}, use_cache=False)
        if any(switch.calls == calls for switch, calls in zip(self.switches, before, strict=True)):
            raise ModelError(
                f"{type(states.backbone).__name__} does not pass keyword arguments on to its layers, so they cannot run under the "
                "critic's adapter: use critic='head' or critic='model'."
            )
        return self.score(select_positions(outputs[0], positions_T))[:, 0]


class SeparateCritic(nn.Module):
    """Values = the classifier's `score(backbone(ids))`, of a transformers sequence classifier with one label."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, states: CriticInputs, positions_T: Tensor, gradient: float) -> Tensor:
        outputs = self.classifier.base_model(*states.args, **states.inputs, use_cache=False)
        return self.classifier.score(select_positions(outputs[0], positions_T))[:, 0]


def add_critic(causal: nn.Module, critic: nn.Module) -> None:
    """Add a critic to a causal LM, replacing an earlier one."""
    causal.add_module(CRITIC, critic)
    classifier = getattr(critic, "classifier", None)
    if classifier is not None:
        # FSDP then shards the classifier's layers one by one, as it does the policy's.
        both = [*(getattr(causal, "_no_split_modules", None) or ()), *(classifier._no_split_modules or ())]
        setattr(causal, "_no_split_modules", list(dict.fromkeys(both)))  # noqa: B010


def critic_of(causal: nn.Module) -> nn.Module | None:
    """Return the critic of a causal LM, if it has one."""
    return causal._modules.get(CRITIC)


def critic_classifier(causal: nn.Module) -> nn.Module | None:
    """Return the critic's classifier, if it has a separate backbone."""
    return getattr(critic_of(causal), "classifier", None)


def remove_critic(causal: nn.Module) -> None:
    """Remove the critic, if there is one; its adapter stays in the layers, inactive."""
    critic = causal._modules.pop(CRITIC, None)
    for switch in getattr(critic, "switches", ()):
        switch.remove()


@contextmanager
def without_critic(causal: nn.Module) -> Iterator[None]:
    """Take the critic out of the model for a block that changes modules by name: its backbone has layers of the same names."""
    critic = causal._modules.pop(CRITIC, None)
    try:
        yield
    finally:
        if critic is not None:
            causal.add_module(CRITIC, critic)


@contextmanager
def keep_critic_trainable(policy: nn.Module) -> Iterator[None]:
    """Keep the critic trainable over a block that switches adapters: peft freezes inactive adapters, the critic's among them."""
    try:
        yield
    finally:
        for name, parameter in policy.named_parameters():
            if belongs_to_critic(name):
                parameter.requires_grad_(True)


def belongs_to_critic(name: str) -> bool:
    """Return whether a parameter or module belongs to the critic, by its name."""
    return CRITIC in name.split(".")


def modules_without_critic(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model without its critic's; for a critic itself, all of its modules."""
    return [module for name, module in model.named_modules() if not belongs_to_critic(name)]


def install_adapter_switches(critic: AdapterCritic, layers: Iterable[nn.Module]) -> None:
    """Make each layer run under the adapter "critic" alone whenever the critic calls it."""
    # Switch per layer: activation checkpointing reruns a layer in the backward, outside of a switch around the whole forward.
    for layer in layers:
        switch = _AdapterSwitch([part for part in layer.modules() if hasattr(part, "lora_A")])
        critic.switches.append(switch)
        switch.hooks = [
            layer.register_forward_pre_hook(switch.before, with_kwargs=True),
            layer.register_forward_hook(switch.after, always_call=True),
        ]


class _AdapterSwitch:
    """The hooks that activate the critic's adapter while a layer runs, or reruns, for the critic.

    In some versions of transformers checkpointing reruns a layer's forward without the hooks around it, so the function passed to
    checkpointing includes the switch.
    """

    def __init__(self, parts: list[Any]) -> None:
        self.parts, self.calls = parts, 0
        self.inside = ExitStack()
        self.hooks: list[RemovableHandle] = []

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def before(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.pop(_CRITIC_KEYWORD, False):
            self.calls += 1
            self.inside.enter_context(_under_critic(self.parts))
            checkpointing = getattr(layer, "_gradient_checkpointing_func", None)
            if checkpointing is not None:
                self.inside.callback(setattr, layer, "_gradient_checkpointing_func", checkpointing)
                setattr(layer, "_gradient_checkpointing_func", partial(self._checkpointed, checkpointing))  # noqa: B010
        return args, kwargs

    def after(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.inside.close()

    def _checkpointed(self, checkpointing: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        return checkpointing(partial(_run_under_critic, self.parts, function), *args)


def _run_under_critic(parts: list[Any], function: Callable[..., Any], *args: Any) -> Any:
    with _under_critic(parts):
        return function(*args)


@contextmanager
def _under_critic(parts: list[Any]) -> Iterator[None]:
    before = [part._active_adapter for part in parts]
    try:
        for part in parts:
            part._active_adapter = [CRITIC]
        yield
    finally:
        for part, adapters in zip(parts, before, strict=True):
            part._active_adapter = adapters


def _scale_gradient(hidden: Tensor, gradient: float) -> Tensor:
    """Return `hidden` with its gradient multiplied by `gradient`."""
    if gradient == 1.0:
        return hidden
    return hidden.detach() if gradient == 0.0 else hidden.detach() + gradient * (hidden - hidden.detach())


def check_embedded_tokens(name: str, model: nn.Module, policy: nn.Module, tokenizer: Any, remedy: str) -> None:
    """Raise ArgumentError if `model` embeds fewer tokens than the policy can generate."""
    # Padding rows of embeddings differ between models and are ignored.
    num_known, num_generated = num_embeddings(model), num_embeddings(policy)
    needed = len(tokenizer) if num_generated is None else min(len(tokenizer), num_generated)
    if num_known is not None and num_known < needed:
        raise ArgumentError(
            f"{name} embeds {num_known} tokens and the policy's tokenizer has {needed}, but {name} reads the policy's tokens: "
            f"{remedy}."
        )


def check_critic_vocabulary(critic: nn.Module, policy: nn.Module, tokenizer: Any) -> None:
    """Raise ArgumentError if the policy can generate a token that the critic lacks or reads differently."""
    remedy = "use a classifier with the same tokenizer, or remove value_model and value_model_path"
    check_embedded_tokens("the critic", critic, policy, tokenizer, remedy)
    critic_vocabulary, vocabulary = _critic_vocabulary(critic, policy), tokenizer.get_vocab()
    other = min(
        (token for token, id_ in vocabulary.items() if critic_vocabulary.get(token, id_) != id_),
        key=vocabulary.get,
        default=None,
    )
    if other is not None:
        raise ArgumentError(
            f"the critic's tokenizer has {other!r} as token {critic_vocabulary[other]} and the policy's as {vocabulary[other]}, "
            "but the critic reads the policy's tokens: use a classifier with the same tokenizer, or remove value_model and "
            "value_model_path."
        )


def _critic_vocabulary(critic: nn.Module, policy: nn.Module) -> dict[str, int]:
    """Return the vocabulary of the critic's checkpoint; empty if it has no tokenizer, or is the policy's checkpoint."""
    origin, policy_origin = (
        str(getattr(getattr(model, "config", None), "_name_or_path", "")) for model in (critic, policy)
    )
    if origin in ("", policy_origin):
        return {}
    try:
        return dict(AutoTokenizer.from_pretrained(origin).get_vocab())
    except Exception:  # transformers and tokenizers raise any class for a missing tokenizer
        return {}
