"""The arguments of rollouts by vLLM, TRL's names where the meaning is the same; `config/resolve_vllm.py` says which act when."""

from __future__ import annotations

from dataclasses import dataclass

from lowpeak.config.vllm import SERVER_TOKEN
from lowpeak.training.fields import argument


@dataclass(repr=False)
class VllmArguments:
    """Where vLLM runs, how weights get there, how large a wave is, and how its drift is corrected."""

    use_vllm: bool = argument(False, "vllm", "Generate with vLLM (needs lowpeak[vllm]) in place of the native engine.")
    vllm_mode: str = argument(
        "colocate", "vllm", "Where it runs: colocate (in the training processes), or server (lowpeak serve)."
    )
    vllm_model_impl: str = argument("vllm", "vllm", "Colocated: whose model code runs: vllm, transformers or auto.")
    vllm_enable_sleep_mode: bool = argument(
        False, "vllm", "Colocated: give the engine's memory back while training (GPUs)."
    )
    vllm_gpu_memory_utilization: float = argument(0.3, "vllm", "Colocated: the engine's share of the device's memory.")
    vllm_max_model_length: int | None = argument(
        None,
        "vllm",
        "Most tokens of prompt and completion together, as a server was told too (None: the model's context).",
    )
    vllm_tensor_parallel_size: int = argument(1, "vllm", "Colocated: ranks that one engine is cut over.")
    vllm_engine_kwargs: dict | str | None = argument(
        None, "vllm", "Colocated: more of vLLM's own engine arguments, passed on as they are (JSON)."
    )
    vllm_server_base_url: str | list[str] | None = argument(
        None, "vllm", "Server: its URL; several, in a list or with commas between, share the prompts."
    )
    vllm_server_host: str = argument("0.0.0.0", "vllm", "Server: its host, where no URL is given.")
    vllm_server_port: int = argument(8000, "vllm", "Server: its port, where no URL is given.")
    vllm_server_timeout: float = argument(
        240.0, "vllm", "Server: seconds that it may take to be there, at the start and after it died."
    )
    vllm_group_port: int | None = argument(
        None, "vllm", "Server: the trainer's port for weights that go by NCCL or TCP (None: any free one)."
    )
    vllm_server_token: str | None = argument(
        None,
        "vllm",
        f"Server: the token that it demands (None: that of {SERVER_TOKEN} in the environment, if any).",
    )
    vllm_wave_timeout: float | None = argument(
        3600.0, "vllm", "Seconds that one wave may take before the engine counts as lost (None: no limit)."
    )
    vllm_batch_size: int | None = argument(
        None, "vllm", "Rows of one wave (None: as many as the KV cache holds at their full length)."
    )
    vllm_structured_outputs_regex: str | None = argument(
        None, "vllm", "A regular expression that each completion must match."
    )
    vllm_bucket_size: str | int = argument(
        "64MiB", "vllm", "Bytes of weights that travel to the engine together: 64MiB, or a number."
    )
    vllm_transport: str = argument(
        "auto", "vllm", "How weights travel: auto, process (colocated), nccl or tcp (server)."
    )
    vllm_verify_weights: bool = argument(
        True, "vllm", "Prove after each sync and wake that the engine's weights are the policy's."
    )
    vllm_adapters: bool = argument(
        True, "vllm", "LoRA: send the adapter alone where the engine can serve it (False: merged weights)."
    )
    vllm_importance_sampling_correction: bool = argument(
        True, "vllm", "Weigh the policy loss by how likely the trainer makes a completion, over how likely vLLM did."
    )
    vllm_importance_sampling_mode: str = argument(
        "sequence_mask",
        "vllm",
        "That weight per token or per completion, cut to its bounds or 0 beyond them: token_truncate, token_mask, "
        "sequence_truncate or sequence_mask.",
    )
    vllm_importance_sampling_clip_max: float | None = argument(3.0, "vllm", "The weight's upper bound (None: none).")
    vllm_importance_sampling_clip_min: float | None = argument(None, "vllm", "The weight's lower bound (None: none).")
