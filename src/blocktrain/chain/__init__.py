"""A model as a chain of layers, cut into blocks."""
