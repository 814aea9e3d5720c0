"""What vLLM says when it does not fit becomes a sentence that names what to change."""

from __future__ import annotations

import pytest

from lowpeak.config.vllm import ColocateSettings, ServerSettings, VllmSettings
from lowpeak.errors import ArgumentError, MemoryExhaustedError
from lowpeak.rollout.vllm.misfit import Launched, misfit, misfit_in_log

# As vLLM 0.32 words them.
NO_CACHE = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine"
)
SHORT = (
    "To serve at least one request with the model's max seq len (32768), (1.75 GiB KV cache is needed, which is larger than "
    "the available KV cache memory (0.5 GiB). Based on the available memory, the estimated maximum model length is 9344. Try"
)
NO_SHARE = (
    "Free memory on device cuda:0 (11.2/79.1 GiB) on startup is less than desired GPU memory utilization (0.3, 23.7 GiB). "
    "Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
HOST_SHARE = (
    "Available memory on node 0 (19.52/23.54 GiB) on startup is less than desired CPU memory utilization (0.999, 23.52 GiB). "
    "On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory reserved"
)
HOST_CACHE = (
    "Available memory on node 0 (19.47/23.54 GiB) on kv cache allocation is less than requested memory for kv ({} GiB)"
)
LONG = "User-specified max_model_len (8192) is greater than the derived max_model_len (max_position_embeddings=4096 or model"
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."

HERE = VllmSettings(ColocateSettings())
THERE = VllmSettings(ServerSettings(("http://a:1",)))


def said(text, settings=HERE):
    return str(misfit(f"EngineCore failed:\n{text}", settings))


def test_each_of_vllms_sentences_gets_numbers_and_names_of_the_run():
    assert said(NO_CACHE).startswith(
        "vLLM has no room for a block of its KV cache beside its weights: raise vllm_gpu_memory_utilization (now 0.3)"
    )
    assert "has 0.5 GiB, and one row of 32768 tokens needs 1.75: lower vllm_max_model_length to at most 9344" in said(
        SHORT
    )
    assert "vLLM wants 23.7 GiB, 0.3 of a device, of which 11.2 of 79.1 GiB are free: lower vllm_gpu" in said(NO_SHARE)
    assert "vLLM wants 23.52 GiB, 0.999 of a device, of which 19.52 of 23.54 GiB are free" in said(HOST_SHARE)
    assert "no room for a block" in said(HOST_CACHE.format("-0.62/0.0"))
    assert "wants 64.0 GiB, and 19.47 of the host's 23.54 GiB are free: lower" in said(HOST_CACHE.format("64.0"))
    assert "vllm_max_model_length is 8192, and the model's context has 4096 tokens" in said(LONG)
    assert "vLLM ran out of memory: set vllm_batch_size below the rows that its KV cache holds" in said(CUDA)
    assert "set vllm_batch_size below 64" in said(CUDA, VllmSettings(ColocateSettings(), batch_size=64))


@pytest.mark.parametrize("text", [NO_CACHE, SHORT, NO_SHARE, CUDA])
def test_a_colocated_engine_is_told_what_else_makes_room(text):
    error = misfit(text, HERE)
    assert isinstance(error, MemoryExhaustedError)
    assert "vllm_tensor_parallel_size (now 1)" in str(error)
    assert "lowpeak serve" not in str(error)


@pytest.mark.parametrize("text", [NO_CACHE, SHORT, NO_SHARE, CUDA, LONG])
def test_a_server_is_told_its_own_options(text):
    sentence = said(text, THERE)
    assert "`lowpeak serve --" in sentence
    for colocated in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model", "offload"):
        assert colocated not in sentence


@pytest.mark.parametrize("text", [NO_CACHE, SHORT, NO_SHARE, CUDA, LONG])
def test_a_server_that_the_run_started_is_told_by_the_runs_arguments(text):
    sentence = misfit_in_log(f"INFO starting\n{text}\n", Launched(2))
    assert "vllm_" in sentence
    assert "lowpeak serve" not in sentence
    assert "offload" not in sentence
    assert text == LONG or "vllm_tensor_parallel_size (now 2)" in sentence
    assert misfit_in_log("INFO starting", Launched(2)) is None


def test_a_cache_of_given_bytes_is_told_by_its_bytes():
    settings = VllmSettings(ColocateSettings(kv_cache_bytes=1 << 20))
    assert "raise kv_cache_bytes (now 1048576)" in said(SHORT, settings)
    assert "lower kv_cache_bytes (now 1048576)" in said("DefaultCPUAllocator: can't allocate memory", settings)


def test_what_is_wrong_with_a_length_is_an_argument_and_other_errors_are_left_alone():
    assert isinstance(misfit(LONG, HERE), ArgumentError)
    assert misfit("KeyError: 'model.embed_tokens'", HERE) is None
