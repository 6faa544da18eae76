"""What a timed step runs."""

from __future__ import annotations

from pathlib import Path

from stepping import steps_of

from blocktrain.train.context import build
from blocktrain.train.techniques.growth import growing_visits


def test_a_step_of_a_growing_model_is_timed_without_the_layers_it_leaves_out(tiny, tmp_path: Path) -> None:
    context = build(tiny("model.zero_residuals=true"), tmp_path)
    visit, layers = next(growing_visits(context))
    ran = []
    for layer in layers:
        for module in layer.modules.values():
            next(module.children()).register_forward_hook(lambda *_, name=layer.name: ran.append(name))
    assert steps_of(context, visit.block, without=layers)() > 0
    assert not ran
    steps_of(context, visit.block)()
    assert set(ran) == {layer.name for layer in layers}
