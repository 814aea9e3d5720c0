"""DPO (Rafailov et al. 2023, arXiv 2305.18290): the loss of a dataset's pairs relative to a reference."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch

from lowpeak.algorithms import Algorithm, make_dpo
from lowpeak.arguments import DPOSettings, PreferenceSettings, resolve_dpo
from lowpeak.data import PairReader, check_pair_columns, num_rows, read_items, without_prepared_columns
from lowpeak.errors import ArgumentError
from lowpeak.memory import Phase
from lowpeak.records import Metric, Record
from lowpeak.trainers.configs import CommonConfig, DPOConfig
from lowpeak.trainers.preferences import PreferenceTrainer
from lowpeak.training import score_records

_PAIRS_AT_A_TIME = 256


class DPOTrainer(PreferenceTrainer):
    """Direct preference optimisation on rows with `chosen` and `rejected`, with TRL's constructor.

    from lowpeak import DPOConfig, DPOTrainer

    DPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", args=DPOConfig(output_dir="out"), train_dataset=data).train()

    The reference is `ref_model`, or the untrained model, or the policy with its adapter off.
    """

    config_class: ClassVar[type[CommonConfig]] = DPOConfig
    columns: ClassVar[str] = "chosen and rejected, with or without prompt"

    # The reference's log-probs of the data's completions, with precompute_ref_log_probs, from the first step on.
    reference_sums: dict[bytes, float] | None = None

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

    def _build(self, strategy: Any, train_dataset: Any, eval_dataset: Any) -> None:
        evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        datasets = [each for each in (train_dataset, *evaluated) if each is not None]
        if self.parts.settings.precompute_ref_log_probs and any(num_rows(each) is None for each in datasets):
            raise ArgumentError(
                "precompute_ref_log_probs=True scores all data before the first step, and a stream has no end: remove it."
            )
        super()._build(strategy, train_dataset, eval_dataset)

    def with_scores(self, records: Sequence[Record], phase: Phase) -> tuple[Sequence[Record], dict[str, Metric]]:
        if self.parts.settings.objective.trains_on_chosen:
            share = len(records) / 2 / sum(len(record.completion) for record in records[::2])
            returns = [torch.full((len(record.completion),), share * (i % 2 == 0)) for i, record in enumerate(records)]
            records = [replace(record, returns=each) for record, each in zip(records, returns, strict=True)]
        if not self.parts.settings.precompute_ref_log_probs:
            return super().with_scores(records, phase)
        if self.reference_sums is None:
            self.reference_sums = self._score_data()
            self._free_reference()
        return [_with_reference_sum(record, self.reference_sums) for record in records], {}

    def _score_data(self) -> dict[bytes, float]:
        """Return the reference's weighted log-prob of each completion of the data, by its tokens."""
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        sums: dict[bytes, float] = {}
        for dataset in (self.train_dataset, *evaluated.values()):
            items = iter(()) if dataset is None else read_items(without_prepared_columns(dataset), self.reader)
            pairs = (item for _, item in items if item is not None)
            while True:
                with self.run.strategy.ranks.propagate_errors():
                    records = tuple(self.records_of(list(islice(pairs, _PAIRS_AT_A_TIME))))
                if not records:
                    break
                scored, _ = score_records(self, records, frozenset({"reference"}), Phase.SCORE)
                sums |= {_key(record): _reference_sum(record) for record in scored}
        return sums

    def _free_reference(self) -> None:
        self.run, self.parts = replace(self.run, reference=None), replace(self.parts, reference_model=None)
        self.__dict__["ref_model"] = None
        gc.collect()


def _key(record: Record) -> bytes:
    """Return a digest of a completion's tokens and of how many of them have their whole weight."""
    assert record.advantages is not None
    ids = [int((record.advantages.abs() == 1).sum()), *record.prompt_ids, -1, *record.completion.ids.tolist()]
    return hashlib.sha256(np.array(ids, dtype=np.int32).tobytes()).digest()


def _reference_sum(record: Record) -> float:
    assert record.reference is not None
    assert record.advantages is not None
    return float((record.advantages.abs() * record.reference).sum())


def _with_reference_sum(record: Record, sums: Mapping[bytes, float]) -> Record:
    """Return the record with the reference's sum at its first token, whose weight is 1: losses read sums alone."""
    if (key := _key(record)) not in sums:
        raise ArgumentError(
            "precompute_ref_log_probs=True frees the reference after it has scored train_dataset and eval_dataset: pass the "
            "data to evaluate on as eval_dataset, or remove it."
        )
    reference = torch.zeros(len(record.completion))
    reference[0] = sums[key]
    return replace(record, reference=reference)
