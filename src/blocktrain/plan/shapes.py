"""The parameters of a decoder by name, shape and order, as transformers registers them. They decide the cut into blocks
smaller than a layer (`chain/segment.py`), and the order in which an optimizer step updates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, cast

from blocktrain.chain.balance import balanced, balanced_up_to
from blocktrain.chain.segment import Segment, module_segments, segments_up_to
from blocktrain.plan.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class ParameterShape:
    """Takes the place of a parameter in `chain/segment.py`."""

    shape: tuple[int, ...]

    def numel(self) -> int:
        """Scalars."""
        return prod(self.shape)


@dataclass(frozen=True)
class LayerName:
    """Takes the place of a layer of a chain."""

    name: str


@dataclass(frozen=True, eq=False)
class ChainShapes:
    """Takes the place of a chain (`chain/chain.py`): its layers, and the parameters that each of them owns."""

    layers: tuple[LayerName, ...]
    owned: tuple[Mapping[str, ParameterShape], ...]


@lru_cache(maxsize=256)
def shapes(spec: ModelSpec) -> ChainShapes:
    """The chain of a whole model: embedding, transformer layers, head."""
    names = ["embedding", *(f"layers.{index}" for index in range(spec.layers)), "head"]
    if spec.counted is not None:
        tables = [{key: ParameterShape(shape) for key, shape in table.items()} for table in spec.counted.tables]
        return ChainShapes(layers=tuple(map(LayerName, names)), owned=tuple(tables))
    table = {"embed.weight": (spec.vocabulary, spec.width)}
    if spec.family == "gpt2":
        table["positions.weight"] = (spec.positions, spec.width)
    norm = {"norm.weight": (spec.width,)} | ({"norm.bias": (spec.width,)} if spec.family == "gpt2" else {})
    head = norm | ({} if spec.tied else {"lm_head.weight": (spec.vocabulary, spec.width)})
    inner = _gpt2_layer(spec) if spec.family == "gpt2" else _llama_layer(spec)
    tables = [table, *[inner] * spec.layers, head]
    return ChainShapes(
        layers=tuple(map(LayerName, names)),
        owned=tuple(
            {f"{name}.{key}": ParameterShape(shape) for key, shape in table.items()}
            for name, table in zip(names, tables, strict=True)
        ),
    )


def widest_row(spec: ModelSpec) -> int:
    """Scalars of the longest row of any parameter: no block can be smaller."""
    return max(shape.numel() // shape.shape[0] for table in shapes(spec).owned for shape in table.values())


def _gpt2_layer(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    d, inner = spec.width, spec.inner
    return {
        "ln_1.weight": (d,), "ln_1.bias": (d,),
        "attn.c_attn.weight": (d, 3 * d), "attn.c_attn.bias": (3 * d,),
        "attn.c_proj.weight": (d, d), "attn.c_proj.bias": (d,),
        "ln_2.weight": (d,), "ln_2.bias": (d,),
        "mlp.c_fc.weight": (d, inner), "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, d), "mlp.c_proj.bias": (d,),
    }  # fmt: skip


def _llama_layer(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    d, q, kv, inner, experts = spec.width, spec.query_width, spec.kv_width, spec.inner, spec.experts
    table: dict[str, tuple[int, ...]] = {}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        table[f"self_attn.{name}_proj.weight"] = (rows, d)
        if spec.qkv_bias:
            table[f"self_attn.{name}_proj.bias"] = (rows,)
    table["self_attn.o_proj.weight"] = (d, q)
    if spec.head_norms == "heads":
        table |= {f"self_attn.{name}_norm.weight": (spec.head_width,) for name in "qk"}
    if experts > 1:
        table["mlp.gate.weight"] = (experts, d)
        table["mlp.experts.gate_up_proj"] = (experts, 2 * inner, d)
        table["mlp.experts.down_proj"] = (experts, d, inner)
    else:
        table |= {f"mlp.{name}_proj.weight": (inner, d) for name in ("gate", "up")}
        table["mlp.down_proj.weight"] = (d, inner)
    return table | {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}


@lru_cache(maxsize=64)
def cut_up_to(spec: ModelSpec, largest: int) -> tuple[tuple[Segment, ...], ...]:
    """The blocks that `partition(model, largest=...)` makes; raises `PartitionError` as it does."""
    cut = segments_up_to(cast(Any, shapes(spec)), largest)
    groups = balanced_up_to([piece.size for piece in cut], largest)
    return tuple(tuple(cut[index] for index in group) for group in groups)


@lru_cache(maxsize=256)
def cut_into(spec: ModelSpec, blocks: int) -> tuple[tuple[Segment, ...], ...]:
    """The blocks that `partition(model, blocks, pieces="modules")` makes; raises `PartitionError` as it does."""
    cut = module_segments(cast(Any, shapes(spec)))
    return tuple(tuple(cut[index] for index in group) for group in balanced([piece.size for piece in cut], blocks))
