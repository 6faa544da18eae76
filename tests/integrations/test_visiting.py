"""One optimizer that goes from visit to visit by itself: in a plain loop, under schedulers, in Lightning."""

from __future__ import annotations

import gc
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import blocktrain as bt
from blocktrain.errors import ConfigError
from blocktrain.integrations.visiting import VisitingOptimizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lightning_loop.py"


def visiting(model: Any, **options: Any) -> VisitingOptimizer:
    blocks = bt.BlockOptimizer(bt.partition(model, num_blocks=3), torch.optim.AdamW, lr=1e-2, **options)
    return VisitingOptimizer(blocks, bt.Cyclic(visit=bt.Duration.steps(2)))


def backward(model: Any, rows: Any) -> torch.Tensor:
    loss = model(**{key: value[None] for key, value in rows(1)[0].items()}).loss
    loss.backward()
    return loss


def test_it_visits_every_block_in_turn(model, rows) -> None:
    net = model()
    optimizer = visiting(net)
    seen = []
    for _ in range(7):
        wanting = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
        assert wanting == set(optimizer.visit.block.parameters)
        seen.append(optimizer.visit.block.index)
        backward(net, rows)
        optimizer.step()
    assert seen == [0, 0, 1, 1, 2, 2, 0]


def test_a_script_may_end_in_mid_visit() -> None:
    """With masters, too: what is not left by then is not put to rest in an interpreter that shuts down."""
    script = (
        "import torch, blocktrain as bt\n"
        "from blocktrain.integrations.visiting import VisitingOptimizer\n"
        "net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))\n"
        "blocks = bt.BlockOptimizer(bt.partition(net, 3), torch.optim.AdamW, lr=0.1, precision=bt.BF16_EXACT)\n"
        "optimizer = VisitingOptimizer(blocks, bt.Cyclic(visit=bt.Duration.steps(2)))\n"
        "net(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()\n"
        "optimizer.step()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "held",
    [
        "in a cycle",
        *(pytest.param(it, marks=pytest.mark.slow) for it in ("in a function", "by an exit handler", "by a module")),
    ],
)
def test_a_script_may_end_with_a_visit_open_wherever_it_is_held(held: str) -> None:
    """The visit was a generator, which Python closes when it collects it: exceptions were printed at the exit."""
    script = (
        "import atexit, sys, types, torch, blocktrain as bt\n"
        "from blocktrain.integrations.visiting import VisitingOptimizer\n"
        "def make():\n"
        "    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))\n"
        "    blocks = bt.BlockOptimizer(bt.partition(net, 3), torch.optim.AdamW, lr=0.1, precision=bt.INT8)\n"
        "    return net, VisitingOptimizer(blocks, bt.Cyclic(visit=bt.Duration.steps(2)))\n"
        "net, optimizer = make()\n"
        "net(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()\n"
    ) + {
        "in a function": "make()\n",
        "in a cycle": "net.optimizer = [optimizer]; optimizer.net = net; del net, optimizer\n",
        "by an exit handler": "atexit.register(lambda kept: None, optimizer); del optimizer\n",
        "by a module": "sys.modules['kept'] = types.ModuleType('kept'); sys.modules['kept'].it = optimizer\n",
    }[held]
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_visit_that_nobody_leaves_does_not_freeze_the_next_one(model) -> None:
    """An optimizer that was dropped retired its block when Python collected it, under the optimizer that followed."""
    net = model()
    first = visiting(net)
    second = visiting(net)
    del first
    gc.collect()
    assert {n for n, p in net.named_parameters() if p.requires_grad} == set(second.visit.block.parameters)


def test_a_scheduler_sets_the_rate_of_every_group(model, rows) -> None:
    """Also of blocks that are activated later, and with two classes of optimizers."""
    net = model()
    blocks = bt.BlockOptimizer(bt.partition(net, num_blocks=3), torch.optim.Muon, lr=1e-2)
    optimizer = VisitingOptimizer(blocks, bt.Cyclic(visit=bt.Duration.steps(2)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(6):
        backward(net, rows)
        groups = blocks.param_groups  # of the block that this step moves
        optimizer.step()
        scheduler.step()
        rates = [group["lr"] for group in groups]
        assert rates == pytest.approx([1e-2 / (1 + step)] * len(rates))
        assert rates


def test_a_closure_is_run_with_gradients(model, rows) -> None:
    net = model()
    optimizer = visiting(net)
    loss = optimizer.step(lambda: backward(net, rows))
    assert loss.requires_grad
    assert optimizer.blocks.steps == 1


def test_closed_it_holds_nothing(model, rows) -> None:
    net = model()
    optimizer = visiting(net, precision=bt.BF16_EXACT)
    backward(net, rows)
    optimizer.close()
    assert optimizer.blocks.block is None
    assert not any(parameter.requires_grad for parameter in net.parameters())
    with pytest.raises(ConfigError, match="no block is active"):
        optimizer.step()


def test_its_state_goes_through_a_file_that_is_not_unpickled(model, rows, tmp_path: Path) -> None:
    first = model()
    one = visiting(first, precision=bt.BF16_EXACT, state=bt.KeepOnHost())
    for _ in range(3):
        backward(first, rows)
        one.step()
    torch.save(one.state_dict(), tmp_path / "optimizer.pt")
    second = model()
    other = visiting(second, precision=bt.BF16_EXACT, state=bt.KeepOnHost())
    second.load_state_dict(first.state_dict())
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for net, optimizer in ((first, one), (second, other)):
        for _ in range(4):
            backward(net, rows)
            optimizer.step()
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert (one.visit.index, one.visit_step) == (other.visit.index, other.visit_step) == (3, 1)


def test_schedules_it_cannot_follow_are_refused(model) -> None:
    blocks = bt.BlockOptimizer(bt.partition(model(), num_blocks=3), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(ConfigError, match="give the visit in steps"):
        VisitingOptimizer(blocks, bt.Cyclic(visit=bt.Duration.tokens(100)))
    with pytest.raises(ConfigError, match="sweeps = 2: the loop around this optimizer ends the run"):
        VisitingOptimizer(blocks, bt.Cyclic(visit=bt.Duration.steps(2), sweeps=2))


# Lightning asks torch's and its own registries in ways that are about to go, and advises on workers and logging.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:lightning")
def test_lightning_resumes_bit_for_bit(tmp_path: Path) -> None:
    """With the same rows in each batch: resumed in mid-epoch, Lightning starts a plain loader's epoch again."""
    pytest.importorskip("lightning")
    main = runpy.run_path(str(EXAMPLE))["main"]
    main.__globals__["rows"] = lambda count: torch.arange(24).repeat(count, 1)
    whole = main(max_steps=50)
    half = main(max_steps=30)  # in the middle of the second visit
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = main(max_steps=50, resume=str(tmp_path / "half.ckpt"))
    assert resumed.lightning_module.visiting.visit.index == 2
    for name, value in whole.lightning_module.state_dict().items():
        assert torch.equal(value, resumed.lightning_module.state_dict()[name]), name
