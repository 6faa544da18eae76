"""Scoring the model as it is now: the validation loss, and its answers to validation prompts."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from blocktrain.chain.freezing import evaluating
from blocktrain.train.context import TrainingContext
from blocktrain.train.generation_eval import Answer, ask
from blocktrain.train.score import Score, score


def evaluate(context: TrainingContext, model: nn.Module) -> tuple[Score, list[Answer]]:
    """Evaluate `model`, in eval mode, as `[evaluation]` says. Collective."""
    settings = context.config.evaluation
    with evaluating(model):
        scored = score(
            context.data,
            model,
            rows=settings.rows,
            batch_rows=settings.batch_rows,
            device=context.device,
            ranks=context.ranks,
        )
        answers = ask(context, model)
    if answers:
        scored = replace(scored, exact_match=sum(answer.correct for answer in answers) / len(answers))
    return scored, answers
