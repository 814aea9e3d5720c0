"""DPO (Rafailov et al. 2023, arXiv 2305.18290): the loss of a dataset's pairs relative to a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from lowpeak.algorithms import Algorithm, make_dpo
from lowpeak.arguments import DPOSettings, PreferenceSettings, resolve_dpo
from lowpeak.data import PairReader, check_pair_columns
from lowpeak.memory import Phase
from lowpeak.records import Metric, Record
from lowpeak.trainers.configs import CommonConfig, DPOConfig
from lowpeak.trainers.preferences import PreferenceTrainer


class DPOTrainer(PreferenceTrainer):
    """Direct preference optimisation on rows with `chosen` and `rejected`, with TRL's constructor.

    from lowpeak import DPOConfig, DPOTrainer

    DPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", args=DPOConfig(output_dir="out"), train_dataset=data).train()

    The reference is `ref_model`, or the untrained model, or the policy with its adapter off.
    """

    config_class: ClassVar[type[CommonConfig]] = DPOConfig
    columns: ClassVar[str] = "chosen and rejected, with or without prompt"

    @staticmethod
    def resolve(args: Any) -> PreferenceSettings:
        return resolve_dpo(args)

    @staticmethod
    def make_algorithm(settings: PreferenceSettings) -> Algorithm:
        return make_dpo(settings.objective)

    def make_reader(self) -> PairReader:
        objective: DPOSettings = self.parts.settings.objective
        return PairReader(self.parts.tokenizer, tail_weight=objective.ld_alpha, **self.reader_settings())

    def check_row(self, row: Any, where: str, settings: PreferenceSettings) -> None:
        super().check_row(row, where, settings)
        check_pair_columns(row, where)

    def with_scores(self, records: Sequence[Record], phase: Phase) -> tuple[Sequence[Record], dict[str, Metric]]:
        if self.parts.settings.objective.trains_on_chosen:
            share = len(records) / 2 / sum(len(record.completion) for record in records[::2])
            returns = [torch.full((len(record.completion),), share * (i % 2 == 0)) for i, record in enumerate(records)]
            records = [replace(record, returns=each) for record, each in zip(records, returns, strict=True)]
        return super().with_scores(records, phase)
