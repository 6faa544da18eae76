"""What this package adds to `nn.Module`s: wrapped forward passes, placeholders, recomputation."""
