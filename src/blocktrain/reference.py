"""Algorithm 1 of the paper, written as plainly as possible: every fast path is tested against this file.

There is no partition, no store, no cache and no master: only fp32 weights, lists of parameters, and PyTorch. With one
submodel it is an ordinary training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def split_into_submodels(chain: Sequence[Sequence[nn.Module]], sizes: Sequence[int]) -> list[list[nn.Module]]:
    """Line 2: contiguous submodels of `sizes` layers; a layer of `chain` is a list of modules."""
    if sum(sizes) != len(chain):
        raise ValueError(f"sizes {list(sizes)} do not add up to the {len(chain)} layers of the chain")
    layers = iter(chain)
    return [[module for _ in range(size) for module in next(layers)] for size in sizes]


def parameters_of(submodels: Sequence[Sequence[nn.Module]]) -> list[list[nn.Parameter]]:
    """The parameters of each submodel that require gradients. A tied one belongs to the first submodel that uses it."""
    taken: set[nn.Parameter] = set()
    groups = []
    for modules in submodels:
        group = [p for module in modules for p in module.parameters() if p.requires_grad]
        groups.append([p for p in dict.fromkeys(group) if p not in taken])
        taken.update(group)
    return groups


def train(
    model: nn.Module,
    submodels: Sequence[Sequence[nn.Module]],
    batches: Iterator[Batch],
    make_optimizer: MakeOptimizer,
    *,
    sweeps: int,
    steps_per_visit: int,
    span: str = "block",
    loss_of: Callable[[Any], Tensor] = lambda output: output.loss,
) -> list[float]:
    """Train `model` in place, block by block in ascending order; returns the loss of each step.

    model: called as `model(**batch)`. steps_per_visit: the length of a visit, in place of "until converged" in line 8.
    span: a visit trains its "block", as in the paper, or the "suffix" of all submodels from it on.
    """
    parameters = parameters_of(submodels)
    losses: list[float] = []
    for _ in range(sweeps):  #                                               line 3: repeat
        for i in range(len(parameters)):  #                                  line 4: select submodel i_k cyclically
            end = i + 1 if span == "block" else len(parameters)
            active = [p for group in parameters[i:end] for p in group]
            # Frozen layers: no dropout, BatchNorm does not move.
            model.train(len(active) == sum(map(len, parameters)))
            for p in model.parameters():  #                                  line 5: freeze submodel_j, j != i_k
                p.requires_grad_(False)
                p.grad = None
            for p in active:  #                                              line 6: unfreeze submodel_{i_k}
                p.requires_grad_(True)
            for module in (module for submodel in submodels[i:end] for module in submodel):
                module.train()
            optimizer = make_optimizer(active)  #                            line 7: build its optimizer
            for _ in range(steps_per_visit):  #                              line 8: train until converged
                loss = loss_of(model(**next(batches)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            #                                                                line 9: k <- k + 1
    return losses  #                                                         lines 10, 11: converged
