"""A TRL user's script runs with its import changed: two rewards, one async, LoRA, evaluation, checkpoints, resume."""

from __future__ import annotations

from datasets import Dataset

from small_runs import journal, same, saved, weights
from tiny_models import char_tokenizer, tiny_model

SCRIPT = """
import asyncio
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

train = load_dataset("json", data_files=FOLDER + "/train.jsonl", split="train")
held_out = load_dataset("json", data_files=FOLDER + "/test.jsonl", split="train")

def correct(completions, answer, **kwargs):
    return [1.0 if a in c[0]["content"] else 0.0 for c, a in zip(completions, answer)]

async def short(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    await asyncio.sleep(0)
    assert trainer_state.global_step >= 0
    lengths = [len(ids) for ids in completion_ids]
    log_extra("length", lengths)
    log_metric("longest", max(lengths))
    return [-0.01 * n for n in lengths]

def trainer():
    return GRPOTrainer(
        model=FOLDER + "/model",
        reward_funcs=[correct, short],
        args=GRPOConfig(
            output_dir=FOLDER + "/out",
            reward_weights=[1.0, 0.5],
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-3,
            max_steps=4,
            logging_steps=1,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            beta=0.02,
            temperature=0.9,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=train,
        eval_dataset=held_out,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )

first = trainer()
first.train()
metrics = first.evaluate()
first.save_model(FOLDER + "/final")
second = trainer()
second.train(resume_from_checkpoint=FOLDER + "/out/checkpoint-2")
"""


def test_a_trl_users_script_runs_with_its_import_changed(tmp_path):
    tokenizer = char_tokenizer(chat=True)
    saved(tmp_path / "model", tiny_model(len(tokenizer)), tokenizer)
    for name, count in (("train", 32), ("test", 6)):
        rows = [{"prompt": [{"role": "user", "content": f"{i % 10}="}], "answer": str(i % 10)} for i in range(count)]
        Dataset.from_list(rows).to_json(tmp_path / f"{name}.jsonl")
    names = {"FOLDER": str(tmp_path)}
    exec(SCRIPT.replace("from trl import", "from lowpeak import"), names)

    logs = names["first"].state.log_history
    assert [row["step"] for row in logs if "loss" in row] == [1, 2, 3, 4]
    assert {"rewards/correct/mean", "rewards/short/std", "kl", "completions/clipped_ratio", "longest"} <= logs[0].keys()
    assert {"eval_reward", "eval_rewards/correct/mean", "eval_pass@4", "eval_greedy_reward"} <= names["metrics"].keys()
    assert (tmp_path / "final" / "adapter_config.json").is_file()
    rollouts = journal(tmp_path / "out", "rollouts")
    assert len(rollouts) == 4 * 16
    assert {"prompt", "completion", "rewards", "reward", "advantage", "extra"} <= rollouts[0].keys()
    assert (rollouts[0]["rewards"].keys(), rollouts[0]["extra"].keys()) == ({"correct", "short"}, {"length"})
    assert same(weights(names["first"]), weights(names["second"]))
