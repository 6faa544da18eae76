"""A matrix that is both embedding and output projection: its two gradients become one, in the memory of the first.

                 autograd alone                         shared
    head         V x d                                  V x d
    embedding    V x d, zero outside the batch's rows   tokens x d, added to their rows above
    sum          V x d                                  -
    at once      3 (V x d)                              1 (V x d), and tokens x d

Autograd cannot know that nobody else reads the head's gradient, so it makes the embedding's gradient as large, and a
third tensor for their sum. Here the embedding returns the weight a second time, for the head to use. The head's
gradient then reaches the backward pass of the lookup, which adds its own rows to it. Each row is the sum of the same
numbers in the same order as before, so gradients stay equal bit for bit (on a CPU), and a hook on the weight's gradient
is called once, as before.

The model's code is untouched. Where it does not call its output layer (a fused loss that takes the weight), autograd
adds the two gradients as it always does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from blocktrain.modules.wrap import NotCopied, substituted_parameters, wrap_forward

NO_PADDING = -1

_undo: WeakKeyDictionary[nn.Module, ExitStack] = WeakKeyDictionary()  # by model: removes its wrappers


def share_gradients(model: nn.Module) -> None:
    """Let each trained matrix of `model` that is an embedding and a linear output layer have one gradient in memory at
    a time, until `unshare_gradients`. One that several embeddings have (an encoder's and a decoder's) is left to
    autograd, which would add their gradients in another order."""
    if model in _undo:
        return
    undo = ExitStack()
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for embedding in embeddings:
        alone = sum(other.weight is embedding.weight for other in embeddings) == 1
        if not alone or not embedding.weight.requires_grad:
            continue
        heads = [head for head in model.modules() if type(head) is nn.Linear and head.weight is embedding.weight]
        if heads:
            wrapper = _EmbeddingWrapper(embedding)
            undo.callback(wrap_forward(embedding, wrapper))
            for head in heads:
                undo.callback(wrap_forward(head, _HeadWrapper(head, wrapper)))
            _undo[model] = undo


def unshare_gradients(model: nn.Module) -> None:
    """Leave `model` as it was before `share_gradients`."""
    if model in _undo:
        _undo.pop(model).close()


@dataclass(eq=False)
class _EmbeddingWrapper(NotCopied):
    """Passes the weight from the lookup to the head: `for_head` is set between the two."""

    module: nn.Embedding
    for_head: Tensor | None = None

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        weight = self.module.weight
        if not (torch.is_grad_enabled() and weight.requires_grad) or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        with _ReplaceLookup(weight, self):
            return run(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _HeadWrapper(NotCopied):
    module: nn.Linear
    embedding: _EmbeddingWrapper

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        weight, self.embedding.for_head = self.embedding.for_head, None
        if weight is None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with substituted_parameters(self.module, {"weight": weight}):
            return run(*args, **kwargs)


class _ReplaceLookup(TorchFunctionMode):
    """Inside, a lookup in `weight` is `_Lookup`, whatever else the embedding does with the result (Gemma scales it)."""

    def __init__(self, weight: Tensor, wrapper: _EmbeddingWrapper):
        super().__init__()
        self.weight, self.wrapper = weight, wrapper

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        needs_own_kernel = any(kwargs.get(key) for key in ("max_norm", "scale_grad_by_freq", "sparse"))
        if func is not F.embedding or args[1] is not self.weight or needs_own_kernel:
            return func(*args, **kwargs)
        padding = kwargs.get("padding_idx")
        vectors, self.wrapper.for_head = _Lookup.apply(
            self.weight, args[0], NO_PADDING if padding is None else padding % len(self.weight)
        )
        return vectors


class _Lookup(torch.autograd.Function):
    """(V, d) weight and ids (...) -> vectors (..., d), and the weight once more, for the head.

    What the backward pass needs is kept in plain attributes, because ids are no part of the graph.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        """See the class."""
        ctx.ids, ctx.rows, ctx.padding = ids, len(weight), padding
        ctx.set_materialize_grads(False)
        return F.embedding(ids, weight), weight.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Gradients of the vectors (..., d) and of the head's use of the weight (V, d) -> their sum, in the memory of
        the second."""
        of_vectors, total = grad_outputs
        if of_vectors is None:
            return total, None, None
        if total is None or torch.is_grad_enabled():  # nothing to add to, or the result is to be differentiated again
            dense = torch.ops.aten.embedding_dense_backward(of_vectors, ctx.ids, ctx.rows, ctx.padding, False)
            return dense if total is None else total + dense, None, None
        if ctx.padding != NO_PADDING:
            of_vectors = of_vectors.masked_fill((ctx.ids == ctx.padding).unsqueeze(-1), 0)
        places, rows = _distinct(ctx.ids, ctx.rows)
        shares = torch.ops.aten.embedding_dense_backward(of_vectors, places, len(rows), NO_PADDING, False)
        return total.index_add_(0, rows, shares), None, None


def _distinct(ids: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(places, rows): `rows` (int64, 1-d) lists the distinct ids in ascending order, `places` (int64, the shape of
    `ids`) says where in `rows` each id is.

    Shapes must not depend on values: fake tensors have none, and a GPU would have to be waited for. So `rows` has as
    many entries as there can be distinct ids (at most `most`); those left over say row 0, to which nothing is added.
    """
    ascending, order = ids.flatten().long().sort()
    number = torch.zeros_like(ascending)
    number[1:] = (ascending[1:] != ascending[:-1]).cumsum(0)
    places = torch.empty_like(number).scatter_(0, order, number)
    rows = ascending.new_zeros(min(len(ascending), most)).scatter_(0, number, ascending)
    return places.view(ids.shape), rows
