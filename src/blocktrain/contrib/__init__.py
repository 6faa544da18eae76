"""Experiments of ours that are not the paper's. They import the core; the core does not import them."""
