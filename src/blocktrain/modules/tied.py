"""One matrix that is embedding and output projection: its two gradients become one in the memory of the first.

                 autograd alone                         joined
    head         V x d                                  V x d
    embedding    V x d, zeros but for the batch's rows  tokens x d, added to their rows above
    sum          V x d                                  -
    at once      3 (V x d)                              1 (V x d), and tokens x d

Autograd cannot know that nobody else looks at the head's gradient: it makes the embedding's as large, and a third one
for their sum. Here the embedding hands the weight out once more, for the head, so that the head's gradient comes to the
backward pass of the lookup first. Each row is the sum of the same numbers in the same order as before, so gradients
stay bit for bit (CPU), and whoever waits for the weight's gradient gets one, as before.

The model's code is untouched: where it does not call its output layer (a fused loss that takes the weight), autograd
adds the two as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from blocktrain.modules.wrap import Around, standing_in, unwrapped, wrap_forward

NO_PADDING = -1

_joined: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()  # model -> what undoes it


def share_gradients(model: nn.Module) -> None:
    """Let the gradients of each trained matrix that is an embedding and a linear output layer of `model` take the room
    of one, until `unshare_gradients`."""
    if model in _joined:
        return
    removes = []
    for embedding in model.modules():
        if not isinstance(embedding, nn.Embedding) or not embedding.weight.requires_grad:
            continue
        heads = [head for head in model.modules() if type(head) is nn.Linear and head.weight is embedding.weight]
        if heads:
            shared = _Shared()
            removes.append(wrap_forward(embedding, _AroundEmbedding(embedding, shared)))
            removes += [wrap_forward(head, _AroundHead(head, shared)) for head in heads]

    def undo() -> None:
        for remove in removes:
            remove()

    if removes:
        _joined[model] = undo


def unshare_gradients(model: nn.Module) -> None:
    """Leave `model` as it was before `share_gradients`."""
    _joined.pop(model, _nothing)()


@dataclass(eq=False)
class _Shared:
    """Between a lookup and the head's run: the weight as the head is to see it."""

    for_head: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _AroundEmbedding:
    module: nn.Embedding
    shared: _Shared

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        weight = self.module.weight
        if not (torch.is_grad_enabled() and weight.requires_grad) or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        with _LookingUp(weight, self.shared):
            return run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Around:
        return unwrapped


@dataclass(frozen=True, eq=False)
class _AroundHead:
    module: nn.Linear
    shared: _Shared

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        weight, self.shared.for_head = self.shared.for_head, None
        if weight is None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with standing_in(self.module, {"weight": weight}):
            return run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Around:
        return unwrapped


class _LookingUp(TorchFunctionMode):
    """Inside, a lookup in `weight` is ours, whatever else the embedding does with what it finds (Gemma scales it)."""

    def __init__(self, weight: Tensor, shared: _Shared):
        super().__init__()
        self.weight, self.shared = weight, shared

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        as_usual = any(kwargs.get(key) for key in ("max_norm", "scale_grad_by_freq", "sparse"))
        if func is not F.embedding or args[1] is not self.weight or as_usual:
            return func(*args, **kwargs)
        padding = kwargs.get("padding_idx")
        found, self.shared.for_head = _Lookup.apply(
            self.weight, args[0], NO_PADDING if padding is None else padding % len(self.weight)
        )
        return found


class _Lookup(torch.autograd.Function):
    """(V, d) weight and ids (...) to vectors (..., d), and the weight once more.

    What belongs to the backward pass are plain attributes: ids are no part of the graph.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        """See the class."""
        ctx.ids, ctx.rows, ctx.padding = ids, len(weight), padding
        ctx.set_materialize_grads(False)
        return F.embedding(ids, weight), weight.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Of the vectors (..., d), and of the head's use (V, d), whose memory the sum is in."""
        found, total = grad_outputs
        if found is None:
            return total, None, None
        if total is None or torch.is_grad_enabled():  # nothing to add to, or to be differentiated again
            whole = torch.ops.aten.embedding_dense_backward(found, ctx.ids, ctx.rows, ctx.padding, False)
            return whole if total is None else total + whole, None, None
        if ctx.padding != NO_PADDING:
            found = found.masked_fill((ctx.ids == ctx.padding).unsqueeze(-1), 0)
        places, rows = _occurring(ctx.ids, ctx.rows)
        shares = torch.ops.aten.embedding_dense_backward(found, places, len(rows), NO_PADDING, False)
        return total.index_add_(0, rows, shares), None, None


def _occurring(ids: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The different ids, ascending, and of each of `ids` its place among them; int64, of the shape of `ids`.

    Shapes must not depend on values (tensors without memory have none, and a GPU would have to be waited for): there is
    room for as many as there can be, and what is left over says row 0, to which nothing will be added.
    """
    ascending, order = ids.flatten().long().sort()
    number = torch.zeros_like(ascending)
    number[1:] = (ascending[1:] != ascending[:-1]).cumsum(0)
    places = torch.empty_like(number).scatter_(0, order, number)
    rows = ascending.new_zeros(min(len(ascending), most)).scatter_(0, number, ascending)
    return places.view(ids.shape), rows


def _nothing() -> None:
    pass
