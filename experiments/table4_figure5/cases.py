"""Tables 4 and 8, memory, and Figure 5: peaks by share of unfrozen parameters, tracked on tensors without memory.

The paper's figures hold weights, gradients and moments alone (fp32 Adam, 4 + 12 / M bytes a parameter). Ours are what
was alive at the worst moment of a step of the package's own code, on 8 tokens, so that activations hardly count. The
tracker is exact: no scale is reduced, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from runner import Case, Experiment, Figures, Place, Results, markdown

import blocktrain as bt
from blocktrain.memory.fake import fake_copy
from blocktrain.plan.hardware import GIB
from blocktrain.plan.presets import find_model
from blocktrain.train.predict_memory import StepShape, predicted_peaks
from blocktrain.train.verify_plan import meta_model

TOKENS = 8
# GiB: full training, three blocks
PAPER = {
    "g-1.6b": (24.077, 12.038), "g-5.4b": (81.881, 40.942), "g-10b": (160.738, 80.370), "g-20b": (312.805, 156.402),
    "l-1.5b": (24.632, 11.662), "l-6b": (89.815, 44.908), "l-11b": (175.714, 87.858), "l-23b": (347.539, 173.769),
}  # fmt: skip
BLOCKS = (1, 2, 3, 4, 5)  # Figure 5: shares of 1/2 to 1/5
MODELS = {"tiny": ("gpt2",), "short": tuple(PAPER), "card": tuple(PAPER)}


def peak_case(name: str, scale: str) -> Case:
    """One model: its peak by number of blocks."""

    def run(place: Place) -> Figures:
        spec = find_model(name)
        model = fake_copy(meta_model(spec)).model.train()
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        step = StepShape(loss=lambda model: model(input_ids=tokens, labels=tokens).loss, inputs=[tokens])
        peaks = {}
        for blocks in BLOCKS if scale != "tiny" else (1, 3):
            partition = bt.partition(model, num_blocks=blocks, pieces="modules")
            optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4, fused=True)
            worst = max(predicted_peaks(optimizer, step), key=lambda peak: peak.bytes)
            peaks[str(blocks)] = {"bytes": worst.bytes, "parts": dict(worst.parts)}
            optimizer.close()
        return {"parameters": spec.parameters, "peaks": peaks, "tokens": TOKENS}

    return Case(name=name, scale="whole" if scale != "tiny" else "tiny", run=run)


def cases(scale: str) -> Sequence[Case]:
    """One a model."""
    return [peak_case(name, scale) for name in MODELS[scale]]


def table(results: Results) -> str:
    """GiB, and percent of full training's."""
    rows = []
    for name, (full, third) in PAPER.items():
        record = results.get(f"{name} [whole]")
        if record is None:
            continue
        peaks = {blocks: record["figures"]["peaks"][str(blocks)]["bytes"] for blocks in BLOCKS}
        law = [100 * (4 + 12 / blocks) / 16 for blocks in BLOCKS]
        rows.append(
            [name.upper(), full, peaks[1] / GIB, third, peaks[3] / GIB]
            + [f"{100 * peaks[blocks] / peaks[1]:.0f} ({law[blocks - 1]:.0f})" for blocks in BLOCKS[1:]]
        )
    shares = [f"UFP 1/{blocks}, % of full (law)" for blocks in BLOCKS[1:]]
    return markdown(["model", "paper: full, GiB", "ours", "paper: 1/3", "ours", *shares], rows)


EXPERIMENT = Experiment(name="table4_figure5", cases=cases, table=table)
