"""One configuration of a run, planned and run for real: `plan_case` and `measure_case` are called in processes of their own."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import peft
import torch
import torch.distributed.tensor  # for the forks
from datasets import Dataset
from safetensors.torch import save_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.fsdp import FSDPModule  # noqa: F401
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

import lowpeak
from benchmarks.harness.allocations import (
    AllocatedMemory,
    ResidentMemory,
    keep_on_host,
    mark_phases,
    wait_around_collectives,
)
from benchmarks.harness.ranked import FSDP2, allow_fsdp_on_cpu
from lowpeak.memory import Kind
from lowpeak.parallel import SHARDINGS, Sharding
from lowpeak.plan.hardware import Machine
from lowpeak.plan.plan import make_plan
from lowpeak.plan.request import PlanRequest

_FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
_OFFLINE = {"sft": "SFT", "reward": "Reward", "dpo": "DPO", "kto": "KTO"}
_ONLINE = {"grpo": "GRPO", "rloo": "RLOO", "ppo": "PPO", "online-dpo": "OnlineDPO", "distillation": "Distillation"}
_NAMES = {**_ONLINE, **_OFFLINE}
_GROUPS = ("grpo", "rloo", "online-dpo", "distillation")
_FIRST_LETTER = 0x20000  # of 42,720 letters in a row
_MEMORY = 16 << 30


@dataclass(frozen=True)
class Shape:
    """The shape of a model; in fp32 the default one is 34 MB."""

    family: str = "qwen2"
    hidden: int = 256
    layers: int = 4
    vocabulary: int = 8_192
    tied: bool = True
    intermediate: int = 1_024
    dtype: str = "float32"

    def config(self) -> Any:
        heads = self.hidden // 64
        config = _FAMILIES[self.family](
            vocab_size=self.vocabulary, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2), intermediate_size=self.intermediate, tie_word_embeddings=self.tied,
            max_position_embeddings=4_096, pad_token_id=0, bos_token_id=None, eos_token_id=None, head_dim=64,
        )  # fmt: skip
        config.dtype = getattr(torch, self.dtype)
        return config


@dataclass(frozen=True)
class Case:
    """A configuration.

    group      of configurations in the table
    strategy   a name in SHARDINGS; all but "single" run on `world_size` processes
    parallel   processes of a tensor parallel group; HSDP has a copy on each two
    lora       the rank of an adapter on all linear layers; 0: all weights are trained
    reward     the shape of a reward model; None: a function
    teacher    the shape of a teacher of its own; `teacher_prompt` are the tokens of its prompts, 0 those of the policy's
    branches   of each conversation, which a program asks for: each follows the prompt; 1: there is no program
    args       of the trainer's config
    """

    name: str
    group: str
    kind: str = "grpo"
    shape: Shape = Shape()
    prompt: int = 64
    completion: int = 40
    strategy: str = "single"
    lora: int = 0
    reward: Shape | None = None
    teacher: Shape | None = None
    teacher_prompt: int = 0
    branches: int = 1
    args: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 2
    parallel: int = 1

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return 1 if self.strategy == "single" else self.world_size

    @property
    def per_host(self) -> int:
        return 2 if self.strategy == "hsdp" else 8

    @property
    def is_online(self) -> bool:
        return self.kind in _ONLINE

    def config(self, folder: str) -> Any:
        given: dict[str, Any] = {
            "output_dir": folder, "max_steps": 3, "per_device_train_batch_size": 8 * self.parallel // self.ranks, "use_cpu": True,
            "bf16": False, "logging_steps": 1, "save_strategy": "steps", "save_steps": 3, "report_to": "none",
            "disable_tqdm": True, "micro_batch_tokens": 512, "logprob_chunk_size": 64,
        }  # fmt: skip
        if self.kind == "reward":
            given.pop("logprob_chunk_size")
        if self.is_online:
            given |= {"max_completion_length": self.completion, "kv_cache_bytes": 8 << 20}
            given |= {"num_generations": 4} if self.kind in _GROUPS else {}
        else:
            given |= {"max_length": self.prompt + self.completion}
        if self.branches > 1:
            given |= {"max_branches": self.branches}
        if self.teacher_prompt:
            given |= {"teacher_prompt_template": "{prompt}{privileged_context}"}
        if self.sharding.sends_weights(self.ranks) and self.is_online:
            given |= {"gather_budget": 0}
        if not self.sharding.has_formats and "RANK" in os.environ:  # a plan is made without DeepSpeed
            given |= {"deepspeed": _zero_config(int(self.strategy[-1]))}
        config = getattr(lowpeak, f"{_NAMES[self.kind]}Config")
        return config(**{**given, **self.args})

    @property
    def keeps_on_host(self) -> bool:
        """Whether a teacher is in host memory, of which a CPU has no other: the run is planned for a GPU, without a margin."""
        return self.ranks == 1 and bool(self.args.get("offload_frozen_models"))

    @property
    def sharding(self) -> Sharding:
        return SHARDINGS[self.strategy]

    @property
    def is_split_when_loaded(self) -> bool:
        """Whether the model is given by its path: tensor parallelism and ZeRO-3 split it while it is loaded."""
        return self.parallel > 1 or (self.sharding.gathers and not self.sharding.has_formats)

    def environment(self) -> dict[str, str]:
        """Return the environment variables by which accelerate takes the strategy."""
        sizes: dict[str, int] = {}
        if self.strategy == "hsdp":
            sizes = {"DP_REPLICATE": self.ranks // self.per_host, "DP_SHARD": self.per_host}
        if self.parallel > 1:
            sizes = {"TP": self.parallel, "DP_SHARD": self.ranks // self.parallel}
        shards = self.sharding.gathers and self.sharding.has_formats and self.ranks > self.parallel
        found = dict(FSDP2) if shards else {}
        found |= {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}
        return found | ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} if sizes else {})

    def adapter(self) -> Any:
        if not self.lora:
            return None
        task = "SEQ_CLS" if self.kind == "reward" else "CAUSAL_LM"
        return peft.LoraConfig(r=self.lora, target_modules="all-linear", task_type=task)


def plan_case(case: Case, path: Path) -> None:
    """Plan a run of the case, into a file: the peak of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        request = PlanRequest(
            case.kind,
            case.config(folder),
            case.shape.config(),
            Machine(case.ranks, _MEMORY, per_host=case.per_host, device="cuda" if case.keeps_on_host else "cpu"),
            case.strategy,
            case.adapter(),
            [case.reward.config()] if case.reward is not None else [],
            tensor_parallel=case.parallel,
            prompt_tokens=case.prompt,
            teacher_prompt_tokens=case.teacher_prompt,
            teacher_config=None if case.teacher is None else case.teacher.config(),
        )
        plan = make_plan(request)
    peaks = {name: phase.peak - phase.device.get(Kind.MARGIN, 0) for name, phase in plan.phases.items()}
    path.write_text(json.dumps(peaks))


def measure_case(case: Case, place: Path, resident: bool = False) -> None:
    """Run three steps of the case for real; each rank writes the peak of its phases into `place`."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        path = _save_model(case.shape, os.path.join(folder, "model")) if case.is_split_when_loaded else None
        # One step compiles and caches what later ones reuse, and a process starts with none of it.
        with ResidentMemory() if resident else AllocatedMemory() as memory, wait_around_collectives():
            trainer = _make_trainer(case, folder if case.ranks == 1 else os.path.join(place, "run"), path)
            if case.keeps_on_host:
                keep_on_host(trainer.run.reference.model)
            if case.is_online:  # no completion ends before its maximal length
                trainer.processing_class.eos_token = trainer.model.generation_config.eos_token_id = None
            mark_phases(trainer, memory.begin)
            trainer.train()
        lengths = [len(r.completion) for r in trainer.rollout.records] if case.is_online else [case.completion]
    assert set(lengths) == {case.completion * case.branches}, (
        f"completions have {min(lengths)} to {max(lengths)} tokens"
    )
    rank = int(os.environ.get("RANK", 0))
    (place / f"measured{rank}.json").write_text(json.dumps(memory.peaks()))


def _make_trainer(case: Case, folder: str, model: Any) -> Any:
    """Return the trainer of a case; `model` is the path of the saved one, or None."""
    os.environ.update(case.environment())
    args = case.config(folder)
    if case.environment():
        allow_fsdp_on_cpu()
    torch.manual_seed(0)
    tokenizer = letter_tokenizer(case.shape.vocabulary)
    if case.branches > 1:
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    parts: dict[str, Any] = {"peft_config": case.adapter()} if case.lora else {}
    if case.is_online:
        parts["reward_funcs"] = _spread if case.reward is None else _make_model(case.reward, labels=1)
        if case.reward is not None:
            parts["reward_processing_classes"] = tokenizer
    if case.branches > 1:
        parts["environment_factory"] = lambda: _Branches(case.branches)
    if case.teacher is not None:
        parts["teacher_model"] = _make_model(case.teacher, labels=0)
    return getattr(lowpeak, f"{_NAMES[case.kind]}Trainer")(
        model=model or _make_model(case.shape, labels=1 if case.kind == "reward" else 0),
        args=args,
        train_dataset=Dataset.from_list(_rows(case)),
        processing_class=tokenizer,
        **parts,
    )


def _save_model(shape: Shape, path: str) -> str:
    model: Any = _make_model(shape, labels=0)
    model.config.save_pretrained(path)
    save_model(model, os.path.join(path, "model.safetensors"), {"format": "pt"})
    del model
    gc.collect()
    return path


def _zero_config(stage: int) -> dict[str, Any]:
    automatic = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    numbers: dict[str, Any] = dict.fromkeys(automatic, "auto")
    return {**numbers, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}


def _make_model(shape: Shape, labels: int) -> nn.Module:
    config = shape.config()
    if labels:
        config.num_labels = labels
    auto: Any = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    model: nn.Module = auto.from_config(config, dtype=config.dtype)
    return model


def letter_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One letter a token, so that a text has as many tokens as the ids that it is of."""
    words = {chr(_FIRST_LETTER + i): i for i in range(1, size - 1)}
    inner = Tokenizer(models.WordLevel({"<pad>": 0, **words, "<eos>": size - 1}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def _rows(case: Case, count: int = 64) -> list[dict[str, Any]]:
    """Rows whose texts have the case's lengths; a trained answer ends with the tokenizer's last token."""
    letters = case.shape.vocabulary - 2
    texts = ["".join(chr(_FIRST_LETTER + 1 + (7 * i + j) % letters) for j in range(4_096)) for i in range(count)]
    prompts: list[dict[str, Any]] = [{"prompt": text[: case.prompt]} for text in texts]
    answer = slice(case.prompt, case.prompt + case.completion - (not case.is_online))
    if case.teacher_prompt:
        context = slice(case.prompt, case.teacher_prompt)
        prompts = [{**row, "privileged_context": text[context]} for row, text in zip(prompts, texts, strict=True)]
    if case.branches > 1:
        return [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in prompts]
    if case.is_online and "lmbda" not in case.args:
        return prompts
    if case.kind in ("sft", "distillation"):
        return [{**row, "completion": text[answer]} for row, text in zip(prompts, texts, strict=True)]
    return [
        {**row, "chosen": text[answer], "rejected": text[answer][::-1]}
        for row, text in zip(prompts, texts, strict=True)
    ]


class _Branches:
    """A program that asks for several turns after the prompt, each of which is a branch."""

    def __init__(self, count: int) -> None:
        self.count = count

    def reset(self, prompt: list[dict[str, str]], **row: Any) -> None:
        self.ids = [ord(letter) - _FIRST_LETTER for letter in prompt[0]["content"]]

    async def run(self, endpoint: Any) -> None:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        body = {"token_ids": self.ids, "sampling_params": {}}
        async with httpx2.AsyncClient(base_url=endpoint.base_url, headers=headers, timeout=None) as client:
            for _ in range(self.count):
                (await client.post("/inference/v1/generate", json=body)).raise_for_status()


def _spread(completions: list[Any], **columns: Any) -> list[float]:
    """A number from each completion, a text or messages, that seldom is another's."""
    return [sum(ord(letter) * (i + 1) for i, letter in enumerate(str(text))) % 997 / 997 for text in completions]
