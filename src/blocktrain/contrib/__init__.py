"""Experiments of ours that are not the paper's. They import the mechanisms; `train/` puts them together."""
