"""LISA (Pan et al., arXiv 2403.17919, Algorithm 1), implemented here: its authors publish no package of it alone.

Embedding and head are always trained; of the layers between, `ACTIVE` drawn at random are trained for `EVERY` steps,
then others. One optimizer over all parameters, as in the authors' trainer (LMFlow): a layer that is frozen again keeps
its moments where they are, so that optimizer state grows to that of full training as more layers have been drawn.
"""

from __future__ import annotations

from torch import nn

from blocktrain.compare.external_module import ExternalMethod
from blocktrain.errors import ConfigError
from blocktrain.runtime import permutation
from blocktrain.train.context import TrainingContext

ACTIVE, EVERY = 2, 20  # layers at a time (the paper's gamma), steps (its K)


def lisa(context: TrainingContext, period: int | None) -> ExternalMethod:
    """Trains `ACTIVE` layers at a time for `period` steps (`EVERY` if None)."""
    first, *between, last = context.partition.chain.owned
    if len(between) < ACTIVE:
        raise ConfigError(f"lisa draws {ACTIVE} of the layers between the first and the last; there are {len(between)}")
    always = [*first.values(), *last.values()]
    every = period or EVERY

    def begin(step: int) -> None:
        if step % every == 0:
            drawn = permutation(len(between), context.config.seed, step // every)[:ACTIVE]
            _train_only(context.model, [*always, *(p for index in drawn for p in between[index].values())])

    named = dict(context.model.named_parameters())
    return ExternalMethod(model=context.model, optimizers=context.optimizer.factory.build(named), begin=begin)


def draws(context: TrainingContext) -> int:
    """About how many draws it takes until each layer was trained once."""
    return -(-(len(context.partition.chain.layers) - 2) // ACTIVE)


def _train_only(model: nn.Module, trained: list[nn.Parameter]) -> None:
    wanted = {id(parameter) for parameter in trained}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
