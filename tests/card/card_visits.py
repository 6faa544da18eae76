"""What a run does on a card, by the code that `blocktrain train` calls, without numbers: for a pretended card."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pretend_card
import torch
from torch import nn

from blocktrain.modules.placeholder import is_placeholder
from blocktrain.train import context as context_module
from blocktrain.train.blocks_train_module import BLOCKS
from blocktrain.train.config import RunConfig
from blocktrain.train.context import build, load_model_for
from blocktrain.train.evaluate import evaluate
from blocktrain.train.step import take_step
from blocktrain.train.technique import Position


def visit_all(mapping: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build, count and predict, evaluate, then visit every block for two steps.

    Returns the peaks that were predicted ("peaks", in bytes by part), where the host waited in a step ("waits"), and
    whether the steps were of one kernel each ("fused").
    """
    config = RunConfig.from_mapping(mapping)
    at = Position(visit=0, sweep=0, block=0, step=0, tokens=0, seconds=0.0)
    with pretend_card.running(), pretend_card.HostWaits() as host:
        context = build(config, folder)
        opening = BLOCKS.opening(context, BLOCKS.header(context, "bcd"), None)
        prepared = BLOCKS.prepare(context, opening, folder)
        context, techniques, waits = prepared.context, prepared.techniques, Counter[str]()
        groups: list[dict[str, Any]] = []
        evaluate(context, prepared.module.model, step=0)
        with techniques.around_run():
            for visit in context.schedule.visits(context.partition):
                techniques.before_visit(visit)
                with prepared.module.visit(visit, None):
                    techniques.open_visit(visit, at)
                    groups += context.optimizer.param_groups
                    for number in range(2):
                        before = host.seen.copy()
                        with techniques.around_step(visit):
                            place = {"step": 2 * visit.index + number, "visit_step": number}
                            take_step(context, prepared.module, techniques, visit, **place)
                        waits |= host.seen - before
                    techniques.close_visit(at)
        model = context.model
        assert {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())} == {"cuda:0"}
    fused = all(group.get("fused") for group in groups)
    return {"waits": dict(waits), "fused": fused, "peaks": [dict(peak.parts) for peak in opening.memory.blocks]}


def load(mapping: dict[str, Any], folder: Path, saved: torch.dtype | None) -> dict[str, Any]:
    """Build a run. Returns the most bytes on the host and on the card while its model was loaded ("peak"), those of the
    weights at rest ("resting"), and how many scalars the largest weight has ("largest").

    saved: the dtype in which the weights came from a file; None for random ones.
    """

    def load_saved(*arguments: Any, **options: Any) -> nn.Module:
        model = load_model_for(*arguments, **options)
        for parameter in model.parameters() if saved else ():
            parameter.data = parameter.data.to(saved)
        memory.peak.clear()
        return model

    with (
        patch.object(context_module, "load_model_for", load_saved),
        pretend_card.running(),
        pretend_card.HostWaits(),
        pretend_card.DeviceBytes() as memory,
    ):
        built = build(RunConfig.from_mapping(mapping), folder)
        model, stored = built.model, built.optimizer.tensors()
    assert {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())} == {"cuda:0"}
    plain = [parameter.data for parameter in model.parameters() if not is_placeholder(parameter)]
    return {
        "peak": dict(memory.peak),
        "resting": {
            "cpu": sum(tensor.nbytes for tensor in set(stored["host"])),
            "cuda": sum(tensor.nbytes for tensor in {*plain, *model.buffers(), *stored["frozen"]}),
        },
        "largest": max(parameter.numel() for parameter in model.parameters()),
    }
