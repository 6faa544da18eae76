"""Adapters of the methods that blocks are compared with; importing this package registers them by name.

PYTHONPATH=experiments blocktrain compare CONFIG --methods full,lisa --set 'imports=["rivals"]'
"""

from __future__ import annotations

from blocktrain.compare.adapter import ADAPTERS, Adapter
from rivals import packages
from rivals.lisa import draws, lisa

ADAPTERS |= {
    "adalomo": Adapter(
        build=packages.adalomo,
        rate=0.5,
        optimizer="AdaLomo",
        module="lomo_optim",
        package="lomo-optim",
        cuda_only="lomo-optim 0.1.1 puts AdaLomo's averages on the GPU with .cuda()",
    ),
    "apollo": Adapter(
        build=packages.apollo, rate=10.0, optimizer="APOLLO", module="apollo_torch", package="apollo-torch"
    ),
    "badam": Adapter(
        build=packages.badam,
        module="badam",
        package="badam",
        cycle=lambda context: len(packages.configured_blocks(context)),
    ),
    "galore": Adapter(
        build=packages.galore, rate=10.0, optimizer="GaLore", module="galore_torch", package="galore-torch"
    ),
    "lisa": Adapter(build=lisa, cycle=draws),
    "lomo": Adapter(build=packages.lomo, rate=100.0, optimizer="LOMO", module="lomo_optim", package="lomo-optim"),
    "lora": Adapter(build=packages.lora, rate=10.0, optimizer="AdamW", module="peft", package="peft"),
    "offload": Adapter(
        build=packages.offload,
        module="torchao.optim",
        package="torchao",
        cuda_only="torchao's CPUOffloadOptimizer supports CUDA and XPU devices only",
    ),
}
