"""Blocktrain inside other people's loops and tools: Hugging Face Trainer, TRL, Lightning; trackers; the hub."""
