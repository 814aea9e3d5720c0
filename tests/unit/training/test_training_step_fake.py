"""The step's own functions on fake tensors: a phase never waits for the device, whatever the model's size.

The same with activation offload: what leaves the device, and that nothing waits for it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.online_dpo import make_online_dpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.arguments.correction import Correction
from lowpeak.arguments.grpo import EntropyBonus
from lowpeak.arguments.online_dpo import OnlineDPOSettings
from lowpeak.arguments.rloo import RLOOSettings
from lowpeak.attention.install import install_attention
from lowpeak.batching.packing import TokenBudget, pack
from lowpeak.heads.lm_head import install_head
from lowpeak.memory.activation_offload import ActivationOffload
from lowpeak.records import Completion, Record
from lowpeak.training.step import LogprobSettings, run_step, score
from step_settings import GRPO as BASE
from step_settings import LocalStrategy

# The shapes of a 7B model; each further layer is the same code again.
SEVEN_B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    num_hidden_layers=2,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
)

GRPO = replace(
    BASE, clip_high=0.2, beta=0.04, bias_corrected_kl=True, entropy_bonus=EntropyBonus(0.01), max_completion_length=512
)
MASKED = replace(GRPO, score_old=False, correction=Correction(True, True, 0.5, 3.0))
RLOO = RLOOSettings(0.2, 0.2, 0.05, "k1", False, None, False, True)
DPO = OnlineDPOSettings("sigmoid", (0.1,), 0.0, False)


CORE = LogprobSettings(1.0, 256, torch.device("cpu"))


def micro_batches(length=512, rows=8, layout="padded", unit="token"):
    values = torch.zeros(length)
    completion = Completion(torch.ones(length, dtype=torch.int32), values, torch.ones(length, dtype=torch.bool), "stop")
    known = {"old": values, "reference": values, "advantages": values}
    record = Record(0, tuple(range(64)), completion, (1.0,), 1.0, **known)
    budget = TokenBudget(4 * (length + 64), layout=layout)
    records = [replace(record, group=i // 2) for i in range(rows)]
    return pack(records, range(rows), budget, lambda num_tokens: 1.0 / num_tokens, unit=unit)


def fake_model():
    model = Qwen2ForCausalLM(SEVEN_B)
    install_head(model)
    install_attention(model)
    return model.train()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [
        (make_grpo(GRPO), "shared"),
        (make_grpo(MASKED), "rows"),
        (make_rloo(RLOO), "padded"),
        (make_online_dpo(DPO), "shared"),
    ],
    ids=["grpo", "masked", "rloo", "online_dpo"],
)
def test_a_step_of_7b_shapes_is_scored_and_trained_on_fake_tensors(algorithm, layout):
    batches = micro_batches(layout=layout, unit=algorithm.unit)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model()
        scored = score(model, batches, CORE, entropy=True)
        loss, metrics = run_step(model, batches, algorithm, CORE, LocalStrategy(), algorithm.coefficients())
        gradient = model.lm_head.weight.grad
    assert [result["logprobs"].shape for result in scored] == [(4 * 512,), (4 * 512,)]
    assert loss.shape == ()
    assert gradient.shape == (152064, 3584)
    assert "entropy" in metrics


def test_a_loss_that_reads_the_device_fails_here():
    algorithm, batches = make_grpo(GRPO), micro_batches()

    def reading(logprobs_T, tokens):
        loss_U = algorithm.loss(logprobs_T, tokens)
        return loss_U * loss_U.sum().item()

    recording = replace(algorithm, loss=reading)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(DataDependentOutputException):
        run_step(fake_model(), batches, recording, CORE, LocalStrategy(), algorithm.coefficients())


class FakeMover:
    """Copies of fake tensors: torch without CUDA computes on no fake CUDA device, so both places are the CPU's."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.went = 0
        self.came = 0

    def to_host(self, flat: Tensor) -> Tensor:
        self.went += 1
        return flat.clone()

    def to_device(self, host: Tensor) -> Tensor:
        self.came += 1
        return host.clone()

    def wait(self, flat: Tensor) -> None:
        pass


def test_a_step_of_7b_shapes_keeps_the_inputs_of_its_layers_in_host_memory():
    batches, algorithm, mover = micro_batches(), make_grpo(GRPO), FakeMover()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        offload = ActivationOffload(model, mover)
        core = replace(CORE, activation_context=offload.saving)
        score(model, batches, core)
        assert offload.offloaded_bytes == 0, "a pass without gradients saves nothing"
        run_step(model, batches, algorithm, core, LocalStrategy(), algorithm.coefficients())
    num_layers = SEVEN_B.num_hidden_layers
    last_norm = sum(batch.input_ids_BL.numel() for batch in batches) * 3584 * 4  # is not recomputed
    assert num_layers * last_norm <= offload.offloaded_bytes <= (num_layers + 3) * last_norm
    assert mover.came == mover.went > 2 * num_layers
