"""The block optimizer: any torch.optim class on one block at a time, with its master, moments and state store."""
