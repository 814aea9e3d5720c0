"""No argument is silently ignored: each of ours changes what a run is made of, or is named, and each inherited one has its actor.

Each inherited one is in exactly one list: it always acts, it acts under a condition, or it never acts.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from architecture.sources import files, module_of, tree_of
from changed_arguments import CHANGED
from lowpeak import (
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
)
from lowpeak.arguments.base import check_and_reset_arguments, run_facts
from lowpeak.arguments.declare import RunFacts, data_argument, declaration
from lowpeak.arguments.distillation import resolve_distillation, resolve_teacher
from lowpeak.arguments.grpo import resolve_grpo
from lowpeak.arguments.inherited import ACT_IF, NEVER_ACT
from lowpeak.arguments.names import REJECTED
from lowpeak.arguments.offline import resolve_reward_model, resolve_supervised
from lowpeak.arguments.online import OnlineArguments, resolve_online
from lowpeak.arguments.online_dpo import resolve_online_dpo
from lowpeak.arguments.ppo import resolve_critic, resolve_ppo
from lowpeak.arguments.preferences import resolve_dpo, resolve_kto
from lowpeak.arguments.rloo import resolve_rloo
from lowpeak.arguments.validation import EffectReport, idle_arguments, reset_idle_arguments
from lowpeak.errors import ArgumentError
from lowpeak.trainers.constructor import base_arguments, passed_or_named

ONLINE = {
    GRPOConfig: resolve_grpo,
    RLOOConfig: resolve_rloo,
    PPOConfig: lambda args, online: (resolve_ppo(args, online), resolve_critic(args)),
    OnlineDPOConfig: resolve_online_dpo,
    DistillationConfig: lambda args, online: (resolve_distillation(args, online), resolve_teacher(args)),
}
OFFLINE = {
    SFTConfig: resolve_supervised,
    RewardConfig: resolve_reward_model,
    DPOConfig: resolve_dpo,
    KTOConfig: resolve_kto,
}
CONFIGS = (*ONLINE, *OFFLINE)

CASES = [(config, others, name, value) for config, others, values in CHANGED for name, value in values.items()]


# transformers' arguments that always act, by the part that reads them: lowpeak, with the same meaning; transformers' Trainer
# around lowpeak's step; accelerate, which prepares and launches; or a user's script. logging_nan_inf_filter, use_cpu and the like
# count as acting if they ask for what happens anyway.
ALWAYS_ACT = {
    "lowpeak": """output_dir per_device_train_batch_size gradient_accumulation_steps seed max_steps
        save_only_model save_total_limit logging_nan_inf_filter""",
    "trainer": """max_grad_norm activation_checkpointing logging_strategy logging_first_step log_level disable_tqdm
        report_to eval_strategy eval_on_start push_to_hub restore_callback_states_from_checkpoint full_determinism
        skip_memory_metrics tf32 use_cpu""",
    "accelerate": "accelerator_config parallelism_config fsdp deepspeed local_rank",
    "scripts": "do_train",
}


def names(config) -> set[str]:
    return {f.name for f in fields(config)}


def ours(config) -> set[str]:
    return {f.name for f in fields(config) if declaration(f).group}


# They run before the arguments are resolved.
READ_ARGUMENTS = ("lowpeak.arguments", "lowpeak.cli", "lowpeak.setup.preflight", "lowpeak.trainers.constructor")


def outcome(config, folder, arguments):
    """What a run of two ranks with two rewards is made of; the error where it cannot be."""
    args = config(output_dir=str(folder), use_cpu=True, **arguments)
    try:
        if config in ONLINE:
            online = resolve_online(args, 2, 2)
            facts, acted = online.facts, reset_idle_arguments(args, online.facts)
            settings = (dataclasses.replace(online, facts=RunFacts()), ONLINE[config](acted, online))
        else:
            facts, acted = run_facts(args), check_and_reset_arguments(args)
            settings = OFFLINE[config](acted)
        facts = dataclasses.replace(facts, sharded=False, in_fp32=True, frozen=False)
        effects = EffectReport(args)
        effects.add_declared(facts)
        effects.report()
    except ArgumentError as error:
        return str(error)
    inner = base_arguments(acted)
    of_transformers = {f.name: getattr(inner, f.name) for f in fields(TrainingArguments)}
    models = [passed_or_named([], args, name) for name in ("sft_model_path", "reward_model_path")]
    return settings, of_transformers, models, idle_arguments(args, facts)


@pytest.mark.parametrize(("config", "others", "name", "value"), CASES, ids=str)
def test_each_argument_changes_what_a_run_is_made_of_or_is_named(tmp_path, config, others, name, value):
    changed = outcome(config, tmp_path, {**others, name: value})
    assert changed != outcome(config, tmp_path, others)
    assert not isinstance(changed, str) or name in changed


def test_the_table_has_every_argument_of_ours():
    covered = {name for _, _, name, _ in CASES}
    assert [sorted(ours(config) - covered) for config in CONFIGS] == [[]] * len(CONFIGS)


def test_an_argument_that_nothing_reads_would_be_found(tmp_path):
    @dataclasses.dataclass(repr=False)
    class Extended(GRPOConfig):
        nobody_reads_this: int = data_argument(1, "Not read.")

    ONLINE[Extended] = resolve_grpo
    try:
        assert outcome(Extended, tmp_path, {"nobody_reads_this": 2}) == outcome(Extended, tmp_path, {})
    finally:
        del ONLINE[Extended]


def test_nothing_reads_lowpeaks_arguments_once_the_settings_are_resolved():
    declared = set().union(*map(ours, CONFIGS)) - names(TrainingArguments)
    reads = [
        f"{module_of(path)}: {ast.unparse(node)}"
        for path in files()
        if not module_of(path).startswith(READ_ARGUMENTS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in declared
        if ast.unparse(node.value).split(".")[-1] in ("args", "user_args", "acting_args")
    ]
    assert not reads


def test_every_argument_of_transformers_always_acts_or_acts_under_a_condition_or_never_acts():
    inherited = names(TrainingArguments) - set().union(*map(ours, CONFIGS))
    lists = [{name for line in ALWAYS_ACT.values() for name in line.split()}, ACT_IF.keys(), NEVER_ACT.keys()]
    in_none = sorted(inherited - set().union(*lists))
    assert not in_none, (
        f"put {in_none} of the installed transformers into ALWAYS_ACT here, or ACT_IF or NEVER_ACT of inherited.py"
    )
    assert [sorted(one & other) for one, other in itertools.combinations(lists, 2)] == [[]] * 3


def test_nothing_is_both_an_argument_and_rejected_by_name():
    everything = set().union(*map(names, CONFIGS))
    assert not everything & REJECTED.keys()
    assert not names(OnlineDPOConfig) & OnlineDPOConfig.rejected.keys()


def test_an_argument_of_every_online_trainer_is_declared_once():
    for config in ONLINE:
        assert names(OnlineArguments) <= names(config)
