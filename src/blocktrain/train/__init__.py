"""The only place where the mechanisms meet: configuration, the loop, checkpoints, evaluation."""
