"""A run is built from its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

from blocktrain.chain import model_loading
from blocktrain.train.context import build

from ..tiny_models import LLAMA_SIZES


@pytest.mark.parametrize("precision", ["bf16-exact", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_in_16_bits_gives_the_weights_that_it_gives_in_fp32(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    """It is not loaded in fp32, which takes twice the memory; fp16 has bits that bf16 lacks."""
    sizes = {**LLAMA_SIZES, "vocab_size": 300}
    hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=4, **sizes)).to(dtype).save_pretrained(tmp_path / "saved")  # pyright: ignore[reportArgumentType]
    config = tiny(f"precision={precision}", "text.tokenizer=bytes")
    mapping = config.to_mapping()
    mapping["model"] = {"path": str(tmp_path / "saved")}
    config = type(config).from_mapping(mapping)
    half = build(config, tmp_path / "run")
    monkeypatch.setattr(model_loading, "lossless_dtype", lambda _: torch.float32)
    whole = build(config, tmp_path / "run")
    assert_close(half.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert_close(half.optimizer.state_dict(), whole.optimizer.state_dict(), rtol=0, atol=0)
    assert_close(dict(half.model.named_buffers()), dict(whole.model.named_buffers()), rtol=0, atol=0)


def test_an_evaluation_takes_as_many_rows_at_a_time_as_a_step_unless_it_says_how_many(tiny, tmp_path: Path) -> None:
    """It took 16, whatever a step took: 21 GB of logits with a vocabulary of 128k."""
    context = build(tiny("batch.micro_rows=2", "evaluation.batch_rows=none"), tmp_path)
    assert context.evaluation_rows == 2
    assert build(tiny("batch.micro_rows=2"), tmp_path).evaluation_rows == 4
