"""The prefix cache: stores, ledger, encodings and its cost model."""
