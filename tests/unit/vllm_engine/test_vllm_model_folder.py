"""The folder from which vLLM builds a colocated model."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace

import torch
from transformers import AutoTokenizer

from lowpeak.vllm.colocated import ColocatedModelSpec, write_model_folder
from tiny_models import char_tokenizer, tiny_model


def test_models_of_equal_content_have_one_folder_by_which_vllm_finds_what_it_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    model, tokenizer = tiny_model(), char_tokenizer()
    spec = ColocatedModelSpec(model.config, tokenizer, "Any", "float32", torch.device("cpu"), None, False, 0)
    folders = [
        write_model_folder(each, tmp_path / "cache") for each in (spec, spec, replace(spec, architecture="Other"))
    ]
    assert folders[0] == folders[1] != folders[2]
    assert sorted((tmp_path / "cache/lowpeak/vllm-models").iterdir()) == sorted(set(folders))
    assert AutoTokenizer.from_pretrained(folders[0]).get_vocab().items() >= tokenizer.get_vocab().items()
    (tmp_path / "file").touch()
    assert write_model_folder(spec, tmp_path / "file").parent == tmp_path / "temporary"
