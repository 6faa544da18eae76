"""Experiments of this project that are not part of the paper's method. The core does not import them."""
