"""Refusal of subclasses that override a method of TRL or transformers which lowpeak's trainers never call."""

from __future__ import annotations

from lowpeak.errors import ArgumentError

_LOSS = "the model's head computes the loss: define it in make_algorithm (docs/algorithms.md)"
_ROWS = "the trainer reads rows itself: prepare train_dataset before you pass it, and set shuffle_dataset"
# Methods by the place where their code belongs; tests count calls. The trainer's own get_train_dataloader counts steps alone.
_UNCALLED = (
    (_LOSS, "compute_loss compute_loss_context_manager autocast_smart_context_manager _get_num_items_in_batch "
    "_prepare_context_parallel_inputs"),
    ("override evaluate or predict, or use a callback's on_evaluate",
     "evaluation_loop prediction_step get_eval_dataloader get_test_dataloader _get_eval_sampler"),
    (_ROWS, "get_train_dataloader _get_train_sampler _get_dataloader _prepare_input _prepare_inputs _prepare_dataset "
    "_get_collator_with_removed_columns _remove_unused_columns _set_signature_columns_if_needed "
    "_reject_skip_prepare_without_labels"),
    ("checkpoints have all random states; write files of your own in a callback's on_save", "_save_rng_state"),
)  # fmt: skip
_UNCALLED_ONLINE = (
    (_LOSS, "_compute_loss _forward _get_per_token_logps_and_entropies beta get_high_entropy_mask get_off_policy_mask "
    "get_gamma_weights _enable_gradient_checkpointing _get_last_hidden_state"),
    ("pass tools, an environment_factory or a rollout_func, or set generation_kwargs",
     "_generate _generate_single_turn _generate_and_score_completions _get_tool_suffix_ids _tool_call_loop "
     "_generate_vllm _generate_vllm_server _generate_vllm_colocate"),
    ("write a reward function, which may call log_metric and log_extra",
     "_calculate_rewards _calculate_rewards_from_functions _log_metric _log_completion_extra"),
    (_ROWS, "_tokenize_prompts tokenize_row process_vision_row"),
)  # fmt: skip
_UNCALLED_PREFERENCES = (
    (_LOSS, "_compute_loss"),
    ("pass ref_model, which is scored once per step", "compute_ref_log_probs _precompute_ref_logps _compute_kl_logps"),
)


def check_overrides(trainer: type) -> None:
    """Raise ArgumentError if a user's subclass of a trainer overrides a method that is never called."""
    base = next(each for each in trainer.__mro__ if each.__module__.startswith("lowpeak."))
    places = uncalled_methods(base)
    for owner in trainer.__mro__[: trainer.__mro__.index(base)]:
        for name in sorted(vars(owner).keys() & places.keys()):
            raise ArgumentError(
                f"{owner.__name__} overrides {name}, which {base.__name__} never calls, so it would have no effect: "
                f"{places[name]}. Rename it if it is a helper of your own."
            )


def uncalled_methods(trainer: type) -> dict[str, str]:
    """Return the methods that a trainer never calls, each with the place where its code belongs."""
    table = [*_UNCALLED]
    table += _UNCALLED_ONLINE if hasattr(trainer, "attach_extra_modules") else ()
    table += _UNCALLED_PREFERENCES if hasattr(trainer, "reader_settings") else ()
    return {name: place for place, names in table for name in names.split()}
