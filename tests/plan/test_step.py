"""Step times where they can be reasoned about: shares that must come out, and what each way to spread costs."""

from dataclasses import replace

import pytest

from blocktrain.plan.hardware import Rates
from blocktrain.plan.layout import Layout, find_precision
from blocktrain.plan.presets import find_model
from blocktrain.plan.step import Setting, step_time

# Products are all that takes time.
PRODUCTS = Rates(
    matmul_flops={4: 1e13, 2: 1e14}, attention_flops={4: 1e30, 2: 1e30}, memory_bytes=1e30, kernel_seconds=0.0,
    update_scalars=1e30, host_link_bytes=1e30, peer_link_bytes=1e30, network_bytes=1e30, host_memory_bytes=1e30,
    disk_bytes=1e30, kind="given",
)  # fmt: skip
SETTING = Setting(seq=1024, rows=8, rates=PRODUCTS)
SPEC = replace(find_model("llama-2-7b"), layers=96, vocabulary=8)  # so deep that head and embedding hardly count


@pytest.mark.parametrize(("blocks", "share"), [(3, 2 / 3), (8, 0.5 + 1 / 16), (32, 0.5 + 1 / 64)])
def test_a_step_in_blocks_takes_the_share_that_theory_says(blocks: int, share: float) -> None:
    """1/2 + 1/(2M) of a full step (docs/prefix.md)."""
    full = step_time(SPEC, Layout(method="full", blocks=1), SETTING).seconds
    assert step_time(SPEC, Layout(blocks=blocks), SETTING).seconds / full == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("blocks", [3, 8])
def test_a_cached_step_too(blocks: int) -> None:
    """(M + 2) / 3M, and (M - 1) / 3M^2 for filling each row once a sweep."""
    full = step_time(SPEC, Layout(method="full", blocks=1), SETTING).seconds
    share = (blocks + 2) / (3 * blocks) + (blocks - 1) / (3 * blocks**2)
    cached = step_time(SPEC, Layout(blocks=blocks, cache="host"), SETTING).seconds
    assert cached / full == pytest.approx(share, abs=0.01)


def test_cards_share_the_rows_and_a_pipeline_has_a_bubble() -> None:
    one = step_time(SPEC, Layout(method="full", blocks=1), SETTING).seconds
    assert step_time(SPEC, Layout(method="full", blocks=1, data=4), SETTING).seconds == pytest.approx(one / 4, rel=0.01)
    two_stages = step_time(SPEC, Layout(method="full", blocks=1, pipeline=2), SETTING)
    assert two_stages.seconds == pytest.approx(one / 2 * (8 + 1) / 8, rel=0.02)
    assert two_stages.parts["bubble"] == pytest.approx(two_stages.seconds / 9, rel=0.01)


def test_only_the_active_gradients_travel() -> None:
    slow = replace(SETTING, rates=replace(PRODUCTS, peer_link_bytes=1e9), overlap=0.0)

    def seconds(blocks: int) -> float:
        return step_time(SPEC, Layout(blocks=blocks, data=2), slow).parts["communication"]

    assert seconds(1) == pytest.approx(4 * SPEC.parameters / 1e9)  # 2 (n - 1) / n of 4 bytes a parameter
    assert seconds(8) == pytest.approx(seconds(1) / 8, rel=0.01)


def test_nodes_talk_over_the_network() -> None:
    rates = replace(PRODUCTS, network_bytes=1e8, peer_link_bytes=1e9)
    near, far = (
        step_time(SPEC, Layout(blocks=8, data=8), replace(SETTING, rates=rates, cards_per_node=n, overlap=0.0)).parts[
            "communication"
        ]
        for n in (8, 4)
    )
    assert far == pytest.approx(10 * near)


def test_recomputation_offload_and_precision() -> None:
    plain = step_time(SPEC, Layout(method="full", blocks=1), SETTING)
    again = step_time(SPEC, Layout(method="full", blocks=1, checkpointing="layers"), SETTING)
    assert again.seconds / plain.seconds == pytest.approx(4 / 3, rel=0.01)
    rates = replace(PRODUCTS, host_link_bytes=1e10, host_memory_bytes=2e10)
    moved = step_time(SPEC, Layout(method="offload", blocks=1), replace(SETTING, rates=rates)).parts["offload"]
    assert moved == pytest.approx(SPEC.parameters * (8 / 1e10 + 28 / 2e10))
    shared = Layout(method="offload", blocks=1, data=4)  # each of the four updates its part
    assert step_time(SPEC, shared, replace(SETTING, rates=rates)).parts["offload"] == pytest.approx(moved / 4)
    half = step_time(SPEC, Layout(method="full", blocks=1, precision=find_precision("bf16-exact")), SETTING)
    assert half.parts["forward"] == pytest.approx(plain.parts["forward"] / 10)
    assert plain.flops == half.flops
    assert find_precision("fp32").weight == 4
