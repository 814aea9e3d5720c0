"""What a run asks of a model's head: how it is put in, and how it is compared with the model's own at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowpeak.logprobs.head import install_head
from lowpeak.logprobs.score_head import install_score_head, verify_score_head
from lowpeak.logprobs.verify import verify_head


@dataclass(frozen=True)
class Head:
    """`install(model, cast_head_to_fp32=...)` lets a model take a `HeadRequest`; `verify(model)` raises where it answers wrong."""

    install: Callable[..., Any]
    verify: Callable[[nn.Module], float]


LOGPROBS = Head(install_head, verify_head)
SCORES = Head(install_score_head, verify_score_head)
