"""Blocks: how a chain of layers is divided, and which part of a model is active."""
