"""Additions to `nn.Module`s: wrapped forward passes, placeholders, recomputation, chunked losses, kernels."""
