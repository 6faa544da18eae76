"""The layer chain of a model, its cost per layer, and the paper's CIFAR ResNets."""
