"""Scoring the model as it is now: the validation loss, the accuracy of a classifier, and the answers to prompts.

Answers are greedy, by the model's own `generate`, until the token that ends a text or `new_tokens`. GSM8K's rule
(openai/grade-school-math): what counts is the number behind `####`, without its thousands separators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from blocktrain.chain.freezing import evaluating
from blocktrain.data.kinds import TrainingData
from blocktrain.parallel.ranks import Ranks
from blocktrain.records.run_records import Sample
from blocktrain.runtime import to_device
from blocktrain.train.context import TrainingContext


def ask(context: TrainingContext, model: nn.Module, *, step: int) -> list[Sample]:
    """The answers to the first `evaluation.generate` validation conversations, as records of `step`; none where that
    is 0. The model must be in eval mode."""
    settings, conversations, tokenizer = context.config.evaluation, context.data.conversations, context.tokenizer
    if not settings.generate or conversations is None or tokenizer is None:
        return []
    count = min(settings.generate, conversations.num_conversations)
    found = [conversations.prompt_and_answer(index) for index in range(count)]
    samples = []
    for start in range(0, len(found), context.evaluation_rows):
        part = found[start : start + context.evaluation_rows]
        answers = greedy(model, [prompt for prompt, _ in part], tokenizer.eos, settings.new_tokens)
        for (prompt, wanted), ids in zip(part, answers, strict=True):
            text, expected = (tokenizer.decode(_until(each, tokenizer.eos).tolist()).strip() for each in (ids, wanted))
            correct = final_answer(text, settings.answer_marker) == final_answer(expected, settings.answer_marker)
            shown = tokenizer.decode(prompt.tolist())
            samples.append(Sample(step=step, prompt=shown, text=text, expected=expected, correct=correct))
    return samples


@torch.no_grad()
def greedy(model: nn.Module, prompts: Sequence[np.ndarray], end: int, new_tokens: int) -> list[np.ndarray]:
    """The model's continuation of each prompt, int64 arrays, up to and without the token `end`.

    Prompts are filled up on the left, where the attention mask hides them; a model with fewer positions than prompt and
    answer need writes less.
    """
    from transformers import GenerationConfig

    longest = max(len(prompt) for prompt in prompts)
    ids = np.full((len(prompts), longest), end, np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    device, pretrained = next(model.parameters()).device, cast(Any, model)
    positions = getattr(pretrained.config.get_text_config(), "max_position_embeddings", None)
    limit = new_tokens if not isinstance(positions, int) else min(new_tokens, positions - longest)
    if limit < 1:
        return [np.empty(0, np.int64) for _ in prompts]
    settings = GenerationConfig(
        max_new_tokens=limit, do_sample=False, use_cache=True, eos_token_id=end, pad_token_id=end, bos_token_id=None
    )
    written = pretrained.generate(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=torch.from_numpy(mask).to(device),
        generation_config=settings,
    )[:, longest:].cpu()
    return [_until(row.numpy(), end) for row in written]


def final_answer(text: str, marker: str | None) -> str | None:
    """The part of an answer that is compared: the word after the first `marker`, without commas and full stops at its
    end; None where there is no marker. Without a marker the whole text, stripped.

    >>> final_answer("2 + 1999 = 2001\\n#### 2,001.", "####")
    '2001'
    """
    if marker is None:
        return text.strip()
    _, found, after = text.partition(marker)
    words = after.split()
    return words[0].replace(",", "").rstrip(".") if found and words else None


def _until(ids: np.ndarray, end: int) -> np.ndarray:
    places = np.flatnonzero(ids == end)
    return ids[: places[0]] if len(places) else ids


@dataclass(frozen=True, kw_only=True)
class Score:
    """Means over validation rows.

    loss: in nats per token, image or text. loss_per_byte: in nats per byte of text, where every token is predicted.
    accuracy: the share of rows that are classified correctly. exact_match: the share of generated answers that are
    correct.
    """

    loss: float
    loss_per_byte: float | None = None
    accuracy: float | None = None
    exact_match: float | None = None

    def to_event(self) -> dict[str, float | None]:
        """The fields of an evaluation record."""
        fields = {"loss": self.loss, "loss_per_byte": self.loss_per_byte, "accuracy": self.accuracy}
        return fields if self.exact_match is None else {**fields, "exact_match": self.exact_match}


@torch.no_grad()
def score(
    data: TrainingData,
    model: nn.Module,
    *,
    rows: int,
    batch_rows: int,
    device: torch.device,
    ranks: Ranks | None = None,
) -> Score:
    """The score of `model` on the first `rows` validation rows, `batch_rows` at a time. The model must be in eval mode.

    Collective where there are several ranks: they take turns with the batches. The losses are summed exactly, so the
    score does not depend on the number of ranks.
    """
    ranks = ranks or Ranks()
    rows = min(rows, len(data.validation))
    starts = range(0, rows, batch_rows)
    losses, weights, correct = [], [], 0
    own_starts = list(starts[ranks.rank :: ranks.size])
    missing = -(-len(starts) // ranks.size) - len(own_starts)  # 1 where another rank has one batch more, else 0
    for start in own_starts:
        indices = range(start, min(start + batch_rows, rows))
        batch = to_device(data.validation.batch(indices), device)
        output = model(**batch)
        weights.append(int(data.validation.weights(indices).sum()))
        losses.append(output.loss.item() * weights[-1])
        if data.classes is not None:
            correct += int((output.logits.argmax(-1) == batch["labels"]).sum())
    if missing:  # sharded weights are all-gathered in the forward pass, so every rank must run it equally often
        model(**to_device(data.validation.batch([0]), device))
    gathered = ranks.all_gather([correct, sum(weights), *losses, *[0.0] * missing])
    correct, weight = (int(sum(figures[at] for figures in gathered)) for at in (0, 1))
    loss = math.fsum(loss for figures in gathered for loss in figures[2:]) / weight
    if data.classes is not None:
        return Score(loss=loss, accuracy=correct / rows)
    return Score(loss=loss, loss_per_byte=None if data.bytes_per_token is None else loss / data.bytes_per_token)


def evaluate(context: TrainingContext, model: nn.Module, *, step: int) -> tuple[Score, list[Sample]]:
    """Evaluate `model`, in eval mode, as `[evaluation]` says, after `step` steps. Collective."""
    settings = context.config.evaluation
    with evaluating(model):
        scored = score(
            context.data,
            model,
            rows=settings.rows,
            batch_rows=context.evaluation_rows,
            device=context.device,
            ranks=context.ranks,
        )
        samples = ask(context, model, step=step)
    if samples:
        scored = replace(scored, exact_match=sum(sample.correct for sample in samples) / len(samples))
    return scored, samples
