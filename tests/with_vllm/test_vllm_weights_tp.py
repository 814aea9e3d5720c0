"""An engine over two workers in processes of their own: each takes its part of every tensor."""

from __future__ import annotations

import pytest

from lowpeak.arguments.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError
from lowpeak.vllm.weight_sync.push import loaded_version, push_weights, verify_unchanged
from vllm_in_process import TOLERANCE, engine, gap, policy_of, slices


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    with engine(policy_of(), tmp_path_factory.mktemp("tp2"), tensor_parallel_size=2) as made:
        yield made


@pytest.mark.parametrize(("transport", "seed"), [pytest.param("tcp", 1, marks=pytest.mark.release), ("auto", 2)])
def test_each_of_two_workers_takes_its_part(vllm, transport, seed):
    changed = policy_of(seed)
    assert gap(vllm, changed) > 0.1
    push_weights(
        slices(changed), [vllm], VllmSettings(ServerSettings(()), bucket_bytes=1 << 14, transport=transport), seed
    )
    assert gap(vllm, changed) < TOLERANCE
    assert loaded_version([vllm]) == seed
    verify_unchanged([vllm])


def test_an_update_that_lacks_a_tensor_is_refused_by_both(vllm):
    kept = (piece for piece in slices(policy_of()) if "layers.1.mlp.down_proj" not in piece.name)
    with pytest.raises(EngineError, match=r": model\.layers\.1\.mlp\.down_proj"):
        push_weights(kept, [vllm], VllmSettings(ServerSettings(())), 4)
    assert loaded_version([vllm]) is None
