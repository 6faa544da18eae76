"""Cross-entropy of a language model without its logits: output layer and loss are computed some tokens at a time.

    hidden (B, T, d) -> [lm_head] -> logits (B, T, V) -> scale, soft cap -> shift, flatten -> cross-entropy
                                     not computed        recorded           by the model      in chunks of tokens

At a vocabulary of 128k, 4 x 1024 tokens have 2 GiB of fp32 logits, and a loss holds them three times over. Here the
output layer returns `DeferredLogits`, which hold its hidden states. The model's own code treats them as it treats
logits (Gemma caps them, Cohere scales them, transformers shifts labels and divides by `num_items_in_batch`), and only
the cross-entropy at the end computes them, chunk by chunk, together with their gradients. Nothing is computed twice,
and no chunk's logits outlive it. A model that does anything else with its logits is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from blocktrain.errors import ConfigError
from blocktrain.modules.wrap import substituted_parameters, wrap_forward

PROBE_TOKENS = 7  # a chunk of `check_chunked`, small enough for a batch to have several

Head = Callable[[Tensor], Tensor]

_WAY_OUT = "leave loss_chunk out, or call the model outside of chunked_loss"


@contextmanager
def chunked_loss(model: nn.Module, tokens: int) -> Iterator[None]:
    """Inside, `model(**batch).loss` of a Hugging Face causal LM is computed `tokens` tokens at a time.

    Loss and gradients are the model's own up to rounding: sums over chunks are taken in fp32, in another order.
    `output.logits` are `DeferredLogits` (`whole_logits` computes them), and the loss cannot be differentiated twice.

    Raises `ConfigError` for a model without an output layer, and at its first step for a model that does more with its
    logits than scale them, cap them and pass them to the cross-entropy.
    """
    if tokens < 1:
        raise ConfigError(f"the loss cannot be computed {tokens} tokens at a time; give 1 or more")
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ConfigError(f"{type(model).__name__} has no output layer over a vocabulary; {_WAY_OUT}")
    remove = wrap_forward(head, _HeadWrapper(head, tokens))
    try:
        yield
    finally:
        remove()


def whole_logits(logits: Any) -> Tensor:
    """The logits of a model's output, computed now if `chunked_loss` left them out."""
    return logits.through(logits.hidden) if isinstance(logits, DeferredLogits) else logits


@torch.no_grad()
def check_chunked(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Run `batch` (with labels) once with a chunked loss; raises `ConfigError` for a model that cannot have one."""
    with chunked_loss(model, PROBE_TOKENS):
        try:
            output = model(**batch)
        except (NotDeferredError, TypeError) as error:
            raise ConfigError(f"the loss of {type(model).__name__} cannot be computed in chunks: {error}") from error
    if not isinstance(output.logits, DeferredLogits):
        raise ConfigError(f"the logits of {type(model).__name__} are not what its output layer returns; {_WAY_OUT}")


class NotDeferredError(ConfigError, AttributeError):
    """An operation needs the logits themselves."""

    def __init__(self, operation: str):
        super().__init__(
            f"'{operation}' needs logits, which a loss in chunks of tokens never has in one piece; {_WAY_OUT}"
        )


class _HeadWrapper:
    """The wrapper around the output layer: it returns `DeferredLogits`."""

    def __init__(self, module: nn.Module, tokens: int):
        self.module = module
        self.tokens = tokens

    def __call__(self, run: Head, hidden: Tensor) -> DeferredLogits:
        trained = tuple(parameter for parameter in self.module.parameters() if parameter.requires_grad)
        weights = dict(self.module._parameters)

        def head(hidden: Tensor) -> Tensor:
            """Run the output layer, later, with the weights that it has now."""
            with substituted_parameters(self.module, weights):
                return run(hidden)

        return DeferredLogits(hidden, head, trained, self.tokens)


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Logits (..., V) that are not computed yet: `hidden` (..., d) through `head`, then through all `operations`."""

    hidden: Tensor
    head: Head
    trained: tuple[nn.Parameter, ...]  # the head's parameters that require gradients
    chunk_tokens: int
    operations: tuple[Head, ...] = ()

    def cross_entropy(self, target: Tensor, *, reduction: str = "mean", ignore_index: int = -100) -> Tensor:
        """The loss (0-d) of logits (tokens, V) and int64 targets (tokens,): a sum, or the mean over all targets that
        are not ignored."""
        if self.hidden.dim() != 2 or reduction not in ("mean", "sum"):
            raise NotDeferredError(f"cross_entropy of shape {tuple(self.hidden.shape[:-1])}, reduction {reduction}")
        count = (target != ignore_index).sum() if reduction == "mean" else target.new_ones(())

        def loss_of(part: slice, hidden: Tensor) -> Tensor:
            loss = F.cross_entropy(self.through(hidden), target[part], ignore_index=ignore_index, reduction="sum")
            return loss / count

        if not torch.is_grad_enabled():
            return _ChunkedSum.apply(loss_of, self.chunk_tokens, self.hidden.detach())
        return _ChunkedSum.apply(loss_of, self.chunk_tokens, self.hidden, *self.trained)

    def through(self, hidden: Tensor) -> Tensor:
        """Compute the logits (..., V) of `hidden` (..., d): all, or those of a chunk."""
        logits = self.head(hidden)
        for operation in self.operations:
            logits = operation(logits)
        return logits

    # -- operations that models apply to their logits -------------------------------------------------------------

    def __mul__(self, scale: float) -> DeferredLogits:
        return self._with(lambda logits: logits * scale)

    __rmul__ = __mul__

    def __truediv__(self, scale: float) -> DeferredLogits:
        return self._with(lambda logits: logits / scale)

    def tanh(self) -> DeferredLogits:
        """Part of a soft cap."""
        return self._with(torch.tanh)

    def float(self) -> DeferredLogits:
        """The logits in fp32."""
        return self._with(Tensor.float)

    def to(self, *where: Any, **how: Any) -> DeferredLogits:
        """The logits in another precision or on another device."""
        return self._with(lambda logits: logits.to(*where, **how))

    def contiguous(self) -> DeferredLogits:
        """Itself: logits are contiguous when they are computed."""
        return self

    def view(self, *shape: int) -> DeferredLogits:
        """Flattened to (tokens, V), the only other shape that is supported."""
        if len(shape) != 2 or shape[0] not in (-1, self.hidden.shape[:-1].numel()):
            raise NotDeferredError(f"view{shape}")
        return replace(self, hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> DeferredLogits:
        """Some of the tokens with the whole vocabulary, such as `[..., :-1, :]`."""
        parts = index if isinstance(index, tuple) else (index,)
        to_the_end = Ellipsis in parts or len(parts) == self.hidden.dim()
        cuts_vocabulary = to_the_end and parts[-1] not in (slice(None), Ellipsis)
        if cuts_vocabulary or not all(part is Ellipsis or isinstance(part, slice) for part in parts):
            raise NotDeferredError(f"logits[{index}]")
        return replace(self, hidden=self.hidden[index])

    @property
    def device(self) -> torch.device:
        """Where the logits will be computed."""
        return self.hidden.device

    def _with(self, operation: Head) -> DeferredLogits:
        return replace(self, operations=(*self.operations, operation))

    def __getattr__(self, name: str) -> Any:
        raise NotDeferredError(name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """PyTorch calls this when one of its functions gets deferred logits."""
        kwargs = dict(kwargs or {})
        logits, *others = args
        if function is torch.tanh:
            return logits.tanh()
        if function is F.cross_entropy and isinstance(logits, DeferredLogits):
            for name in ("weight", "label_smoothing", "size_average", "reduce"):
                value = kwargs.pop(name, None)
                if isinstance(value, Tensor) or value:
                    raise NotDeferredError(f"cross_entropy with {name}")
            return logits.cross_entropy(*others, **kwargs)
        raise NotDeferredError(getattr(function, "__name__", str(function)))


class _ChunkedSum(torch.autograd.Function):
    """Sum over chunks of tokens of `loss_of(part, hidden[part])`. Gradients are taken at once, chunk by chunk.

    Gradients of `trained` are summed over the chunks in fp32 and rounded once to each parameter's own precision; the
    backward pass scales the rounded ones. Memory: while a chunk's share is added, two (V, d) in fp32; from then until
    the backward pass one (V, d) in the parameter's precision.
    """

    @staticmethod
    def forward(
        ctx: Any, loss_of: Callable[[slice, Tensor], Tensor], chunk_tokens: int, hidden: Tensor, *trained: Tensor
    ) -> Tensor:
        """(tokens, d) hidden states -> the loss (0-d)."""
        ctx.needs_gradient = [tensor.requires_grad for tensor in (hidden, *trained)]
        of_hidden = torch.empty_like(hidden) if hidden.requires_grad else None  # (tokens, d)
        of_trained = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]

        def add(part: slice) -> Tensor:
            """A chunk's loss. Its gradients are freed on return, before the next chunk makes its own (V, d)."""
            piece = hidden[part].detach().requires_grad_(hidden.requires_grad)
            loss = loss_of(part, piece)
            if any(ctx.needs_gradient):
                inputs = [piece, *trained] if of_hidden is not None else [*trained]
                gradients = list(torch.autograd.grad(loss, inputs))
                if of_hidden is not None:
                    of_hidden[part] = gradients.pop(0)
                for total, gradient in zip(of_trained, gradients, strict=True):
                    total.add_(gradient)
            return loss.detach()

        # What a chunk saves for its gradients is read at once: hooks that count, offload or recompute do not see it.
        with (
            torch.set_grad_enabled(any(ctx.needs_gradient)),
            saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
        ):
            losses = [add(slice(start, start + chunk_tokens)) for start in range(0, len(hidden), chunk_tokens)]
        rounded = [total.to(parameter.dtype) for total, parameter in zip(of_trained, trained, strict=True)]
        ctx.save_for_backward(*([] if of_hidden is None else [of_hidden]), *rounded)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Scale the gradients that the forward pass has taken."""
        gradients = [grad_outputs[0] * gradient for gradient in ctx.saved_tensors]
        return None, None, *(gradients.pop(0) if needed else None for needed in ctx.needs_gradient)
