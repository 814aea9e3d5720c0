"""How rows are laid out, chosen once at the start from what was asked and what the models' attention can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lowpeak.arguments import MemorySettings
from lowpeak.attention import forests_agree, install_attention, uninstall_attention, why_not
from lowpeak.batching import Layout
from lowpeak.errors import ArgumentError
from lowpeak.parallel import is_sharded
from lowpeak.ranks import Ranks

logger = logging.getLogger(__name__)

_WORDS: dict[Layout, str] = {
    "shared": "rows stand one after another without padding, and a prompt is forwarded once for its completions where it pays",
    "rows": "rows stand one after another without padding",
    "padded": "rows are padded side by side",
}


@dataclass(frozen=True)
class LayoutChoice:
    """The layout, the reason where it is not the best there is, and the layouts that could be run instead.

    Policy, old and reference passes have the same: in bf16 their ratios would differ from 1 by the layout alone.
    """

    layout: Layout
    why: str
    possible: tuple[Layout, ...]

    def __str__(self) -> str:
        return f"{_WORDS[self.layout]} ({self.why})"

    def resumed(self, saved: Layout) -> LayoutChoice:
        """The layout that the run had when it was saved, where the arguments and the models still allow it.

        Another one than was chosen is said in the log; a warning where what was saved cannot be had any more.
        """
        if saved == self.layout:
            return self
        if saved not in self.possible:
            logger.warning(
                "In the checkpoint's run %s; in this one not (%s), so numbers may differ in their last bits.",
                _WORDS[saved],
                self.why,
            )
            return self
        found = LayoutChoice(saved, "as the checkpoint's run had it", self.possible)
        logger.info("Layout: %s.", found)
        return found


def choose_layout(settings: MemorySettings, obstacle: str | None) -> LayoutChoice:
    """The layout of a run; `obstacle` is why a model's attention takes no forest, None where it does.

    Raises ArgumentError where the arguments ask for what a model cannot.
    """
    if settings.padding_free is False:
        return LayoutChoice("padded", "padding_free=False", ("padded",))
    asked = [name for name in ("packing", "padding_free", "share_prompt") if getattr(settings, name)]
    if obstacle is not None:
        if asked:
            raise ArgumentError(f"{asked[0]}=True cannot act: {obstacle}; remove it.")
        return LayoutChoice("padded", obstacle, ("padded",))
    padded: tuple[Layout, ...] = () if asked else ("padded",)
    if settings.share_prompt:
        return LayoutChoice("shared", "share_prompt=True, whether it pays or not", ("shared",))
    if settings.share_prompt is False:
        return LayoutChoice("rows", "prompts are not shared", ("rows", *padded))
    return LayoutChoice("shared", "the model's attention can", ("shared", "rows", *padded))


def prepare_layout(
    settings: MemorySettings, models: Sequence[nn.Module], device: torch.device, ranks: Ranks
) -> LayoutChoice:
    """The layout of a run of these models, whose attention is made to take forests; one line in the log says it.

    All ranks have the same: what one of them finds in the way is in everybody's.
    """
    obstacle = None if settings.padding_free is False else _obstacle(models, device, ranks)
    choice = choose_layout(settings, obstacle)
    logger.log(logging.WARNING if obstacle else logging.INFO, "%s", f"Layout: {choice}.")
    return choice


def _obstacle(models: Sequence[nn.Module], device: torch.device, ranks: Ranks) -> str | None:
    """Why one of the models takes no forest on some rank, all left as they were; None where all do, shown on a few tokens."""

    def first_of(reason_of: Callable[[nn.Module], str | None]) -> str | None:
        # Of every model, also where one has a reason: what is sharded asks all ranks, and not all find the same.
        reasons = ranks.gathered(lambda: next(filter(None, [reason_of(model) for model in models]), None))
        return next(filter(None, reasons), None)

    found = first_of(why_not)
    if found is not None:
        return found
    for model in models:
        install_attention(model)
    found = first_of(lambda model: forests_agree(model, device, now_on(model, device)))
    if found is not None:
        for model in models:
            uninstall_attention(model)
    return found


def now_on(model: nn.Module, device: torch.device) -> torch.device:
    """Where a model runs before training begins: on the device, but for a policy that waits on the host until FSDP2 cuts it."""
    if is_sharded(model) or any(p.device.type == device.type for p in model.parameters()):
        return device
    return next(model.parameters()).device
