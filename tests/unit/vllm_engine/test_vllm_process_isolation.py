"""The trainer's models go on as they are when vLLM has changed their class for its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowpeak.vllm.process_isolation import undo_vllm_class_patch


def decorated(building):
    """A class, changed in place as vLLM's decorator does: making one needs a config, calling one goes by `forward`."""

    class Decoder(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.linear = nn.Linear(size, size)

        def forward(self, x):
            return self.linear(x)

    ours = Decoder(2)
    old_init = Decoder.__init__

    def __init__(self, *args, **kwargs):
        assert building, "Current vLLM config is not set."
        old_init(self, *args, **kwargs)
        self.vllm_config = "theirs"
        self.do_not_compile = True

    def __call__(self, *args, **kwargs):
        assert self.do_not_compile
        return "theirs", self.forward(*args, **kwargs)

    __init__.__module__ = __call__.__module__ = "vllm.compilation.decorators"
    Decoder.__init__, Decoder.__call__ = __init__, __call__
    return Decoder, ours


def test_the_trainers_models_are_made_and_called_as_before_and_vllms_as_vllm_wants():
    building = [True]
    kind, ours = decorated(building)
    theirs = kind(2)
    x = torch.ones(1, 2)
    with pytest.raises(AttributeError, match="do_not_compile"):
        ours(x)
    undo_vllm_class_patch([theirs], lambda: bool(building))
    undo_vllm_class_patch([theirs], lambda: bool(building))
    seen = []
    ours.register_forward_hook(lambda *given: seen.append(1))
    assert torch.equal(ours(x), ours.linear(x))
    assert seen == [1]
    assert theirs(x)[0] == kind(2)(x)[0] == "theirs"
    building.clear()
    assert torch.is_tensor(kind(2)(x))
    assert theirs(x)[0] == "theirs"
