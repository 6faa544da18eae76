"""What one layer does, operation by operation: products, memory traffic, and what autograd saves for the backward pass.

    y = x W        keeps x only if W is trained (W itself exists anyway)
    norm           keeps its input and a statistic per token; RMSNorm also the normalized input if its weight is trained
    attention      keeps queries, keys, values, its output and a logarithm of a sum for each head
    gelu, silu *   keep what their derivative reads, an entry for each elementary operation they are written in
    residual add   keeps nothing

A tensor that two operations keep is counted at the first. The numbers are per token and come from the code of
transformers 5 with SDPA attention and no dropout; `tests/plan/test_operations.py` compares them with the storages that
autograd really keeps. One table gives activations, FLOPs and memory traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blocktrain.plan.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One step of a layer, per token. Numbers are elements of the compute dtype unless their name says otherwise."""

    name: str
    weights: int = 0  # scalars of the matrix multiplied; two FLOPs each
    scores: int = 0  # of attention: FLOPs per token and per position that it attends to
    traffic: float = 0.0  # read and written by elementwise kernels, forward
    kernels: int = 1  # launched, forward
    keeps: float = 0.0  # for the gradient of its input
    keeps_fp32: float = 0.0  # for that gradient too, but in fp32 whatever the compute dtype is
    keeps_trained: float = 0.0  # beside these, if its weight is trained


def layer_operations(spec: ModelSpec, dtype_bytes: int) -> tuple[Operation, ...]:
    """A transformer layer's forward pass. dtype_bytes: 4 or 2, of the compute dtype."""
    return tuple(_gpt2_layer(spec) if spec.family == "gpt2" else _llama_layer(spec, dtype_bytes))


def attention_of(operations: Sequence[Operation]) -> Sequence[Operation]:
    """The operations of a layer's attention: all up to the first residual addition."""
    names = [operation.name for operation in operations]
    return operations[: names.index("add") + 1]


def _gpt2_layer(spec: ModelSpec) -> Iterator[Operation]:
    d, inner = spec.width, spec.inner
    yield _layer_norm("ln_1", d)
    yield Operation(name="c_attn", weights=3 * d * d, traffic=4 * d, keeps_trained=d)
    yield _attention(spec)
    yield Operation(name="attn.c_proj", weights=d * d, traffic=2 * d)
    yield Operation(name="add", traffic=3 * d)
    yield _layer_norm("ln_2", d)
    yield Operation(name="c_fc", weights=d * inner, traffic=d + inner, keeps_trained=d)
    yield Operation(name="gelu_new", traffic=18 * inner, kernels=8, keeps=4 * inner)
    yield Operation(name="mlp.c_proj", weights=inner * d, traffic=inner + d, keeps_trained=inner)
    yield Operation(name="add", traffic=3 * d)


def _llama_layer(spec: ModelSpec, dtype_bytes: int) -> Iterator[Operation]:
    d, q, kv, inner = spec.width, spec.query_width, spec.kv_width, spec.inner
    yield _rms_norm("input_layernorm", d, dtype_bytes)
    yield Operation(name="q k v", weights=d * (q + 2 * kv), traffic=3 * d + q + 2 * kv, kernels=3, keeps_trained=d)
    if spec.head_norms == "heads":
        yield _rms_norm("q_norm k_norm", q + kv, dtype_bytes, statistics=spec.heads + spec.kv_heads, kernels=12)
    yield Operation(name="rotary", traffic=11 * (q + kv), kernels=10)
    yield _attention(spec)
    yield Operation(name="o_proj", weights=q * d, traffic=q + d)
    yield Operation(name="add", traffic=3 * d)
    yield _rms_norm("post_attention_layernorm", d, dtype_bytes)
    if spec.experts == 1:
        yield Operation(name="gate up", weights=2 * d * inner, traffic=2 * (d + inner), kernels=2, keeps_trained=d)
        yield Operation(name="silu mul", traffic=5 * inner, kernels=2, keeps=3 * inner)
        yield Operation(name="down_proj", weights=inner * d, traffic=inner + d, keeps_trained=inner)
    else:  # each token's copies are gathered, one for each expert; the experts' outputs are weighted and added
        used = spec.experts_used
        yield Operation(name="router", weights=d * spec.experts, traffic=d, kernels=6, keeps_trained=d)
        yield Operation(
            name="gate up", weights=used * 2 * d * inner, traffic=used * 2 * (d + inner), kernels=4,
            keeps_trained=used * d,
        )  # fmt: skip
        yield Operation(name="silu mul", traffic=used * 5 * inner, kernels=2, keeps=used * 3 * inner)
        yield Operation(
            name="down_proj", weights=used * inner * d, traffic=used * (inner + 4 * d), kernels=4, keeps=used * d,
            keeps_trained=used * inner,
        )  # fmt: skip
    yield Operation(name="add", traffic=3 * d)


def _layer_norm(name: str, width: int) -> Operation:
    """One kernel, which keeps the mean and the inverse deviation of each token beside the input."""
    return Operation(name=name, traffic=2 * width, keeps=width + 2)


def _rms_norm(name: str, width: int, dtype_bytes: int, *, statistics: int = 1, kernels: int = 6) -> Operation:
    """Elementary operations in fp32: `weight * (x * rsqrt(mean(x^2))).to(dtype)`."""
    traffic = 11 * width * max(1, 3 / dtype_bytes)
    return Operation(name=name, traffic=traffic, kernels=kernels, keeps_fp32=width + statistics, keeps_trained=width)


def _attention(spec: ModelSpec) -> Operation:
    q, kv = spec.query_width, spec.kv_width
    return Operation(name="attention", scores=4 * q, traffic=2 * (q + kv), keeps=2 * q + 2 * kv, keeps_fp32=spec.heads)


def head_operations(spec: ModelSpec, dtype_bytes: int) -> tuple[Operation, ...]:
    """Final norm and output projection. The loss, over the vocabulary in fp32, is in `loss_operations`."""
    d = spec.width
    norm = _layer_norm("ln_f", d) if spec.family == "gpt2" else _rms_norm("norm", d, dtype_bytes)
    return norm, Operation(name="lm_head", weights=d * spec.vocabulary, traffic=d + spec.vocabulary, keeps_trained=d)


def loss_operations(spec: ModelSpec) -> tuple[Operation, ...]:
    """Cross-entropy: the logits' log-softmax is kept; in bf16 the logits are first copied to fp32."""
    return (Operation(name="cross_entropy", traffic=3 * spec.vocabulary, kernels=4, keeps_fp32=spec.vocabulary),)


def kept_bytes(operations: Iterable[Operation], dtype_bytes: int, *, trained: bool) -> float:
    """Bytes kept for the backward pass, per token."""
    return sum((op.keeps + (op.keeps_trained if trained else 0)) * dtype_bytes + op.keeps_fp32 * 4 for op in operations)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One forward pass of some operations over one token of a sequence of a given length."""

    matrix_flops: float  # w: also the price of its activation gradients, and of its weight gradients
    attention_flops: float  # a
    attention_backward_flops: float  # b = 2.5 a: a fused kernel computes the scores again
    traffic_elements: float
    kernels: float


def work(operations: Sequence[Operation], seq: int) -> Work:
    """The sum over `operations`. As in `torch.utils.flop_counter`, masked scores count."""
    attention = sum(op.scores for op in operations) * seq
    return Work(
        matrix_flops=2.0 * sum(op.weights for op in operations),
        attention_flops=float(attention),
        attention_backward_flops=2.5 * attention,
        traffic_elements=sum(op.traffic for op in operations),
        kernels=float(sum(op.kernels for op in operations)),
    )
