"""One update is all or nothing, is verified where vLLM put it, and sends nothing twice."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import nn

from fused_model import VOCAB, FusedModel, FusedVllm, slices, weights
from lowpeak.arguments.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.records import WeightSlice
from lowpeak.vllm.weight_sync.names import CheckpointNames
from lowpeak.vllm.weight_sync.push import loaded_version, push_weights, verify_unchanged
from tiny_models import tiny_model


def _settings(transport="process", bucket_bytes=256, verify=True):
    return VllmSettings(ServerSettings(()), bucket_bytes=bucket_bytes, transport=transport, verify=verify)


def num_bytes(tensors):
    return sum(4 * tensor.numel() for tensor in tensors.values())


def _holds(model, tensors):
    """Whether a model without tensor parallelism has these weights, and zeros where it pads."""
    joined = torch.cat([tensors["q.weight"], tensors["k.weight"], tensors["v.weight"]])
    head = tensors.get("head.weight", tensors["embed.weight"])
    return (
        torch.equal(model.qkv.data, joined)
        and torch.equal(model.embed.data[:VOCAB], tensors["embed.weight"])
        and torch.equal(model.head.data[:VOCAB], head)
        and not model.head.data[VOCAB:].any()
        and torch.equal(model.o.data, tensors["o.weight"])
        and torch.equal(model.norm.data, tensors["norm.weight"])
    )


@pytest.mark.parametrize("transport", ["process", "tcp", "auto"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bucket_bytes", [100, 256, 1 << 16])
def test_a_push_gives_the_engine_these_weights_and_this_version(transport, tied, bucket_bytes):
    vllm = FusedVllm(FusedModel(tied=tied), in_process=transport in ("process", "auto"))
    for version in (3, 4):
        tensors = weights(version, tied=tied)
        report = push_weights(slices(tensors), [vllm], _settings(transport, bucket_bytes), version)
        assert _holds(vllm.model, tensors)
        assert vllm.versions() == [version]
        assert vllm.transport == ("process" if transport == "auto" else transport)
        assert report.num_bytes == num_bytes(tensors)
        assert 0 < report.proof_seconds < report.seconds
    verify_unchanged([vllm])


def test_every_engine_and_every_cut_of_it_is_pushed_to():
    cut = FusedVllm(FusedModel(tp=2, rank=0), FusedModel(tp=2, rank=1), in_process=False)
    whole = FusedVllm(in_process=False)
    tensors = weights()
    push_weights(slices(tensors), [whole, cut], _settings("tcp"), 1)
    assert _holds(whole.model, tensors)
    parts = [worker.model for worker in cut.workers]
    assert torch.equal(torch.cat([part.o.data for part in parts], 1), tensors["o.weight"])
    assert torch.equal(torch.cat([part.qkv.data[:4] for part in parts]), tensors["q.weight"])
    assert loaded_version([whole, cut]) == 1


def _damage(vllm, at, change):
    """Have one tensor changed after the sender summed it: on its way."""

    def damage(method, arguments):
        for piece in arguments["pieces"] if method == "lowpeak_receive" else ():
            if piece["name"] == at:
                change(arguments["data"], piece)

    vllm.before = damage


def _flip(data, piece):
    data[piece["offset"]] ^= 1


def _swap(data, piece):
    words = data[piece["offset"] : piece["offset"] + 8].view(2, 4)
    words.copy_(words.flip(0))


@pytest.mark.parametrize("change", [_flip, _swap])
@pytest.mark.parametrize("name", ["embed.weight", "k.weight", "o.weight", "norm.weight"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_tensor_that_is_damaged_on_its_way_is_named_and_nothing_is_committed(name, change, tp):
    vllm = FusedVllm(*(FusedModel(tp=tp, rank=rank) for rank in range(tp)))
    push_weights(slices(weights()), [vllm], _settings(), 1)
    _damage(vllm, name, change)
    with pytest.raises(EngineError, match=rf": {name}\.$"):
        push_weights(slices(weights(1)), [vllm], _settings(), 2)
    assert vllm.versions() == [None] * tp


class MisplacingModel(FusedModel):
    """Puts v over k as well, after k was right."""

    def load_weights(self, weights):
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if name == "v.weight":
                self.qkv.data[8:12].copy_(tensor)  # and so over k


class TransformingModel(FusedModel):
    """Transforms a tensor in place after it has copied it, as vLLM does with Mamba's A_log."""

    def load_weights(self, weights):
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if name == "norm.weight":
                self.norm.data.copy_(-torch.exp(self.norm.data))


def test_a_tensor_that_the_engine_transforms_is_verified_at_both_ends():
    vllm, tensors = FusedVllm(TransformingModel()), weights()
    push_weights(slices(tensors), [vllm], _settings(), 1)
    assert torch.equal(vllm.model.norm.data, -torch.exp(tensors["norm.weight"]))
    verify_unchanged([vllm])
    vllm.model.norm.data[3] += 1
    with pytest.raises(EngineError, match=r": norm\.weight\.$"):
        verify_unchanged([vllm])
    _damage(vllm, "norm.weight", lambda data, piece: data[piece["offset"] :].add_(1))
    with pytest.raises(EngineError, match=r": norm\.weight"):
        push_weights(slices(tensors), [vllm], _settings(), 2)


class JoinedModel(nn.Module):
    """A model of transformers' in one parameter of zeros, whose values do not tell what did not come."""

    rank = 0

    def __init__(self, model):
        super().__init__()
        self.hf_config = model.config
        self.names = [name for name, _ in model.named_parameters()]
        self.ends = [0, *accumulate(parameter.numel() for parameter in model.parameters())]
        self.joined = nn.Parameter(torch.zeros(self.ends[-1]))

    def load_weights(self, weights):
        for name, tensor in weights:
            i = self.names.index(name)
            self.joined.data[self.ends[i] : self.ends[i + 1]].copy_(tensor.view(-1))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tensor_that_the_models_configuration_asks_for_and_that_did_not_come_is_named(tied):
    model = tiny_model(tied=tied)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    push_weights(slices(tensors), [FusedVllm(JoinedModel(model))], _settings(bucket_bytes=1 << 12), 1)
    lost = next(name for name in tensors if "k_proj" in name)
    del tensors[lost]
    vllm = FusedVllm(JoinedModel(tiny_model(tied=tied)))
    with pytest.raises(EngineError, match=rf": {lost}\.$"):
        push_weights(slices(tensors), [vllm], _settings(bucket_bytes=1 << 12), 1)


def test_names_that_are_not_the_configurations_tell_nothing_of_what_lacks():
    names = CheckpointNames(tiny_model().config)
    own = [name for name, _ in tiny_model().named_parameters()]
    assert names.missing(own) == []
    assert names.missing(own[2:]) == sorted(own[:2])
    assert names.missing([*own[2:], "another"]) == CheckpointNames(None).missing(own) == []


class TakesTheTop(FusedModel):
    """Takes as many rows as it has and does not ask whether there are more."""

    def load_weights(self, weights):
        for name, tensor in weights:
            super().load_weights([(name, tensor[:12] if name == "o.weight" else tensor)])


def lacking(name):
    return slices({other: tensor for other, tensor in weights().items() if other != name})


def changed(name, shape):
    return slices(weights() | {name: torch.ones(shape)})


HALF = WeightSlice("norm.weight", (12,), torch.float32, 0, torch.ones(6))


@pytest.mark.parametrize(
    ("pieces", "model", "named"),
    [
        (lambda: lacking("norm.weight"), FusedModel, r": norm\.$"),
        (lambda: lacking("v.weight"), FusedModel, r": qkv\.$"),
        (lambda: lacking("embed.weight"), FusedModel, r": embed\.$"),
        (lambda: changed("foo.weight", (3,)), FusedModel, r"foo\.weight .* 3 "),
        (lambda: changed("o.weight", (12, 9)), FusedModel, r"o\.weight .* 12x9 "),
        (lambda: changed("o.weight", (14, 8)), TakesTheTop, r"o\.weight"),
        (lambda: [HALF, HALF], FusedModel, r"norm\.weight"),
        (lambda: slices(weights()), MisplacingModel, r": k\.weight\.$"),
        (lambda: slices(weights()), lambda: FusedModel(tied=False), r": head\.$"),
    ],
)
def test_an_update_that_does_not_make_the_model_the_policy_is_refused_with_the_name(pieces, model, named):
    vllm = FusedVllm(model(), in_process=model is not TakesTheTop)
    with pytest.raises(EngineError, match=named):
        push_weights(pieces(), [vllm], _settings("auto"), 1)
    assert vllm.versions() == [None]


def test_slices_are_taken_to_their_end_when_an_engine_fails_midway():
    vllm, taken = FusedVllm(), []

    def watched():
        for piece in slices(weights()):
            taken.append(piece.name)
            yield piece

    def die(method, arguments):
        if method == "lowpeak_receive" and vllm.calls.count(method) == 2:
            raise LostEngineError

    vllm.before = die
    with pytest.raises(LostEngineError):
        push_weights(watched(), [vllm], _settings(), 1)
    assert len(taken) == len(list(slices(weights())))
    assert vllm.versions() == [None]


@pytest.mark.parametrize("transport", ["process", "tcp"])
def test_an_error_of_the_policy_ends_the_update_without_a_version_and_the_next_one_is_taken(transport):
    def broken():
        yield next(iter(slices(weights())))
        raise RuntimeError

    vllm = FusedVllm(in_process=transport == "process")
    push_weights(slices(weights()), [vllm], _settings(transport), 1)
    with pytest.raises(RuntimeError):
        push_weights(broken(), [vllm], _settings(transport), 2)
    assert vllm.versions() == [None]
    push_weights(slices(weights()), [vllm], _settings(transport), 3)
    assert vllm.versions() == [3]


def test_the_version_is_none_from_the_first_bucket_until_all_is_verified():
    vllm = FusedVllm()
    push_weights(slices(weights()), [vllm], _settings(), 1)
    seen = []
    vllm.before = lambda method, arguments: (
        seen.append(vllm.workers[0].lowpeak_identity()["policy_version"])
        if method in ("lowpeak_receive", "lowpeak_verify", "lowpeak_commit")
        else None
    )
    push_weights(slices(weights()), [vllm], _settings(), 2)
    assert set(seen) == {None}
    assert vllm.versions() == [2]


def test_tensors_that_do_not_change_come_once_and_are_verified_again():
    vllm, tensors = FusedVllm(), weights()
    frozen = {"embed.weight", "o.weight", "k.weight"}
    assert push_weights(slices(tensors), [vllm], _settings(), 1, unchanged=frozen).num_bytes == num_bytes(tensors)
    tensors |= {name: weights(5)[name] for name in ("q.weight", "v.weight", "norm.weight")}
    moved = {name: tensor for name, tensor in tensors.items() if name not in frozen}
    assert push_weights(slices(tensors), [vllm], _settings(), 2, unchanged=frozen).num_bytes == num_bytes(moved)
    assert _holds(vllm.model, tensors)
    tensors["k.weight"] = tensors["k.weight"] + 1
    with pytest.raises(LostEngineError, match=r": k\.weight\. "):  # as of another run; a lost engine gets everything
        push_weights(slices(tensors), [vllm], _settings(), 3, unchanged=frozen)
    assert push_weights(slices(tensors), [vllm], _settings(), 3, unchanged=frozen).num_bytes == num_bytes(tensors)
    assert _holds(vllm.model, tensors)
    restarted = FusedVllm()
    assert push_weights(slices(tensors), [restarted], _settings(), 3, unchanged=set(tensors)).num_bytes == num_bytes(
        tensors
    )
    assert _holds(restarted.model, tensors)


def test_without_proof_weights_arrive_and_what_lacks_is_still_refused():
    vllm = FusedVllm()
    push_weights(slices(weights()), [vllm], _settings(verify=False), 1)
    assert _holds(vllm.model, weights())
    with pytest.raises(EngineError, match="norm"):
        push_weights(slices({"embed.weight": weights()["embed.weight"]}), [vllm], _settings(verify=False), 2)


def test_what_changes_after_the_push_is_named_by_a_later_proof():
    vllm = FusedVllm()
    with pytest.raises(EngineError):
        verify_unchanged([vllm])  # it holds no version
    push_weights(slices(weights()), [vllm], _settings(), 1)
    verify_unchanged([vllm])
    key, value = vllm.model.qkv.data[8:12].clone(), vllm.model.qkv.data[12:].clone()
    vllm.model.qkv.data[8:12], vllm.model.qkv.data[12:] = value, key
    with pytest.raises(EngineError, match=r": k\.weight, v\.weight\.$"):
        verify_unchanged([vllm])
    push_weights(slices(weights()), [vllm], _settings(), 1)
    vllm.model.qkv.data[9, 3] += 1
    with pytest.raises(EngineError, match=r": k\.weight\.$"):
        verify_unchanged([vllm])
    assert loaded_version([vllm]) is None


def test_no_slices_are_an_error():
    with pytest.raises(EngineError):
        push_weights([], [FusedVllm()], _settings(), 1)


def test_parameters_of_half_precision_beside_others_are_verified_in_their_own_dtype():
    model, tensors = FusedModel().bfloat16(), weights(dtype=torch.bfloat16)
    push_weights(slices(tensors), [FusedVllm(model)], _settings(), 1)
    assert _holds(model, tensors)
    model.norm = torch.nn.Parameter(model.norm.data.float())
    push_weights(slices(tensors), [FusedVllm(model)], _settings(), 1)
    assert torch.equal(model.norm.data, tensors["norm.weight"].float())
