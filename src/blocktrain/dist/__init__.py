"""Several processes: who is who, what they add up, and whether they still agree."""
