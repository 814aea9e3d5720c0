"""The teacher of distillation: how it is loaded, and which ids it shares with the policy."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from lowpeak.arguments import ModelSettings, TeacherSettings, check_teacher_kind, refuse_teacher_under_tp, require
from lowpeak.errors import ArgumentError, LowpeakError
from lowpeak.heads import causal_lm, is_peft, num_embeddings
from lowpeak.models import load_reference, load_tokenizer

logger = logging.getLogger(__name__)


def load_teacher(
    policy: nn.Module, origin: Any, given: Any, teacher: TeacherSettings, settings: ModelSettings, **placed: Any
) -> nn.Module | None:
    """Return the teacher as a separate model; None for the policy itself, or its base without an adapter.

    `origin` and `given` are the user's model and teacher. A name is loaded in the checkpoint's dtype, unless the arguments of
    loading have another; `placed` are those of `load_reference`.
    """
    require(
        given is None or teacher.name is None,
        "teacher_model and teacher_model_name_or_path both name a teacher: pass one.",
    )
    refuse_teacher_under_tp(placed["model_parallel"].tensor)
    model = teacher.name if given is None else given
    require(
        not teacher.loading or isinstance(model, str),
        "teacher_model_init_kwargs and teacher_model_revision load a teacher by name or path: pass one as teacher_model.",
    )
    require(
        isinstance(model, str) or model is not origin,
        "teacher_model is the model itself, which training changes: pass a copy of it, or teacher_model_kind.",
    )
    check_teacher_kind(teacher, is_peft(policy), has_model=model is not None)
    if model is None and (teacher.kind == "live" or is_peft(policy)):
        return None
    kwargs = settings.model_init_kwargs if model is None else teacher.loading
    plain = replace(settings, model_init_kwargs=kwargs, storage=None, adapter_storage=None, keeps_bf16=False)
    return load_reference(policy, origin, plain, model, **placed)


def shared_ids(
    policy: nn.Module, tokenizer: Any, teacher: nn.Module | None, origin: Any, settings: ModelSettings
) -> int:
    """Return K: policy and teacher have the same tokens for the ids below K, and heads with at least K rows.

    ArgumentError if their tokenizers differ there. A teacher without a tokenizer that can be loaded is taken to have the policy's.
    """
    if teacher is None:
        return len(tokenizer)
    rows = [number for number in map(num_embeddings, (policy, teacher)) if number is not None]
    _warn_of_end_tokens(policy, teacher)
    name = origin if isinstance(origin, str) else getattr(causal_lm(teacher).config, "_name_or_path", "")
    try:
        other = load_tokenizer(None, name, settings.trust_remote_code) if name else None
    except (LowpeakError, OSError, ValueError):
        other = None
    if other is None:
        logger.warning("The teacher's tokenizer cannot be loaded from %r: it is taken to be the policy's.", name)
        return min(*rows, len(tokenizer))
    num_ids = min(*rows, len(tokenizer), len(other))
    ids = list(range(num_ids))
    pairs = zip(tokenizer.convert_ids_to_tokens(ids), other.convert_ids_to_tokens(ids), strict=True)
    different = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
    if different:
        number, own, others = different[0]
        raise ArgumentError(
            f"the teacher {name} has another tokenizer than the policy: id {number} is {others!r} there and {own!r} here, and so "
            f"are {len(different)} of {num_ids} ids. Divergences compare the same ids: use a teacher with the policy's tokenizer."
        )
    return num_ids


def _warn_of_end_tokens(policy: nn.Module, teacher: nn.Module) -> None:
    own, others = (_end_tokens(model) for model in (policy, teacher))
    if own and others and own.isdisjoint(others):
        logger.warning(
            "The teacher ends its answers with the ids %s and the policy with %s: completions may grow without end. Train the "
            "policy on the teacher's format first (SFT), or use a teacher with the same end token.",
            *(sorted(others), sorted(own)),
        )


def _end_tokens(model: nn.Module) -> set[int]:
    causal = causal_lm(model)
    found: Any = getattr(causal.generation_config or causal.config, "eos_token_id", None)
    return set(found if isinstance(found, list) else [] if found is None else [found])
