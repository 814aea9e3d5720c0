"""Activation offload in a step of a 7B model on fake tensors: what leaves the device, and that nothing waits for it."""

from __future__ import annotations

import torch
from test_training_step_fake import GRPO, SEVEN_B, fake_model, micro_batches
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowpeak.algorithms.grpo import make_grpo
from lowpeak.memory.offload import ActivationOffload
from lowpeak.training.step import Core, run_step, score
from steps import LocalStrategy


class FakeMover:
    """Copies of fake tensors: torch without CUDA computes on no fake CUDA device, so both places are the CPU's."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.went = 0
        self.came = 0

    def away(self, flat: Tensor) -> Tensor:
        self.went += 1
        return flat.clone()

    def back(self, host: Tensor) -> Tensor:
        self.came += 1
        return host.clone()

    def wait(self, flat: Tensor) -> None:
        pass


def test_a_step_of_7b_shapes_keeps_the_inputs_of_its_layers_in_host_memory():
    batches = micro_batches()
    mover = FakeMover()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        offload = ActivationOffload(model, mover)
        core = Core(1.0, 256, mover.device, saving=offload.saving)
        score(model, batches, core)
        assert offload.bytes_away == 0, "a pass without gradients saves nothing"
        run_step(model, batches, make_grpo(GRPO), core, LocalStrategy(), make_grpo(GRPO).coefficients())
    num_layers = SEVEN_B.num_hidden_layers
    tokens = sum(batch.input_ids_BL.numel() for batch in batches)
    layer_inputs = num_layers * tokens * 3584 * 4
    last_norm = tokens * 3584 * 4  # is not recomputed
    assert layer_inputs <= offload.bytes_away <= layer_inputs + 3 * last_norm
    assert mover.came == mover.went > 2 * num_layers
