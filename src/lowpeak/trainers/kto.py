"""KTO (Ethayarajh et al. 2024, arXiv 2402.01306): the loss of labelled completions relative to a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from lowpeak.algorithms import Algorithm, make_kto
from lowpeak.arguments import PreferenceSettings, resolve_kto
from lowpeak.data import LabelReader, check_label_columns, unpair
from lowpeak.memory import Phase
from lowpeak.records import Metric, Record
from lowpeak.trainers.configs import CommonConfig, KTOConfig
from lowpeak.trainers.preferences import PreferenceTrainer, is_desirable
from lowpeak.training import score_records


class KTOTrainer(PreferenceTrainer):
    """Kahneman-Tversky optimisation on rows with `prompt`, `completion` and `label`, with TRL's constructor.

    from lowpeak import KTOConfig, KTOTrainer

    KTOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", args=KTOConfig(output_dir="out"), train_dataset=data).train()

    Rows with `chosen` and `rejected` become two rows each. The reference is `ref_model`, or the untrained model, or the policy
    with its adapter off.
    """

    config_class: ClassVar[type[CommonConfig]] = KTOConfig
    columns: ClassVar[str] = "prompt, completion and label, or chosen and rejected"

    @staticmethod
    def resolve(args: Any) -> PreferenceSettings:
        return resolve_kto(args)

    @staticmethod
    def make_algorithm(settings: PreferenceSettings) -> Algorithm:
        return make_kto(settings.objective)

    def _build(self, strategy: Any, train_dataset: Any, eval_dataset: Any) -> None:
        several = isinstance(eval_dataset, dict)
        evaluated = {name: unpair(each) for name, each in eval_dataset.items()} if several else unpair(eval_dataset)
        super()._build(strategy, unpair(train_dataset), evaluated)

    def make_reader(self) -> LabelReader:
        return LabelReader(self.parts.tokenizer, **self.reader_settings())

    def check_row(self, row: Any, where: str, settings: PreferenceSettings) -> None:
        super().check_row(row, where, settings)
        check_label_columns(row, where)

    def with_scores(self, records: Sequence[Record], phase: Phase) -> tuple[Sequence[Record], dict[str, Metric]]:
        if not self.parts.settings.objective.estimates_kl:
            scored, metrics = super().with_scores(records, phase)
            return _with_kl(_with_label_shares(scored), 0.0), metrics
        records = _with_label_shares(records)
        limit = self.reader.max_length
        # The reference scores a prompt's two completions together, so the prompt is forwarded once.
        mismatched = [
            _with_completion_of(one, other, limit) for one, other in zip(records, _rotate(records), strict=True)
        ]
        both, metrics = super().with_scores([*records, *mismatched], phase)
        of_policy, _ = score_records(self, tuple(mismatched), frozenset({"old"}), phase)
        kl = sum(map(_log_ratio, of_policy, both[len(records) :])) / len(records)
        return _with_kl(both[: len(records)], max(0.0, kl)), metrics


def _rotate(records: Sequence[Record]) -> list[Record]:
    return [records[-1], *records[:-1]]


def _with_completion_of(record: Record, other: Record, limit: int | None) -> Record:
    """Return the record with the completion of another, truncated to `limit` tokens of both together."""
    length = None if limit is None else limit - len(record.prompt_ids)
    completion = other.completion
    cut = replace(
        completion,
        ids=completion.ids[:length],
        logprobs=completion.logprobs[:length],
        loss_mask=completion.loss_mask[:length],
    )
    return replace(record, completion=cut, advantages=torch.zeros(len(cut)))


def _log_ratio(of_policy: Record, of_reference: Record) -> float:
    assert of_policy.old is not None
    assert of_reference.reference is not None
    return float((of_policy.old.double() - of_reference.reference.double()).sum())


def _with_label_shares(records: Sequence[Record]) -> list[Record]:
    """Return the records with advantages of +1 / (desirable ones) or -1 / (undesirable ones)."""
    signs = [1.0 if is_desirable(record) else -1.0 for record in records]
    shares = [sign / signs.count(sign) for sign in signs]
    return [replace(r, advantages=torch.full((len(r.completion),), x)) for r, x in zip(records, shares, strict=True)]


def _with_kl(records: Sequence[Record], kl: float) -> list[Record]:
    return [replace(record, returns=torch.full((len(record.completion),), kl)) for record in records]
