"""Other packages' methods: each a function that builds what trains, quirks and all.

    pip install 'blocktrain[peers]'

                 trained at once            rates, beside AdamW's      what else is its own
    badam        one block of ours          the same                   moments dropped, masters rebuilt at each switch
    galore       everything                 ten times                  moments of rank r, an SVD every 200 steps
    apollo       everything                 ten times                  scales of rank-r gradients, random projections
    lomo         everything                 a hundred times            SGD inside the backward pass, nothing kept
    adalomo      everything                 half                       the same with Adafactor's averages; CUDA only
    lora         adapters of rank 16        ten times                  the weights themselves are never trained
    offload      everything                 the same                   AdamW's state and step on the host; CUDA only
    lisa         two layers and both ends   the same                   see lisa.py

Rates are where a search starts: the authors' own figures divided by what they use for AdamW. What a package does to
weight decay, learning rates or the first visit is left as it is: that is what its users get.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from blocktrain.chain.block import Partition
from blocktrain.chain.partition import partition_by_config
from blocktrain.compare.adapter import import_package, silenced
from blocktrain.compare.external_module import ExternalMethod
from blocktrain.errors import ConfigError
from blocktrain.optim.factory import find_optimizer_class
from blocktrain.train.context import TrainingContext

UPDATE_PROJECTION_EVERY = 200  # steps, GaLore's and APOLLO's default
LORA_RANK = 16


def badam(context: TrainingContext, period: int | None) -> ExternalMethod:
    """BAdam (Luo et al., arXiv 2404.02827) over the blocks of the configuration, each for as long as a visit lasts.

    It finds blocks by the text of parameters' names, so it gets whole names. It warns of fp32 weights and prints every
    switch: both are silenced.
    """
    config, model = context.config, context.model
    if config.schedule.kind != "cyclic":
        raise ConfigError(f"badam cannot follow schedule.kind = '{config.schedule.kind}'; compare it with \"cyclic\"")
    order = {"ascending": "ascending", "descending": "descending", "shuffled": "random"}.get(str(config.schedule.order))
    if order is None:
        raise ConfigError(f"badam cannot follow schedule.order = {config.schedule.order}; use a named order")
    package = import_package("badam", "badam", "badam")
    named = list(model.named_parameters())
    bases = context.optimizer.factory.build(dict(named))
    if len(bases) != 1:
        raise ConfigError(f"badam wraps one optimizer, and {config.optimizer.name} needs a second one; use AdamW")
    with silenced():
        optimizer = package.BlockOptimizer(
            base_optimizer=bases[0],
            named_parameters_list=named,
            block_prefix_list=[list(block.parameters) for block in configured_blocks(context)],
            switch_block_every=period or config.schedule.visit.in_steps(context.geometry),
            switch_mode=order,
            verbose=0,
        )
    switch = optimizer.switch_trainable_params

    def silent_switch(*arguments: Any) -> None:
        with silenced():
            switch(*arguments)

    optimizer.switch_trainable_params = silent_switch
    return ExternalMethod(
        model=model,
        optimizers=[optimizer],
        masters=lambda: list(optimizer.param_idx2hp.values()),  # another dictionary after each switch
        state=lambda: bases[0].state,
    )


def configured_blocks(context: TrainingContext) -> Partition:
    """Those of ours, where the context itself has the model whole."""
    return partition_by_config(context.model, context.config.blocks, batch=context.data.train.batch([0]))


def galore(context: TrainingContext, period: int | None) -> ExternalMethod:
    """GaLore (Zhao et al., arXiv 2403.03507): rank a quarter of the width, scale .25, as its pre-training recipe."""
    package = import_package("galore_torch", "galore", "galore-torch")
    options = {"update_proj_gap": period or UPDATE_PROJECTION_EVERY, "scale": 0.25, "proj_type": "std"}
    with silenced():
        optimizer = package.GaLoreAdamW(_low_rank_groups(context, options), lr=context.config.optimizer.lr)
    return ExternalMethod(model=context.model, optimizers=[optimizer])


def apollo(context: TrainingContext, period: int | None) -> ExternalMethod:
    """APOLLO (Zhu et al., arXiv 2412.05270): rank a quarter of the width, a scale for each channel."""
    package = import_package("apollo_torch", "apollo", "apollo-torch")
    options = {"update_proj_gap": period or UPDATE_PROJECTION_EVERY, "scale": 1.0, "proj_type": "std"}
    options |= {"proj": "random", "scale_type": "channel"}
    optimizer = package.APOLLOAdamW(_low_rank_groups(context, options), lr=context.config.optimizer.lr)
    return ExternalMethod(model=context.model, optimizers=[optimizer])


def _low_rank_groups(context: TrainingContext, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Matrices between the first and the last layer in a group with `options` and a rank, all else in another."""
    between = [p for owned in context.partition.chain.owned[1:-1] for p in owned.values() if p.dim() == 2]
    if not between:
        raise ConfigError(
            "low-rank gradients are for matrices, and this model has none between its first and last layer"
        )
    matrices = {id(parameter) for parameter in between}
    others = [parameter for parameter in context.model.parameters() if id(parameter) not in matrices]
    decay = {"weight_decay": context.config.optimizer.weight_decay or 0.0}
    rank = max(min(min(p.shape) for p in between) // 4, 1)
    return [{"params": others}, {"params": between, "rank": rank, **options, **decay}]


def lomo(context: TrainingContext, period: int | None) -> ExternalMethod:
    """LOMO (Lv et al., arXiv 2306.09782): clipping takes a second backward pass, which its users pay for too."""
    _require_whole_batches(context, "lomo")
    most = context.config.optimizer.max_grad_norm
    decay = context.config.optimizer.weight_decay or 0.0
    optimizer = import_package("lomo_optim", "lomo", "lomo-optim").Lomo(
        context.model, lr=context.config.optimizer.lr, clip_grad_norm=most, weight_decay=decay
    )

    def backward(loss: torch.Tensor, factor: float) -> None:
        if most is not None:
            optimizer.grad_norm(loss)
        optimizer.fused_backward(loss, context.config.optimizer.lr * factor)

    return ExternalMethod(model=context.model, optimizers=[], backward=backward, state=dict)


def adalomo(context: TrainingContext, period: int | None) -> ExternalMethod:
    """AdaLomo (Lv et al., arXiv 2310.10195), which clips each matrix's update by itself."""
    _require_whole_batches(context, "adalomo")
    optimizer = import_package("lomo_optim", "adalomo", "lomo-optim").AdaLomo(
        context.model, lr=context.config.optimizer.lr, weight_decay=context.config.optimizer.weight_decay or 0.0
    )
    return ExternalMethod(
        model=context.model,
        optimizers=[],
        backward=lambda loss, factor: optimizer.fused_backward(loss, context.config.optimizer.lr * factor),
        state=lambda: [optimizer.exp_avg_sq, optimizer.exp_avg_sq_row, optimizer.exp_avg_sq_col],
    )


def lora(context: TrainingContext, period: int | None) -> ExternalMethod:
    """LoRA (Hu et al., arXiv 2106.09685) of rank 16 on every linear layer but the head: for pretrained models. A head
    that tells texts apart is new, and trained as a whole."""
    package = import_package("peft", "lora", "peft")
    transposed = any(type(module).__name__ == "Conv1D" for module in context.model.modules())  # GPT-2's linear layers
    settings = package.LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        target_modules="all-linear",
        fan_in_fan_out=transposed,
        task_type="SEQ_CLS" if context.data.unit == "texts" else None,
    )
    try:
        with silenced():
            model: nn.Module = package.get_peft_model(context.model, settings)
    except ValueError as error:
        raise ConfigError(f"peft cannot put adapters into {type(context.model).__name__}: {error}") from None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ExternalMethod(
        model=model, optimizers=[torch.optim.AdamW(trained, lr=context.config.optimizer.lr, weight_decay=0.0)]
    )


def offload(context: TrainingContext, period: int | None) -> ExternalMethod:
    """Full training with the optimizer on the host, by torchao's `CPUOffloadOptimizer`."""
    cpu_offload = import_package("torchao.optim", "offload", "torchao").CPUOffloadOptimizer
    options = context.config.optimizer
    kept = {} if options.weight_decay is None else {"weight_decay": options.weight_decay}
    cls = find_optimizer_class(options.name)
    optimizer = cpu_offload(list(context.model.parameters()), cls, lr=options.lr, **kept, **options.options)
    return ExternalMethod(model=context.model, optimizers=[optimizer], state=dict)  # nothing of it is on the device


def _require_whole_batches(context: TrainingContext, name: str) -> None:
    if context.micro_rows != context.config.batch.rows:
        raise ConfigError(f"{name} updates inside the backward pass and cannot accumulate; leave batch.micro_rows out")
