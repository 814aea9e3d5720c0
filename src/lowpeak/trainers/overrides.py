"""Refusal of subclasses that override a method of TRL or transformers which lowpeak's trainers never call."""

from __future__ import annotations

from lowpeak.errors import ArgumentError

# Methods by the place where their code belongs. Tests count calls of all of transformers' methods, and compare with TRL's.
_LOSS = "the model's head computes the loss: define it in make_algorithm (docs/algorithms.md)"
_EVALUATION = "override evaluate or predict, or use a callback's on_evaluate"
_ROWS = "the trainer reads rows itself: prepare train_dataset before you pass it, and set shuffle_dataset"
_UNCALLED = {
    **dict.fromkeys(("compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager"), _LOSS),
    **dict.fromkeys(("_get_num_items_in_batch", "_prepare_context_parallel_inputs"), _LOSS),
    **dict.fromkeys(("evaluation_loop", "prediction_step", "get_eval_dataloader", "get_test_dataloader"), _EVALUATION),
    "_get_eval_sampler": _EVALUATION,
    **dict.fromkeys(("_prepare_input", "_prepare_inputs", "_get_train_sampler", "_get_dataloader"), _ROWS),
    **dict.fromkeys(("_get_collator_with_removed_columns", "_remove_unused_columns"), _ROWS),
    **dict.fromkeys(("_set_signature_columns_if_needed", "_prepare_dataset"), _ROWS),
    "_reject_skip_prepare_without_labels": _ROWS,
    # The trainer's own counts steps; nothing reads its batches.
    "get_train_dataloader": _ROWS,
    "_save_rng_state": "each checkpoint has all random states; write files of your own in a callback's on_save",
}
_VLLM = "the arguments vllm_* set how weights reach vLLM"
_GENERATION = "pass a rollout_func, or set generation_kwargs"
_REWARD = "write a reward function, which may call log_metric and log_extra"
_UNCALLED_ONLINE = {
    **dict.fromkeys(("_compute_loss", "_forward", "_get_per_token_logps_and_entropies", "beta"), _LOSS),
    **dict.fromkeys(("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"), _LOSS),
    **dict.fromkeys(("_generate", "_generate_single_turn", "_generate_and_score_completions"), _GENERATION),
    **dict.fromkeys(("_generate_vllm", "_generate_vllm_server", "_generate_vllm_colocate"), _GENERATION),
    **dict.fromkeys(("_get_tool_suffix_ids", "_tool_call_loop", "_enable_gradient_checkpointing"), _GENERATION),
    **dict.fromkeys(("_calculate_rewards", "_calculate_rewards_from_functions"), _REWARD),
    **dict.fromkeys(("_log_metric", "_log_completion_extra"), _REWARD),
    **dict.fromkeys(("_tokenize_prompts", "tokenize_row", "process_vision_row"), _ROWS),
    **dict.fromkeys(("_move_model_to_vllm", "_move_model_to_vllm_inner", "_fix_param_name_to_vllm"), _VLLM),
    **dict.fromkeys(("_sync_fsdp1_params_to_vllm", "_sync_fsdp2_params_to_vllm"), _VLLM),
}


def check_overrides(trainer: type) -> None:
    """Raise ArgumentError if a user's subclass of a trainer overrides a method that is never called."""
    base = next(each for each in trainer.__mro__ if each.__module__.startswith("lowpeak."))
    places = uncalled_methods(base)
    for owner in trainer.__mro__[: trainer.__mro__.index(base)]:
        for name in vars(owner).keys() & places.keys():
            raise ArgumentError(
                f"{owner.__name__} overrides {name}, which {base.__name__} never calls, so it would have no effect: "
                f"{places[name]}. Rename it if it is a helper of your own."
            )


def uncalled_methods(trainer: type) -> dict[str, str]:
    """Return the methods that a trainer never calls, each with the place where its code belongs."""
    generates = hasattr(trainer, "num_generations")
    return _UNCALLED | (_UNCALLED_ONLINE if generates else {})
