"""The only place where the mechanisms meet: configuration, the trainer, checkpoints, evaluation."""
