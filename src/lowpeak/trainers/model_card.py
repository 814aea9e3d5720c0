"""Model cards, and the facts of a run for its journal: algorithm and paper, data, command, arguments, last metrics."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

import lowpeak
from lowpeak.arguments import HIDDEN, hide_secrets, is_secret
from lowpeak.data import num_rows
from lowpeak.memory import has_device_memory, total_bytes

# By the algorithm's name: its usual spelling, and the paper's title and number on arXiv.
_PAPERS: dict[str, tuple[str, str, str]] = {
    "grpo": (
        "GRPO",
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "2402.03300",
    ),
    "rloo": (
        "RLOO",
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "2402.14740",
    ),
    "ppo": ("PPO", "Proximal Policy Optimization Algorithms", "1707.06347"),
    "online_dpo": ("Online DPO", "Direct Language Model Alignment from Online AI Feedback", "2402.04792"),
    "distillation": (
        "on-policy distillation (GKD)",
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "2306.13649",
    ),
    "sft": ("supervised fine-tuning", "", ""),
    "reward": (
        "reward modeling (Bradley-Terry)",
        "Training language models to follow instructions with human feedback",
        "2203.02155",
    ),
    "dpo": (
        "DPO",
        "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "2305.18290",
    ),
    "kto": ("KTO", "KTO: Model Alignment as Prospect Theoretic Optimization", "2402.01306"),
}
_PACKAGES = ("transformers", "torch", "datasets", "tokenizers")
_NO_METRICS = ("step", "epoch", "total_flos")
_LOCAL_ARGUMENTS = ("output_dir", "hub_", "push_", "vllm_server", "resume_")
_CARD = "README.md"
_SEAL = "<!-- lowpeak writes this card again as long as it is unchanged: "
_HUB_TOKEN = re.compile(r"\bhf_\w{8,}")
_HUB_DATASET = re.compile(r"hf://datasets/([^@]+)@")


class ModelCardMixin:
    """A mixin that writes the card of a trainer's model; `Trainer.push_to_hub` calls it."""

    def create_model_card(
        self: Any,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
        language: str | None = None,
        license: str | None = None,
        stage: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        """Write `README.md` into `output_dir`, or a folder's `stage`; a card that the user wrote or changed stays."""
        if not self.is_world_process_zero():
            return
        existing = (folder or Path(self.args.output_dir)) / _CARD
        card = existing if stage is None else stage / _CARD
        if stage is not None:
            card.unlink(missing_ok=True)  # peft's template
        if _is_edited(existing):
            logging.getLogger(__name__).info("%s stays: lowpeak did not write it, or it was changed.", existing)
            return
        data = ModelCardData(datasets=dataset_name, language=language, license=license, model_name=model_name)
        given_tags = [tags] if isinstance(tags, str) else tags or ()
        data.tags = list(dict.fromkeys(("generated_from_trainer", "lowpeak", self.run.algorithm.name, *given_tags)))
        is_adapter = hasattr(self.model, "peft_config") and not card.with_name("config.json").exists()
        data.library_name = "peft" if is_adapter else "transformers"
        card.write_text(_sealed(_card_text(self, data)), encoding="utf-8")


def _card_text(trainer: Any, data: Any) -> str:
    """Return the card with these `ModelCardData`, which get the model, the dataset and the task."""
    named, algorithm = trainer.model.config._name_or_path, trainer.run.algorithm.name
    data.base_model = base = named if named and not Path(named).exists() else None
    data.datasets = dataset = data.datasets or _dataset_id(trainer.train_dataset)
    data.pipeline_tag = "text-classification" if algorithm == "reward" else "text-generation"
    body = "\n\n".join(_sections(trainer, data.model_name or Path(trainer.args.output_dir).name, base, dataset))
    return f"---\n{data.to_yaml()}\n---\n\n{_HUB_TOKEN.sub(HIDDEN, body)}\n\n"


def _is_edited(card: Path) -> bool:
    """Return whether the user wrote or changed a card."""
    text = card.read_text("utf-8", "replace") if card.exists() else _sealed("")
    return text != _sealed(text.rpartition(_SEAL)[0])


def _sealed(text: str) -> str:
    """Return a card with a digest of its text, which shows whether a user changed it."""
    return f"{text}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def _sections(trainer: Any, name: str, base: str | None, dataset: str | None) -> list[str]:
    algorithm, title, arxiv_id = _PAPERS.get(trainer.run.algorithm.name, (trainer.run.algorithm.name, "", ""))
    paper = f" ([{title}](https://huggingface.co/papers/{arxiv_id}))" if title else ""
    model = f"[{base}](https://huggingface.co/{base})" if base else "a local model"
    rows = f"[{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else "a local dataset"
    return [
        f"# {name}",
        f"Trained from {model} on {rows} with {algorithm}{paper}, for {trainer.state.global_step} steps.",
        f"## Training\n\n```\n{_command(sys.argv)}\n```",
        _table("argument", _given_arguments(trainer.user_args)),
        f"## Metrics\n\n{_table('last value of', _last_metrics(trainer.state.log_history))}",
        f"## Versions\n\n{_table('package', _versions())}",
    ]


def describe_start(trainer: Any) -> dict[str, Any]:
    """Return the facts of a run for its journal: algorithm, model, data, arguments that were set, devices, versions."""
    algorithm, named = trainer.run.algorithm.name, trainer.model.config._name_or_path
    device, dataset = trainer.args.device, trainer.train_dataset
    files = getattr(getattr(dataset, "info", None), "download_checksums", None) or ()
    return {
        "algorithm": _PAPERS.get(algorithm, (algorithm,))[0],
        "model": (Path(named).name if Path(named).exists() else named) or type(trainer.model).__name__,
        "data": _dataset_id(dataset) or ", ".join(Path(file).name for file in files),
        "rows": num_rows(dataset),
        "rewards": list(trainer.collector.panel.names) if hasattr(trainer, "collector") else [],
        "arguments": _given_arguments(trainer.user_args),
        "device": _device_name(device),
        "devices": trainer.args.world_size,
        "device_memory": total_bytes(device),
        "versions": _versions(),
    }


def _device_name(device: torch.device) -> str:
    """Return the name of the device's card, or of its kind if torch knows no more."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None and has_device_memory(device) else device.type.upper()


def _given_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments that the user set, lists and mappings as text, without secrets and names of this machine."""
    given = {name: getattr(args, name) for name in sorted(args.given) if not name.startswith(_LOCAL_ARGUMENTS)}
    shown = {name: value for name, value in hide_secrets(given).items() if value is not None}
    return {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in shown.items()}


def _versions() -> dict[str, str]:
    return {"lowpeak": lowpeak.__version__, **{package: version(package) for package in _PACKAGES}}


def _table(title: str, values: Mapping[str, Any]) -> str:
    rows = [f"| `{name}` | {_shown(value)} |" for name, value in values.items()]
    return "\n".join([f"| {title} | |", "|---|---|", *rows])


def _shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _last_metrics(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: value for row in log_history for name, value in row.items() if name not in _NO_METRICS}


def _dataset_id(dataset: Any) -> str | None:
    sources = getattr(getattr(dataset, "info", None), "download_checksums", None) or ()
    return next((found[1] for found in map(_HUB_DATASET.match, sources) if found), None)


def _without_secrets(word: str) -> str:
    """Return a word of a command without secret tokens in its JSON: `--name={...}` or `{...}`."""
    start = word.find("{")
    try:
        given = json.loads(word[start:]) if start >= 0 else None
    except json.JSONDecodeError:
        return word
    return word[:start] + json.dumps(hide_secrets(given)) if isinstance(given, dict) else word


def _command(argv: Sequence[str]) -> str:
    """Return the command of this process, without the folder of its program and without secret tokens."""
    program = Path(argv[0])
    words = [program.parent.name if program.name == "__main__.py" else program.name]
    words = ["python", *words] if program.suffix == ".py" and program.name != "__main__.py" else words
    hidden = False
    for word in argv[1:]:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and is_secret(name.lstrip("-").replace("-", "_"))
        words.append(HIDDEN if hidden else f"{name}={HIDDEN}" if secret and equals else _without_secrets(word))
        hidden = secret and not equals
    return shlex.join(words)
