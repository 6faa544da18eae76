"""Counting without running: copies of a model without memory, tracked bytes, FLOPs."""
