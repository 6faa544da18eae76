"""Answers: greedy, as many at once as one wants, compared by what comes behind a marker."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blocktrain.train.evaluate import final_answer, greedy


@pytest.fixture
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
    return model


def test_prompts_of_different_lengths_are_answered_as_each_alone(model):
    prompts = [np.arange(5, 5 + length) for length in (3, 9, 6)]
    together = greedy(model, prompts, 1, 8)
    alone = [greedy(model, [prompt], 1, 8)[0] for prompt in prompts]
    assert [ids.tolist() for ids in together] == [ids.tolist() for ids in alone]
    plain = torch.tensor(prompts[1])[None]
    for _ in range(8):
        plain = torch.cat([plain, model(input_ids=plain).logits[:, -1:].argmax(-1)], 1)
    assert plain[0, 9:].tolist()[: len(together[1])] == together[1].tolist()


def test_an_answer_ends_before_the_token_that_ends_texts(model):
    first = int(greedy(model, [np.arange(5, 8)], 1, 1)[0][0])
    assert greedy(model, [np.arange(5, 8)], first, 8)[0].tolist() == []


def test_no_room_for_an_answer_is_an_empty_answer(model):
    prompt = np.full(32, 7)
    assert greedy(model, [prompt], 1, 8)[0].tolist() == []
    assert len(greedy(model, [prompt[:30]], 1, 8)[0]) <= 2


@pytest.mark.parametrize(
    ("text", "marker", "wanted"),
    [
        ("so\n#### 1,234", "####", "1234"),
        ("#### 12 apples", "####", "12"),
        ("#### 12. #### 13", "####", "12"),
        ("12", "####", None),
        ("####", "####", None),
        (" yes \n", None, "yes"),
    ],
)
def test_final_answer(text: str, marker: str | None, wanted: str | None):
    assert final_answer(text, marker) == wanted
