"""Names of TRL's command line that lowpeak spells differently, with what to write instead."""

from __future__ import annotations

RENAMED = {
    "model_name_or_path": "use model",
    "model_revision": "use model_init_kwargs='{\"revision\": ...}'",
    "dtype": "use model_init_kwargs='{\"dtype\": ...}'",
    "attn_implementation": "use model_init_kwargs='{\"attn_implementation\": ...}'",
    "dataset_name": "use dataset (and dataset_config for the hub data set's configuration)",
    "dataset_train_split": "use dataset_split",
    "dataset_test_split": "use eval_split",
    "reward_funcs": "use reward",
    "reward_model_name_or_path": "use reward",
}
