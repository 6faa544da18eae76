"""What blocktrain is compared with: the same configuration, data, events and evaluation, another method."""
