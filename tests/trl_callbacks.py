"""TRL's callbacks in runs of lowpeak, in a process of their own, since importing trl changes transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from small_runs import SAVED, make, pair_rows, rows, supervised_rows, weights
from tiny_models import tiny_model
from trl_wheel import FOLDER

sys.path.append(str(FOLDER))

from trl import BEMACallback, LogCompletionsCallback, RichProgressCallback, SyncRefModelCallback, WeaveCallback
from trl.experimental import merge_model_callback


def log_completions(folder: Path) -> None:
    """The callback generates from the policy in batches, on each of its steps."""
    run = make("GRPO", folder, eval_dataset=rows(5))
    callback = LogCompletionsCallback(run, freq=1, num_prompts=3)
    run.add_callback(callback)
    run.train()
    assert [(step, prompt) for step, prompt, _ in callback.table[:3]] == [("1", p) for p in rows(3)["prompt"]]
    assert len(callback.table) == 6


def sync_reference(folder: Path) -> None:
    """The reference moves by the callback as by sync_ref_model."""
    settings = {"beta": 0.1, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    found = []
    for name, more in (("own", {"sync_ref_model": True}), ("callback", {})):
        run = make("GRPO", folder / name, ref_model=tiny_model(seed=1), **settings, **more)
        reference = run.run.reference.model
        if name == "callback":
            run.add_callback(SyncRefModelCallback(reference, run.accelerator))
        run.train()
        found.append([parameter.detach().clone() for parameter in reference.parameters()])
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs)


def bema(folder: Path) -> None:
    """The average is saved as a model that transformers loads."""
    for kind, data in (("GRPO", rows()), ("SFT", supervised_rows()), ("Reward", pair_rows())):
        callback = BEMACallback(update_freq=1)
        run = make(kind, folder / kind, data=data, callbacks=[callback])
        run.train()
        averaged = dict(callback.running_model.named_parameters())
        assert any(not torch.equal(averaged[name], value) for name, value in weights(run).items())
        if kind == "GRPO":
            AutoModelForCausalLM.from_pretrained(folder / kind / "bema")


def weave(folder: Path) -> None:
    """Without the package the callback warns; with a stand-in for its logger it gets a prediction per prompt."""
    logged = []
    prediction = SimpleNamespace(log_score=lambda **score: logged.append(score), finish=lambda: None)
    logger = SimpleNamespace(
        log_prediction=lambda **row: logged.append(row) or prediction, log_summary=logged.append, finish=lambda: None
    )
    run = make("GRPO", folder, eval_dataset=rows(4), eval_strategy="steps", eval_steps=2)
    callback = WeaveCallback(run, project_name="p", scorers={"length": lambda prompt, completion: len(completion)})
    run.add_callback(callback)
    run.train()
    callback._weave_initialized, callback.model_name, callback._EvaluationLogger = True, "m", lambda **about: logger
    run.evaluate()
    assert sum("inputs" in row for row in logged) == 4
    assert logged[-1]["successful_predictions"] == 4


def merge(folder: Path) -> None:
    """The callback merges a checkpoint that is whole when it is called."""
    merged = []
    merge_model_callback.is_mergekit_available = lambda: True
    merge_model_callback.merge_models = lambda config, path: merged.append(
        (AutoModelForCausalLM.from_pretrained(config), path)
    )
    merge_model_callback.MergeConfig.create = lambda config: config.policy_model_path
    callback = merge_model_callback.MergeModelCallback(merge_at_every_checkpoint=True)
    make("GRPO", folder, callbacks=[callback], **SAVED).train()
    assert [path for _, path in merged] == [str(folder / f"checkpoint-{step}" / "merged") for step in (1, 2)]


def rich_progress(folder: Path) -> None:
    """The bars run."""
    make(
        "GRPO", folder, eval_dataset=rows(4), eval_strategy="steps", eval_steps=1, callbacks=[RichProgressCallback()]
    ).train()


CHECKS = {check.__name__: check for check in (log_completions, sync_reference, bema, weave, merge, rich_progress)}
