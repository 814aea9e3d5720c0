"""PPO's critic as a part of the policy's module: one module is prepared, and one forward gives log-probs and values.

Three layouts:
1. `SharedCritic`: a value head on the policy's hidden states. One forward, no memory to speak of.
2. `AdapterCritic`: a value head on the same frozen base under a LoRA adapter of its own. Two forwards through one base.
3. `OwnCritic`: a classifier with one label and a backbone of its own.

What belongs to the critic is under the name "critic" somewhere in a parameter's name (a module, or an adapter): so what
leaves for engines, exports and generation leaves it out (`is_critics`).
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
from lowpeak.logprobs import at_positions, fp32_product
from lowpeak.models.unwrap import num_embeddings

CRITIC = "critic"
# The keyword with which a layer is told that it runs for the critic; activation checkpointing keeps it for its recomputation.
_FOR_CRITIC = "for_critic"


@dataclass(frozen=True)
class States:
    """What values are formed from: the policy's hidden states [B, L, D], and how its backbone was called for them."""

    hidden_BLD: Tensor
    backbone: Callable[..., Any]
    args: tuple[Any, ...]
    inputs: Mapping[str, Any]


class Score(nn.Linear):
    """One number for a hidden state [..., D]: `hidden @ weight.T` in fp32 whatever computes around it; it begins at 0."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, 1, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return fp32_product(self, hidden)


class SharedCritic(nn.Module):
    """`score(policy's hidden state)`, values [T]; `gradient` is the share of their gradient that reaches the policy."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score = score

    def forward(self, states: States, positions_T: Tensor, gradient: float) -> Tensor:
        return self.score(_scaled(at_positions(states.hidden_BLD, positions_T), gradient))[:, 0]


class AdapterCritic(nn.Module):
    """`score(hidden state of the base under the adapter "critic")`; ModelError where its layers do not take the adapter."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score = score
        self.switches: list[_Switch] = []

    def forward(self, states: States, positions_T: Tensor, gradient: float) -> Tensor:
        before = [switch.calls for switch in self.switches]
        outputs = states.backbone(*states.args, **states.inputs, **{_FOR_CRITIC: True}, use_cache=False)
        if any(switch.calls == calls for switch, calls in zip(self.switches, before, strict=True)):
            raise ModelError(
                f"{type(states.backbone).__name__} does not pass keywords on to its layers, so none could run under an adapter "
                "of the critic's own; use critic='head' or critic='model'"
            )
        return self.score(at_positions(outputs[0], positions_T))[:, 0]


class OwnCritic(nn.Module):
    """The classifier's own `score(backbone(ids))`, a transformers sequence classifier with one label."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, states: States, positions_T: Tensor, gradient: float) -> Tensor:
        outputs = self.classifier.base_model(*states.args, **states.inputs, use_cache=False)
        return self.classifier.score(at_positions(outputs[0], positions_T))[:, 0]


def attach(causal: nn.Module, critic: nn.Module) -> None:
    """Make `critic` a part of a causal LM, in place of one that it has."""
    causal.add_module(CRITIC, critic)
    own = getattr(critic, "classifier", None)
    if own is not None:  # so that its layers are cut one by one, as the policy's are
        both = [*(getattr(causal, "_no_split_modules", None) or ()), *(own._no_split_modules or ())]
        setattr(causal, "_no_split_modules", list(dict.fromkeys(both)))  # noqa: B010


def critic_of(causal: nn.Module) -> nn.Module | None:
    """Return the critic of a causal LM, if it has one."""
    return causal._modules.get(CRITIC)


def critics_model(causal: nn.Module) -> nn.Module | None:
    """Return the critic's classifier, where it has a separate backbone."""
    return getattr(critic_of(causal), "classifier", None)


def detach(causal: nn.Module) -> None:
    """Take the critic away, where there is one; an adapter of its own stays in the layers, which run without it."""
    critic = causal._modules.pop(CRITIC, None)
    for switch in getattr(critic, "switches", ()):
        switch.remove()


@contextmanager
def without_critic(causal: nn.Module) -> Iterator[None]:
    """Around what changes all modules of the policy: a critic with a backbone of its own has layers of the same names."""
    critic = causal._modules.pop(CRITIC, None)
    try:
        yield
    finally:
        if critic is not None:
            causal.add_module(CRITIC, critic)


@contextmanager
def keeping_critic(policy: nn.Module) -> Iterator[None]:
    """Around what changes which adapters are in use: peft freezes those that are not, and the critic's is still trained."""
    try:
        yield
    finally:
        for name, parameter in policy.named_parameters():
            if is_critics(name):
                parameter.requires_grad_(True)


def is_critics(name: str) -> bool:
    """Return whether a parameter's or module's name says that it is the critic's."""
    return CRITIC in name.split(".")


def own_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model without its critic's; of a critic, all."""
    return [module for name, module in model.named_modules() if not is_critics(name)]


def let_layers_switch(critic: AdapterCritic, layers: Iterable[nn.Module]) -> None:
    """Let each layer run under the adapter "critic" alone where it is called for the critic, and under its own ones else.

    A switch around the whole forward would not be seen by activation checkpointing, which runs a layer again later on.
    """
    for layer in layers:
        switch = _Switch([part for part in layer.modules() if hasattr(part, "lora_A")])
        critic.switches.append(switch)
        switch.hooks = [
            layer.register_forward_pre_hook(switch.before, with_kwargs=True),
            layer.register_forward_hook(switch.after, always_call=True),
        ]


class _Switch:
    """Puts the critic's adapter in force while a layer runs for the critic, and while it is run again for its backward.

    What checkpointing runs again is a layer's forward, in some versions of transformers without the hooks around it: so the
    function that it is given carries the switch.
    """

    def __init__(self, parts: list[Any]) -> None:
        self.parts, self.calls = parts, 0
        self.inside = ExitStack()
        self.hooks: list[RemovableHandle] = []

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def before(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.pop(_FOR_CRITIC, False):
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


def _scaled(hidden: Tensor, gradient: float) -> Tensor:
    """Return the same values, of whose gradient this share goes on."""
    if gradient == 1.0:
        return hidden
    return hidden.detach() if gradient == 0.0 else hidden.detach() + gradient * (hidden - hidden.detach())


def check_reads(critic: nn.Module, policy: nn.Module, tokenizer: Any) -> None:
    """ArgumentError where the policy may write a token that the critic's backbone does not embed.

    Embeddings are often padded beyond the tokenizer's tokens, by different models differently: that much is no difference.
    """
    known, spoken = num_embeddings(critic), num_embeddings(policy)
    needed = len(tokenizer) if spoken is None else min(len(tokenizer), spoken)
    if known is not None and known < needed:
        raise ArgumentError(
            f"the critic embeds {known} tokens and the policy's tokenizer has {needed}: a critic reads the policy's own tokens, "
            "so start it from a classifier with the same tokenizer, or leave value_model and value_model_path out."
        )
    theirs, ours = _vocabulary_beside(critic, policy), tokenizer.get_vocab()
    other = min(
        (word for word, number in ours.items() if theirs.get(word, number) != number), key=ours.get, default=None
    )
    if other is not None:
        raise ArgumentError(
            f"the critic's tokenizer has {other!r} as token {theirs[other]} and the policy's as {ours[other]}: a critic reads the "
            "policy's own tokens, so start it from a classifier with the same tokenizer, or leave value_model and "
            "value_model_path out."
        )


def _vocabulary_beside(critic: nn.Module, policy: nn.Module) -> dict[str, int]:
    """The words of the tokenizer where the critic was loaded from; none where that is the policy's place, or has no tokenizer."""
    origin, own = (str(getattr(getattr(model, "config", None), "_name_or_path", "")) for model in (critic, policy))
    if origin in ("", own):
        return {}
    try:
        return dict(AutoTokenizer.from_pretrained(origin).get_vocab())
    except Exception:  # whatever transformers and tokenizers raise where there is none
        return {}
