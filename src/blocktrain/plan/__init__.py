"""What fits, how long it takes and what it costs, before anything is rented. Only `calibrate.py` imports PyTorch, so a
plan answers at once."""
