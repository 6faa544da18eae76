"""What fits, how long it takes and what it costs, before anything is rented. Nothing here but `calibrate` and `verify`
imports PyTorch, so that a plan answers at once."""
