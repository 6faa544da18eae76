"""Table 3: a step with the optimizer on the host beside a step in three blocks, on one card; and the peak of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from runner import Case, Experiment, Figures, Place, Results, markdown
from stepping import blocks_step, interleaved, offloaded_step, peak_of, random_model

from blocktrain.units import format_bytes

PAPER = {  # GPUs, milliseconds offloaded, in three blocks
    "g-1.6b": (1, 2403, 378), "g-5.4b": (4, 4373, 1211), "g-10b": (8, 7076, 2414),
    "l-1.5b": (1, 4824, 415), "l-6b": (4, 6367, 941), "l-11b": (8, 7292, 1807),
}  # fmt: skip
MODELS = {"tiny": ("gpt2",), "short": ("gpt2",), "card": ("g-1.6b", "l-1.5b")}
TOKENS = {"tiny": 8, "short": 64, "card": 1024}


def offload_case(name: str, scale: str) -> Case:
    """One model."""

    def run(place: Place) -> Figures:
        tokens = torch.randint(0, 32000, (1, TOKENS[scale]), device=place.device)
        model = random_model(name, place.device)
        steps = {"blocks": blocks_step(model, tokens, 3)}
        steps["offload"] = offloaded_step(model, tokens)
        peaks = {each: peak_of(step, place.device) for each, step in steps.items()}
        return {**interleaved(steps, "offload", rounds=3), "peak_bytes": peaks}

    return Case(name=name, scale=f"whole model, fp32, 1 x {TOKENS[scale]} tokens", run=run)


def cases(scale: str) -> Sequence[Case]:
    """One a model that a card holds."""
    return [offload_case(name, scale) for name in MODELS[scale]]


def table(results: Results) -> str:
    """The paper's milliseconds beside ours."""
    rows = []
    for name, (cards, offload, blocks) in PAPER.items():
        rows.append(["paper", name.upper(), cards, str(offload), str(blocks), blocks / offload, None, None])
    for record in results.values():
        steps, peaks = record["figures"]["steps"], record["figures"]["peak_bytes"]
        times = [steps["offload"]["ms"], steps["blocks"]["ms"], steps["blocks"]["ratio"]]
        held = [format_bytes(peaks[each]) for each in ("offload", "blocks")]
        rows.append(["ours", record["case"].upper(), 1, *times, *held])
    return markdown(["", "model", "GPUs", "offloaded, ms", "three blocks, ms", "ratio", "peak", "peak"], rows)


EXPERIMENT = Experiment(name="table3", cases=cases, table=table)
